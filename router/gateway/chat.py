"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from mii.engine.params import MAX_LOGPROBS
from mii.errors import InvalidArgument
from mii.proto.inference_pb2 import Chat, Prompt, SequenceDelta
from mii.router.gateway.body import encode_again
from mii.router.gateway.fields import Asked, flag, understand
from mii.router.gateway.logprobs import chat_logprobs
from mii.router.gateway.tool_writer import CallWriter, joined
from mii.router.gateway.tools import FIELDS, Tools

_FIELDS: Final = frozenset(
    (
        "messages",
        "logprobs",
        "top_logprobs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
    )
)
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def asked_of(body: Mapping[str, Any], tools: Tools | None, tool_format: str) -> Asked:
    """Understand a chat request.

    Args:
        body: the request's JSON object.
        tools: those of its tools that the model may call.
        tool_format: how the model writes calls.

    Raises:
        InvalidArgument: naming the field.
    """
    own: dict[str, object] = {"logprobs": _logprobs(body)}
    if tools is not None:
        own |= tools.guide(tool_format)
    return understand(body, [Prompt(chat=_chat(body, tools))], _FIELDS | FIELDS, own)


def _chat(body: Mapping[str, Any], tools: Tools | None) -> Chat:
    messages = [
        _message(f"messages[{index}]", message) for index, message in enumerate(_messages(body))
    ]
    continues = flag(body, "continue_final_message")
    generation_prompt = flag(body, "add_generation_prompt", default=not continues)
    if continues and generation_prompt:
        raise InvalidArgument(
            "continue_final_message goes on with the last message, and add_generation_prompt "
            "begins a new one: set one of them",
            "continue_final_message",
        )
    variables = body.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise InvalidArgument.of("chat_template_kwargs", variables, "an object")
    return Chat(
        messages_json=encode_again(messages),
        tools_json=encode_again(list(tools.offered.values())) if tools is not None else "",
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        template_kwargs_json=encode_again(variables) if variables else "",
    )


def _messages(body: Mapping[str, Any]) -> list[object]:
    messages = body.get("messages")
    if messages is None:
        raise InvalidArgument("messages is missing: it must be a list of messages", "messages")
    if not isinstance(messages, list) or not messages:
        allowed = 'a list of at least one message, such as {"role": "user", "content": "Hello"}'
        raise InvalidArgument.of("messages", messages, allowed)
    return messages


def _message(field: str, message: object) -> dict[str, Any]:
    """Return a message as chat templates expect it: a known role, and content that is a string."""
    if not isinstance(message, dict):
        raise InvalidArgument.of(field, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidArgument.of(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidArgument(f"{field}.content is missing", f"{field}.content")
    if role == "assistant" and message.get("tool_calls"):
        message = {**message, "tool_calls": _past_calls(f"{field}.tool_calls", message)}
    # Templates know no developer, and would write None for an assistant that only called tools.
    return {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _content(f"{field}.content", content),
    }


def _past_calls(field: str, message: Mapping[str, Any]) -> list[Any]:
    """Return calls as templates expect them: arguments are objects, which clients send as text."""
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise InvalidArgument.of(field, calls, "a list of calls")
    return [_past_call(f"{field}[{index}].function", call) for index, call in enumerate(calls)]


def _past_call(field: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidArgument.of(field, function, "an object with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            allowed = "the text of a JSON object"
            raise InvalidArgument.of(f"{field}.arguments", arguments, allowed) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _content(field: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument.of(field, content, "a string or a list of parts")
    return "\n".join(_part(f"{field}[{index}]", part) for index, part in enumerate(content))


def _part(field: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
        raise InvalidArgument.of(field, part, 'text: {"type": "text", "text": "..."}')
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise InvalidArgument.of(f"{field}.{part['type']}", text, "a string")
    return text


def _logprobs(body: Mapping[str, Any]) -> int | None:
    wanted = flag(body, "logprobs")
    top = body.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_LOGPROBS:
        raise InvalidArgument.of("top_logprobs", top, f"an integer from 0 to {MAX_LOGPROBS}")
    if not wanted:
        if top == 0:
            return None
        raise InvalidArgument("top_logprobs needs logprobs = true", "top_logprobs")
    return top


class ChatShape:
    """Choices of a chat completion.

    Args:
        asked: the request.
        parser: makes what finds calls of tools in an answer; None: there are none.
    """

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, asked: Asked, parser: Callable[[], CallWriter] | None = None) -> None:
        self._with_logprobs = asked.request.sampling.HasField("logprobs")
        self._make_writer = parser
        self._writers: dict[int, CallWriter] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        # Helpers of the official clients need the role once, and first.
        return [_chunk(index, {"role": "assistant", "content": ""})]

    def pieces(self, index: int, delta: SequenceDelta) -> list[dict[str, Any]]:
        chunks = []
        reason = delta.finish_reason
        if self._make_writer is not None:
            writer = self._writers.setdefault(index, self._make_writer())
            changes = writer.feed(delta.text, ended=bool(reason))
            reason = writer.finish_reason(reason)
            chunks += [_chunk(index, change) for change in changes]
            if delta.logprobs:
                chunks.append(_chunk(index, {}, self._logprobs(delta)))
        elif delta.text or delta.logprobs:
            chunks.append(_chunk(index, {"content": delta.text}, self._logprobs(delta)))
        if reason:
            chunks.append(_chunk(index, {}, finish_reason=reason))
        return chunks

    def whole(self, index: int, delta: SequenceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        reason = delta.finish_reason
        if self._make_writer is not None:
            writer = self._make_writer()
            message |= joined(writer.feed(delta.text, ended=True))
            reason = writer.finish_reason(reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": reason,
        }

    def _logprobs(self, delta: SequenceDelta) -> dict[str, Any] | None:
        return chat_logprobs(delta.logprobs) if self._with_logprobs else None


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
