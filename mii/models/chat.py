"""Conversations, as chat templates want them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mii.errors import InvalidArgument

_TEXT_PARTS = (None, "text", "input_text", "output_text")  # OpenAI's names


# What a chat template writes where a model calls tools, and the form that it is a part of.
_TOOL_MARKERS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": ', "llama3"),
)


def tool_format_of(template: str) -> str:
    """Return how a model with this chat template writes calls of tools; "" if it has none."""
    if "tools" not in template:
        return ""
    return next((form for marker, form in _TOOL_MARKERS if marker in template), "")


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are strings: text parts are joined, and null becomes "".

    Raises:
        InvalidArgument: if there are none, or one has no role or holds more than text.
    """
    if not messages:
        raise InvalidArgument("messages is empty: send at least one message", "messages")
    return [_flatten(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _flatten(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgument.of(field, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgument.of(f"{field}.role", role, "a string such as 'user'")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_text(f"{field}.content", part) for part in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise InvalidArgument.of(f"{field}.content", content, "a string or a list of text parts")
    return {**message, "content": content}


def _text(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise InvalidArgument.of(field, part, 'a text part, {"type": "text", "text": "..."}')


def check_variables(variables: Mapping[str, Any], render: Callable[..., Any]) -> None:
    """Refuse template variables that would steer transformers' `apply_chat_template` itself.

    Raises:
        InvalidArgument: naming the variable.
    """
    parameters = inspect.signature(render).parameters.values()
    reserved = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in variables:
        if name in reserved - {"documents"}:
            raise InvalidArgument(
                f"chat_template_kwargs may not hold {name!r}: it is no variable of a template",
                "chat_template_kwargs",
            )
