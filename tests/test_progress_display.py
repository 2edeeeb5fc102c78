"""What a user sees while a deployment starts."""

from __future__ import annotations

import io
import sys
import types

import pytest

from mii.progress_display import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use(stream: io.StringIO) -> str:
    with ProgressDisplay(stream) as show:
        show("starting the router", None)
        show("replica 0: loading weights", 0.25)
        show("replica 1: [loading] weights", 0.5)
        show("replica 1: [loading] weights", 0.75)
    return stream.getvalue()


def test_on_a_terminal_each_replica_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = use(Terminal())
    for words in ("starting the router", "replica 0: loading", "replica 1: [loading]"):
        assert words in shown


def test_in_a_pipe_there_is_nothing() -> None:
    assert use(io.StringIO()) == ""


def test_in_a_notebook_each_thing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert use(io.StringIO()).splitlines() == [
        "starting the router",
        "replica 0: loading weights",
        "replica 1: [loading] weights",
    ]
