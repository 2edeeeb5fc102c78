"""The command line: `mii serve`, `generate`, `chat`, `ps`, `logs`, `stop` and others.

Each command lives in a module of its own, imported when it runs, so that `mii --help` is quick.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from mii.engine.params import check_params
from mii.errors import InvalidArgument, MIIError
from mii.option_checks import Boolean
from mii.option_table import OPTIONS, Option

_USAGE_ERROR = 2

_DESCRIPTION = """\
Serve large language models, on a laptop's CPU or on GPUs, and talk to them.

examples:
  mii serve smollm2                        serve the built-in model until Ctrl-C
  mii serve ./my-model --replica-num 2 --enable-rest
  mii chat smollm2                         talk to it in the terminal
  mii generate smollm2 "DeepSpeed is"      answer one prompt
  mii plan Qwen/Qwen3-0.6B                 what would be started, and why
"""

_MODEL_HELP = (
    "a folder in Hugging Face form, a .gguf file, a name on the Hugging Face hub, or smollm2"
)
_TARGET_HELP = (
    "a running deployment or its model (see mii ps), host:port of a router, or a model, which is "
    "then served just for this command"
)

_SERVE = """\
Serve a model. It runs in the foreground and Ctrl-C stops it; with --detach it runs on until
`mii stop`. The model is given as a folder in Hugging Face form, a .gguf file, a name on the
Hugging Face hub, or smollm2, the built-in one.

examples:
  mii serve smollm2
  mii serve ./my-model --enable-rest --rest-port 8000
  mii serve model.gguf --replica-num 2 --max-length 4096
  mii serve Qwen/Qwen3-4B-Instruct-2507 --tensor-parallel 2 --host 0.0.0.0 --detach
"""

_GENERATE = """\
Answer prompts. One prompt's answer is printed while it comes.

examples:
  mii generate smollm2 "The capital of France is" --max-new-tokens 32
  mii generate smollm2 "first prompt" "second prompt" --temperature 0
  mii generate localhost:50050 - < prompt.txt
"""

_CHAT = """\
Talk to a model. Ctrl-C stops an answer; /exit or Ctrl-D leaves, /clear begins anew.

examples:
  mii chat                                 the deployment that runs, else smollm2
  mii chat smollm2 --temperature 0.7 --system "You answer in rhymes."
"""

_LOGS = """\
Show the logs of a deployment, also of one that has ended.

examples:
  mii logs smollm2 -f
  mii logs smollm2 --process worker-0-0 -n 200
"""


_BENCH = """\
Put load on a server and measure what its users would feel: time to the first token, time between
tokens, throughput, and how many requests were served well. The server is any with the OpenAI API,
or a deployment over gRPC. Keys come from $MII_API_KEY or $OPENAI_API_KEY.

examples:
  mii bench smollm2 --clients 8 --requests 64 --input 128 --output 64
  mii bench http://localhost:8000 --model my-model --rate 4 --input sharegpt --output sharegpt
  mii bench http://localhost:28080 --rate 2 --sla-ttft 1 --json run.json --png run.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 after a failure, 2 after wrong arguments."""
    parsed = make_parser().parse_args(arguments)
    logging.basicConfig(format="mii: %(message)s", level=logging.WARNING)
    debug = parsed.debug or os.environ.get("MII_DEBUG", "0") not in ("", "0")
    module, _, function = parsed.command.partition(":")
    command: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
    try:
        return command(parsed)
    except MIIError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR if isinstance(error, InvalidArgument) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="mii", description=_DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--debug", action="store_true", help="show where in the code errors arise")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = _command(commands, "serve", "mii.cli_serve:serve", "serve a model", _SERVE)
    serve.usage = "mii serve MODEL [--detach] [options]"
    serve.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    serve.add_argument("--detach", "-d", action="store_true", help="run on in the background")
    _add_options(serve)

    generate = _command(
        commands, "generate", "mii.cli_generate:generate", "answer prompts", _GENERATE
    )
    generate.add_argument("target", metavar="MODEL_OR_NAME", help=_TARGET_HELP)
    generate.add_argument("prompts", metavar="PROMPT", nargs="+", help="- reads standard input")
    generate.add_argument("--json", action="store_true", help="print a JSON object a prompt")
    _add_parameters(generate)

    chat = _command(commands, "chat", "mii.cli_generate:chat", "talk to a model", _CHAT)
    chat.add_argument("target", metavar="NAME_OR_MODEL", nargs="?", help=_TARGET_HELP)
    chat.add_argument("--system", metavar="TEXT", help="how the model should behave")
    _add_parameters(chat)

    ps = _command(commands, "ps", "mii.cli_deployments:ps", "list deployments", "List deployments.")
    ps.add_argument("--all", "-a", action="store_true", help="show their processes, too")

    logs = _command(commands, "logs", "mii.cli_deployments:logs", "show logs", _LOGS)
    logs.add_argument("name", metavar="NAME", help="the deployment or its model")
    logs.add_argument("--follow", "-f", action="store_true", help="go on as long as it runs")
    logs.add_argument("--lines", "-n", type=int, default=50, metavar="N", help="last N lines (50)")
    logs.add_argument("--process", "-p", metavar="PROCESS", help="supervisor, router, worker-0-0")

    stop = _command(
        commands, "stop", "mii.cli_deployments:stop", "end deployments", "End deployments."
    )
    stop.add_argument("names", metavar="NAME", nargs="*", help="the deployments or their models")
    stop.add_argument("--all", action="store_true", help="every deployment of this cache folder")

    restart = _command(
        commands,
        "restart",
        "mii.cli_operations:restart",
        "start replicas anew without losing a request",
        "Start a deployment's replicas anew, one after the other. No request is lost: those of\n"
        "the replica whose turn it is go on at the others, or wait for it if there are none.",
    )
    restart.add_argument("name", metavar="NAME", help="the deployment or its model")
    restart.add_argument(
        "--router",
        action="store_true",
        help="start the router anew instead: workers stay, and clients connect again",
    )

    scale = _command(
        commands,
        "scale",
        "mii.cli_operations:scale",
        "change the number of replicas",
        "Give a deployment more or fewer replicas. No request is lost: those of replicas that are\n"
        "removed go on at the others.",
    )
    scale.add_argument("name", metavar="NAME", help="the deployment or its model")
    scale.add_argument("replicas", metavar="N", type=int, help="replicas wanted, 1 to 1024")

    plan = _command(
        commands,
        "plan",
        "mii.cli_serve:plan",
        "show what would be started, and why",
        "Show what `mii serve` with the same arguments would start, and why.",
    )
    plan.usage = "mii plan MODEL [options]"
    plan.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    _add_options(plan)
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = _command(
        commands, "bench", "mii.cli_bench:bench", "put load on a server and measure it", _BENCH
    )
    add = bench.add_argument
    add("target", metavar="TARGET", help="http(s)://host:port, or a deployment: name or host:port")
    add("--clients", "-c", type=int, metavar="N", help="a closed loop of N clients (16)")
    add("--rate", "-r", type=float, metavar="X", help="an open loop: X requests per second")
    add("--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson; below: bursts (1)")
    add("--requests", "-n", type=int, default=100, metavar="N", help="requests in all (100)")
    add("--input", default="512", metavar="N", help="tokens of a prompt, or sharegpt (512)")
    add("--output", default="128", metavar="N", help="tokens of an answer, or sharegpt (128)")
    add("--spread", type=float, default=0.0, metavar="X", help="of both lengths, 0.3: by 30 %% (0)")
    add("--shared", type=int, default=0, metavar="N", help="tokens that all prompts begin with (0)")
    add("--warmup", type=int, default=1, metavar="N", help="requests before, not counted (1)")
    add("--seed", type=int, default=0, metavar="N", help="of all that is drawn (0)")
    add("--model", default="default", metavar="NAME", help="the model's name, over HTTP (default)")
    add("--chat", action="store_true", help="over HTTP, ask by /v1/chat/completions")
    add("--sla-ttft", type=float, metavar="S", help="good requests: first token within S seconds")
    add("--sla-itl", type=float, metavar="S", help="good requests: S seconds between tokens")
    add("--sla-e2e", type=float, metavar="S", help="good requests: whole within S seconds")
    add("--json", metavar="FILE", help="write the figures there")
    add("--png", metavar="FILE", help="draw the latencies there (needs matplotlib)")


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the lines of its texts, and whose errors are one line."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> Any:
        print(f"error: {message} ({self.prog} --help shows what there is)", file=sys.stderr)
        sys.exit(_USAGE_ERROR)


class _Version(argparse.Action):
    """Prints the version, which takes a moment to look up."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        import mii

        print(f"mii {mii.__version__}")
        parser.exit()


def _command(commands: Any, name: str, function: str, short: str, text: str) -> Any:
    parser = commands.add_parser(name, help=short, description=text)
    parser.set_defaults(command=function)
    return parser


def _add_options(parser: Any) -> None:
    """Add the options of the table; those that are not given stay None."""
    for scope in ("deployment", "engine"):
        group = parser.add_argument_group(f"{scope} options")
        for option in OPTIONS:
            if option.scope == scope and option.name != "model_name_or_path":
                _add_option(group, option)


def _add_option(group: Any, option: Option) -> None:
    help_text = f"{option.doc} ({option.shown_default})".replace("%", "%%")
    for name, shown in (
        (option.name, help_text),
        *((a, argparse.SUPPRESS) for a in option.aliases),
    ):
        flag = f"--{name.replace('_', '-')}"
        if isinstance(option.check, Boolean):
            group.add_argument(
                flag, dest=option.name, help=shown, action=argparse.BooleanOptionalAction
            )
        else:
            metavar = option.check.metavar
            group.add_argument(
                flag, dest=option.name, help=shown, metavar=metavar, type=option.check.parse
            )


def options_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given."""
    return {
        option.name: getattr(parsed, option.name)
        for option in OPTIONS
        if getattr(parsed, option.name, None) is not None
    }


_PARAMETERS = (
    ("max_new_tokens", "N", "length of the answer in tokens (the rest of the context)"),
    ("temperature", "X", "0 takes the most probable token each time (1)"),
    ("top_p", "X", "draw among the most probable tokens that make up this share"),
    ("top_k", "N", "draw among the N most probable tokens"),
    ("min_p", "X", "draw among tokens at least this probable, relative to the best"),
    ("repetition_penalty", "X", "above 1: less repetition"),
    ("seed", "N", "the same seed gives the same answer"),
)


def _add_parameters(parser: Any) -> None:
    group = parser.add_argument_group("sampling parameters")
    for name, metavar, text in _PARAMETERS:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, dest=name, metavar=metavar, type=_number, help=text)
    group.add_argument(
        "--stop", metavar="TEXT", action="append", help="end the answer before this text"
    )


def _number(text: str) -> object:
    """Return a number, or the text itself, for whoever judges parameters to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parameters_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given.

    Raises:
        InvalidArgument: for a value of the wrong type or out of range.
    """
    names = [*(name for name, _, _ in _PARAMETERS), "stop"]
    given = {name: value for name in names if (value := getattr(parsed, name)) is not None}
    check_params(given, "the command line")
    return given


if __name__ == "__main__":
    sys.exit(main())
