"""Finds calls of tools in a model's text, piece by piece as it comes.

The forms (`mii.messages.TOOL_FORMATS`), in which markers that are special tokens may be missing:

    hermes    text <tool_call> {"name": "f", "arguments": {...}} </tool_call> ...  (Qwen, Hermes)
    llama3    <|python_tag|> {"name": "f", "parameters": {...}}; {...}
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]   or   f[ARGS]{...}
    json      {"name": "f", "arguments": {...}}                   (of models that were made to)

What looks like a call but names none of the offered functions is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS: Final = ("<|python_tag|>", "[TOOL_CALLS]")
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\["])'
)
_MISTRAL_HEAD: Final = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})(?:\[ARGS\])?(?=\{)")
_SEPARATORS: Final = " \t\r\n,;]"


@dataclass(frozen=True)
class Text:
    """A piece of what is no call."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The next call."""

    name: str
    number: int


@dataclass(frozen=True)
class CallGoesOn:
    """A piece of the JSON of the latest call's arguments."""

    arguments: str
    number: int


Event = Text | CallBegins | CallGoesOn


class ValueScanner:
    """Finds the end of a JSON object, list or string, whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Take the next piece; return where in it the value ends, or None."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return index + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


class ToolCallParser:
    """Reads one answer.

    Args:
        tool_format: see the module.
        names: of the offered functions.
    """

    def __init__(self, tool_format: str, names: Collection[str]) -> None:
        self._format = tool_format
        self._names = frozenset(names)
        self._held = ""  # text that may still turn out to be either
        self._opening = ""  # what was taken for the opening of a call that has not begun
        self._state = self._outside if tool_format == "hermes" else self._beginning
        self._scanner = ValueScanner()
        self.calls = 0

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        self._held += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Take notice that nothing more comes."""
        rest = self._opening + self._held
        self._held = self._opening = ""
        if self._state == self._within and rest:
            return [self._goes_on(rest)]  # cut off
        after_call = self.calls and not rest.strip(_SEPARATORS + "}")
        return [Text(rest)] if rest and not after_call else []

    # Each state takes what it can from the held text, and says whether there is more to do.

    def _outside(self, events: list[Event]) -> bool:
        """Text, until a call is opened (hermes)."""
        at = self._held.find(_OPEN)
        if at >= 0:
            if not self.calls or self._held[:at].strip():  # blanks between calls are no text
                self._say(events, self._held[:at])
            self._held = self._held[at:]
            self._open(len(_OPEN))
            self._state = self._head
            return True
        certain = len(self._held) - _length_of_beginning(self._held, _OPEN)
        if not self.calls or self._held[:certain].strip():
            self._say(events, self._held[:certain])
            self._held = self._held[certain:]
        return False

    def _beginning(self, events: list[Event]) -> bool:
        """An answer's first characters, which decide whether all of it is calls."""
        held = self._held.lstrip()
        for marker in _MARKERS:
            if held.startswith(marker):
                self._open(len(self._held) - len(held) + len(marker))
                self._state = self._between
                return True
            if marker.startswith(held):
                return False
        if held[0] in "{[":
            self._state = self._between
            return True
        if self._format == "mistral":
            head = _MISTRAL_HEAD.match(held)
            if head and head[1] in self._names:
                self._state = self._head
                return True
            if any(f"{name}[ARGS]".startswith(held) for name in self._names):
                return False
        self._state = self._plain
        return True

    def _between(self, events: list[Event]) -> bool:
        """Before a call, or the list's end (all but hermes)."""
        rest = self._held.lstrip(_SEPARATORS if self.calls else _SEPARATORS + "[")
        self._open(len(self._held) - len(rest))
        if not rest:
            return False
        self._state = self._head
        return True

    def _head(self, events: list[Event]) -> bool:
        """A call as far as its arguments."""
        head = _HEAD.match(self._held)
        if head is None and self._format == "mistral":
            head = _MISTRAL_HEAD.match(self._held)
        if head is not None and head[1] in self._names:
            self._begin(events, head[1])
            self._held = self._held[head.end() :]
            self._scanner = ValueScanner()
            self._state = self._within if self._held[0] != '"' else self._within_string
            return True
        end = ValueScanner().end_in(self._held.lstrip())
        if end is None and head is None and self._held.lstrip()[:1] in ("{", ""):
            return False
        return self._whole(events, len(self._held) - len(self._held.lstrip()) + (end or 0))

    def _whole(self, events: list[Event], end: int) -> bool:
        """A call whose object is complete, in an order of its own; or text after all."""
        try:
            call = json.loads(self._held[:end])
            name = call["name"]
            arguments = call.get("arguments", call.get("parameters", {}))
        except (ValueError, KeyError, TypeError, AttributeError):
            name, arguments = None, None
        if name not in self._names:
            self._say(events, self._opening + self._held)
            self._held = self._opening = ""
            self._state = self._plain
            return False
        self._begin(events, name)
        events.append(self._goes_on(_as_text(arguments)))
        self._held = self._held[end:]
        self._state = self._after
        return True

    def _within(self, events: list[Event]) -> bool:
        """The arguments of a call: an object, or a list."""
        end = self._scanner.end_in(self._held)
        piece = self._held if end is None else self._held[:end]
        if piece:
            events.append(self._goes_on(piece))
        self._held = self._held[len(piece) :]
        if end is None:
            return False
        self._state = self._after
        return True

    def _within_string(self, events: list[Event]) -> bool:
        """Arguments that are a string with JSON in it, as some models write them."""
        end = ValueScanner().end_in(self._held)
        if end is None:
            return False
        events.append(self._goes_on(_as_text(json.loads(self._held[:end]))))
        self._held = self._held[end:]
        self._state = self._after
        return True

    def _after(self, events: list[Event]) -> bool:
        """Behind the arguments: the object's end, and what closes the call."""
        held = self._held.lstrip()
        if not held:
            return False
        if held.startswith("}"):
            held = held[1:].lstrip()
        if self._format == "hermes":
            if held.startswith(_CLOSE):
                self._held = held[len(_CLOSE) :]
                self._state = self._outside
                return True
            if _CLOSE.startswith(held):
                return False
            self._held, self._state = held, self._outside
            return True
        self._held, self._state = held, self._between
        return bool(held)

    def _plain(self, events: list[Event]) -> bool:
        """Text, to the answer's end."""
        self._say(events, self._held)
        self._held = ""
        return False

    def _open(self, length: int) -> None:
        """Take so much of the held text for the opening of a call."""
        self._opening += self._held[:length]
        self._held = self._held[length:]

    def _begin(self, events: list[Event], name: str) -> None:
        self._opening = ""
        events.append(CallBegins(name, self.calls))
        self.calls += 1

    def _goes_on(self, arguments: str) -> CallGoesOn:
        return CallGoesOn(arguments, self.calls - 1)

    def _say(self, events: list[Event], text: str) -> None:
        if text:
            events.append(Text(text))


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _length_of_beginning(text: str, marker: str) -> int:
    """Return how much of a text's end may be the beginning of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
