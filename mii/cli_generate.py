"""`mii generate` and `mii chat`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mii.api import client as client_by_name
from mii.api import client_of, complete_deployment, find_deployment
from mii.cli import parameters_of
from mii.client import MIIClient
from mii.errors import InvalidArgument
from mii.launch import start_attached
from mii.models.builtin import BUILTIN_MODELS
from mii.models.checkpoint import default_cache
from mii.options import deployment_config, model_name_of
from mii.progress_display import ProgressDisplay
from mii.registry import Registry

_CHAT_HELP = "/exit or Ctrl-D leaves, /clear begins a new conversation, Ctrl-C stops an answer"


def generate(parsed: argparse.Namespace) -> int:
    """Answer the prompts of the command line."""
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in parsed.prompts]
    parameters = parameters_of(parsed)
    with _client(parsed.target) as client:
        if len(prompts) == 1 and not parsed.json:
            for piece in client.stream(prompts[0], **parameters):
                print(piece, end="", flush=True)
            print()
            return 0
        responses = client.generate(prompts, **parameters) or []
    for prompt, response in zip(prompts, responses, strict=True):
        if parsed.json:
            answer = {"prompt": prompt, **response.to_msg_dict()}
            print(json.dumps(answer))
        else:
            print(f"--- {prompt}\n{response}")
    return 0


def chat(parsed: argparse.Namespace) -> int:
    """Hold a conversation."""
    parameters = parameters_of(parsed)
    with _client(parsed.target or _only_deployment()) as client:
        system = [{"role": "system", "content": parsed.system}] if parsed.system else []
        messages = list(system)
        if sys.stdin.isatty():
            _load_line_editing()
            print(_CHAT_HELP)
        while (line := _read_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/clear":
                    messages = list(system)
                case "/help":
                    print(_CHAT_HELP)
                case command if command.startswith("/") and " " not in command:
                    print(f"there is no command {command}: {_CHAT_HELP}")
                case text:
                    _answer(client, messages, text, parameters)
    return 0


def _answer(
    client: MIIClient, messages: list[dict[str, str]], text: str, parameters: dict[str, Any]
) -> None:
    """Print the answer while it comes, and keep it; after an error nothing was said."""
    messages.append({"role": "user", "content": text})
    answer = ""
    try:
        stream = client.stream(messages=messages, **parameters)
        try:
            for piece in stream:
                answer += str(piece)
                print(piece, end="", flush=True)
        finally:
            stream.close()  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except InvalidArgument as error:  # such as a conversation beyond the context
        messages.pop()
        print(f"error: {error}", file=sys.stderr)
        return
    print()
    messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    """Return the next line of the user's; None at the end."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(f"\n{_CHAT_HELP}")


def _load_line_editing() -> None:
    """Give input() a history, and arrow keys."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def _only_deployment() -> str:
    """Return the name of the only deployment that runs, else the first built-in model's."""
    names = [record.name for record in Registry(default_cache()).all()]
    if len(names) > 1:
        raise InvalidArgument(f"several deployments run: name one of {', '.join(names)}", "name")
    return names[0] if names else next(iter(BUILTIN_MODELS))


@contextmanager
def _client(target: str) -> Iterator[MIIClient]:
    """Yield a client of a running deployment, or of one that lives as long as the block."""
    host, _, port = target.rpartition(":")
    if find_deployment(target) is not None or (host and port.isdecimal()):
        client = client_by_name(target)
        try:
            yield client
        finally:
            client.close()
        return
    name = f"{model_name_of(target)[:100]} of process {os.getpid()}"
    with ProgressDisplay() as show:
        values = {"model_name_or_path": target, "deployment_name": name, "port": 0}
        config, _ = complete_deployment(deployment_config(values, "mii"), show)
        attached = start_attached(config, show)
    try:
        client = client_of(Registry(default_cache()).get(name))
        yield client
        client.close()
    finally:
        attached.stop()
    shutil.rmtree(attached.logs, ignore_errors=True)  # after an error they are of use
