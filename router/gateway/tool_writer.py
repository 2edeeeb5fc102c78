"""Calls of tools as the OpenAI API writes them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterable
from typing import Any, Final

from mii.router.gateway.tool_calls import CallBegins, CallGoesOn, Event, Text, ToolCallParser

# Mistral's template takes ids of exactly nine letters and digits, and others take anything.
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9


class CallWriter:
    """Turns one answer's text into changes of its message.

    Args:
        tool_format: how the model writes calls.
        names: of the offered functions.
    """

    def __init__(self, tool_format: str, names: Collection[str]) -> None:
        self._parser = ToolCallParser(tool_format, names)

    def feed(self, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Take the next piece of text; return the `delta` of each chunk that it makes."""
        changes = []
        for event in self._parser.feed(text):
            changes.append(self._change(event))
        if ended:
            changes += [self._change(event) for event in self._parser.finish()]
        return changes

    def finish_reason(self, reason: str) -> str:
        """Return what the API says of an answer that has ended for a reason of ours."""
        return "tool_calls" if reason == "stop" and self._parser.calls else reason

    def _change(self, event: Event) -> dict[str, Any]:
        match event:
            case Text(text):
                return {"content": text}
            case CallBegins(name, number):
                identity = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": identity, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallGoesOn(arguments, number):
                return {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]}


def joined(changes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of a whole message that changes add up to."""
    text = ""
    calls: list[dict[str, Any]] = []
    for change in changes:
        text += change.get("content", "")
        for part in change.get("tool_calls", ()):
            if "id" in part:
                calls.append({key: value for key, value in part.items() if key != "index"})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if not calls:
        return {"content": text}
    return {"content": text.strip() or None, "tool_calls": calls}
