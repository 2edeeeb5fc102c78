"""`mii serve` in the foreground, and the commands that find it, as a user types them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mii.registry import DeploymentRecord, Registry
from tests.system.leftovers import Belongings, no_new_children

MII = [sys.executable, "-m", "mii.cli"]


@pytest.fixture(scope="module")
def foreground(cache: Path, tiny_model: Path) -> Iterator[DeploymentRecord]:
    """`mii serve`, which Ctrl-C ends at last."""
    command = [*MII, "serve", str(tiny_model), "--port", "0", "--enable-rest", "--rest-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        record = Registry(cache).get("tiny-mii-deployment")
        open_to_all = "(listens on localhost, no TLS, no key needed)"
        assert lines == [
            "tiny-mii-deployment is ready\n",
            f"  gRPC and REST at {record.address} {open_to_all}\n",
            f"  REST at http://{record.rest_address} {open_to_all}\n",
            "  Ctrl-C stops it\n",
        ]
        belongings = Belongings.of(record.supervisor.pid)
        yield record
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    belongings.assert_gone()
    assert Registry(cache).all() == []


def run(*arguments: str, text: str = "") -> str:
    """Run a command that succeeds; return what it prints."""
    finished = subprocess.run(
        [*MII, *arguments], input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_generate(foreground: DeploymentRecord) -> None:
    greedy = ["--max-new-tokens", "8", "--temperature", "0"]
    alone = run("generate", "tiny", "abc", *greedy)
    assert run("generate", foreground.address, "-", *greedy, text="abc") == alone
    both = [
        json.loads(line)
        for line in run("generate", "tiny", "abc", "de", "--json", *greedy).splitlines()
    ]
    assert [answer["prompt"] for answer in both] == ["abc", "de"]
    assert both[0]["generated_text"] + "\n" == alone and both[0]["generated_length"] == 8


def test_rest_answers_where_it_says(foreground: DeploymentRecord) -> None:
    body = json.dumps({"prompts": ["abc"], "max_new_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://{foreground.rest_address}/generate", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_chat_in_a_pipe(foreground: DeploymentRecord) -> None:
    answers = run(
        "chat", "--max-new-tokens", "3", text="hello\n/clear\n/fly\nagain\n/exit\nnever\n"
    )
    assert "there is no command /fly" in answers
    assert "never" not in answers


@contextlib.contextmanager
def chat_on_a_terminal() -> Iterator[tuple[subprocess.Popen[bytes], io.FileIO]]:
    """A chat and its terminal, at the first prompt."""
    ours, theirs = pty.openpty()
    command = [*MII, "chat", "tiny", "--temperature", "0"]
    with (
        subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as chat,
        io.FileIO(ours, "r+") as terminal,
    ):
        os.close(theirs)
        try:
            read_until(terminal, b"> ")
            yield chat, terminal
        finally:
            chat.kill()


def test_ctrl_c_stops_an_answer_and_not_the_chat(foreground: DeploymentRecord) -> None:
    with chat_on_a_terminal() as (chat, terminal):
        terminal.write(b"tell me a very long story\n")
        read_until(terminal, b"story\r\n")
        terminal.read(1)  # the answer has begun
        chat.send_signal(signal.SIGINT)
        read_until(terminal, b"[stopped]", b"leaves")  # it may have been quicker than we
        terminal.write(b"/exit\n")
        assert chat.wait(10) == 0


def test_ctrl_c_at_the_prompt_explains_how_to_leave(foreground: DeploymentRecord) -> None:
    with chat_on_a_terminal() as (chat, terminal):
        chat.send_signal(signal.SIGINT)
        read_until(terminal, b"leaves")
        terminal.write(b"/exit\n")
        assert chat.wait(10) == 0


def read_until(terminal: io.FileIO, *ends: bytes) -> None:
    shown = b""
    while not any(end in shown for end in ends):
        shown += terminal.read(1) or b""


def test_ps_and_logs(foreground: DeploymentRecord) -> None:
    assert f"tiny-mii-deployment  ready  {foreground.address}" in run("ps")
    assert "the deployment is ready" in run("logs", "tiny", "--process", "supervisor")


def test_plan_of_a_model_that_runs(foreground: DeploymentRecord, tiny_model: Path) -> None:
    assert "max length    512 tokens" in run("plan", str(tiny_model))


def test_detached_and_stopped(cache: Path, tiny_model: Path) -> None:
    shown = run("serve", str(tiny_model), "--port", "0", "--name", "other", "--detach")
    assert "mii stop other ends it" in shown
    belongings = Belongings.of(Registry(cache).get("other").supervisor.pid)
    assert run("stop", "other") == "other has ended\n"
    belongings.assert_gone()


def test_a_model_that_is_served_for_one_command(
    foreground: DeploymentRecord, cache: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Also if a deployment runs whose model is another folder of the same name."""
    other = shutil.copytree(tiny_model, tmp_path / tiny_model.name)
    with no_new_children():
        answer = run("generate", str(other), "abc", "--max-new-tokens", "4", "--json")
    assert json.loads(answer)["generated_length"] == 4
    assert Registry(cache).all() == [foreground]
    assert [path.name for path in (cache / "logs").iterdir() if "process" in path.name] == []
