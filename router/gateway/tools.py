"""Tools that a request offers: which there are, whether one must be called, and in what form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mii.errors import InvalidArgument
from mii.messages import JSON_CALLS, TOOL_FORMATS

FIELDS: Final = frozenset(("tools", "tool_choice", "parallel_tool_calls"))
MAX_TOOLS: Final = 512

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES: Final = "none, auto, required, or an object that names a function"


@dataclass(frozen=True)
class Tools:
    """What a request says of tools.

    Args:
        offered: as they go to the chat template, by name.
        required: names of which one must be called; empty: the model may answer as it likes.
        parallel: whether it may call several.
    """

    offered: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...]
    parallel: bool

    def guide(self, tool_format: str) -> dict[str, object]:
        """Return the sampling parameter that makes the answer one or more calls, where it must be.

        Args:
            tool_format: the model's way to write calls, one of `TOOL_FORMATS`.
        """
        if not self.required:
            return {}
        calls = [_call_schema(self.offered[name], tool_format) for name in self.required]
        one = {"anyOf": calls} if len(calls) > 1 else calls[0]
        if tool_format == "hermes":
            more = ' ("\\n" call)*' if self.parallel else ""
            grammar = (
                f"start: call{more}\n"
                'call: "<tool_call>\\n" object "\\n</tool_call>"\n'
                f"object: %json {json.dumps(one)}\n"
            )
            return {"guided_grammar": grammar}
        if tool_format == "mistral":
            one = {"type": "array", "items": one, "minItems": 1}
            if not self.parallel:
                one["maxItems"] = 1
        return {"guided_json": one}


def tools_of(body: Mapping[str, Any]) -> Tools | None:
    """Return what a request says of tools; None if there are none that it may call.

    Raises:
        InvalidArgument: naming the field.
    """
    given = body.get("tools")
    if given is None or given == []:
        if body.get("tool_choice") not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice needs tools", "tool_choice")
        return None
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise InvalidArgument.of("tools", given, f"a list of up to {MAX_TOOLS} tools")
    offered = dict(_tool(f"tools[{index}]", tool) for index, tool in enumerate(given))
    if len(offered) < len(given):
        raise InvalidArgument("tools has two functions of one name", "tools")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidArgument.of("parallel_tool_calls", parallel, "true or false")
    choice = body.get("tool_choice")
    if choice == "none":
        return None
    required = _required(choice, offered)
    return Tools(offered, required, parallel is not False and not isinstance(choice, Mapping))


def _required(choice: object, offered: Mapping[str, object]) -> tuple[str, ...]:
    if choice is None or choice == "auto":
        return ()
    if choice == "required":
        return tuple(offered)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise InvalidArgument.of("tool_choice", choice, _CHOICES)
    if name not in offered:
        raise InvalidArgument.of("tool_choice.function.name", name, "one of the tools' names")
    return (str(name),)


def _tool(field: str, tool: object) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or function is None:
        raise InvalidArgument.of(field, tool, 'a function: {"type": "function", "function": {...}}')
    if not isinstance(function, Mapping):
        raise InvalidArgument.of(f"{field}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = "1 to 64 of the characters a-z, A-Z, 0-9, _, . and -"
        raise InvalidArgument.of(f"{field}.function.name", name, allowed)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidArgument.of(f"{field}.function.parameters", parameters, "a JSON schema")
    return name, tool


def _call_schema(tool: Mapping[str, Any], tool_format: str) -> dict[str, Any]:
    function = tool["function"]
    arguments = "parameters" if tool_format == "llama3" else "arguments"
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            arguments: function.get("parameters") or {"type": "object"},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def format_to_read(tool_format: str, tools: Tools) -> str:
    """Return the form in which calls are to be looked for; "" if there can be none.

    A model whose template knows no tools calls none by itself, but can be made to.
    """
    if tool_format in TOOL_FORMATS:
        return tool_format
    return JSON_CALLS if tools.required else ""
