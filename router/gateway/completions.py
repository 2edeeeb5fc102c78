"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mii.engine.param_checks import Integer
from mii.engine.params import MAX_CHOICES, MAX_LOGPROBS
from mii.errors import InvalidArgument
from mii.messages import MAX_SEQUENCES
from mii.proto.inference_pb2 import Prompt, SequenceDelta, TokenIds
from mii.router.gateway.fields import Asked, flag, understand
from mii.router.gateway.logprobs import CompletionLogprobs

_FIELDS: Final = frozenset(("prompt", "echo", "logprobs", "best_of"))
_DEFAULT_MAX_TOKENS: Final = 16
_MAX_TOKEN_ID: Final = 2**31 - 1


def asked_of(body: Mapping[str, Any]) -> Asked:
    """Understand a completion request.

    Raises:
        InvalidArgument: naming the field.
    """
    echo = flag(body, "echo")
    logprobs = _logprobs(body)
    if echo and logprobs is not None:
        raise InvalidArgument("logprobs together with echo is not supported here", "logprobs")
    own: dict[str, object] = {"max_tokens": _DEFAULT_MAX_TOKENS, "logprobs": logprobs}
    if echo:
        own["return_full_text"] = True
    asked = understand(body, prompts_of(body.get("prompt"), "prompt"), _FIELDS, own)
    return _with_best_of(asked, body.get("best_of"))


def _with_best_of(asked: Asked, best_of: object) -> Asked:
    """Have more answers generated than are returned: those with the best mean log-probability."""
    if best_of is None or best_of == asked.choices:
        return asked
    number = Integer(asked.choices, MAX_CHOICES, " (and not below n)").check("best_of", best_of)
    if asked.request.stream:
        raise InvalidArgument("best_of beyond n cannot be streamed: which is best?", "best_of")
    sampling = asked.request.sampling
    sampling.n = number
    if not sampling.HasField("logprobs"):
        sampling.logprobs = 0
        asked = replace(asked, hides_logprobs=True)
    return replace(asked, choices=number, returned=asked.choices)


def prompts_of(value: object, field: str) -> list[Prompt]:
    """Return the prompts of a string, a list of strings, token ids, or a list of lists of them.

    Raises:
        InvalidArgument: naming `field`.
    """
    if isinstance(value, str):
        return [Prompt(text=value)]
    allowed = "a string, a list of strings, a list of token ids, or a list of such lists"
    if value is None:
        raise InvalidArgument(f"{field} is missing: it must be {allowed}", field)
    if not isinstance(value, list):
        raise InvalidArgument.of(field, value, allowed)
    if not value:
        raise InvalidArgument(f"{field} is an empty list: it must be {allowed}", field)
    if all(isinstance(item, str) for item in value):
        _check_count(value, field)
        return [Prompt(text=item) for item in value]
    if all(isinstance(item, list) for item in value):
        _check_count(value, field)
        return [_ids(item, f"{field}[{index}]") for index, item in enumerate(value)]
    return [_ids(value, field)]


def _check_count(prompts: list[object], field: str) -> None:
    if len(prompts) > MAX_SEQUENCES:
        raise InvalidArgument.of(field, prompts, f"at most {MAX_SEQUENCES} prompts")


def _ids(value: list[object], field: str) -> Prompt:
    if not value:
        raise InvalidArgument(f"{field} has no token ids", field)
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_TOKEN_ID:
            raise InvalidArgument.of(field, item, "made of token ids: integers from 0")
    return Prompt(token_ids=TokenIds(ids=value))  # type: ignore[arg-type]  # checked above


def _logprobs(body: Mapping[str, Any]) -> int | None:
    value = body.get("logprobs")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LOGPROBS:
        raise InvalidArgument.of("logprobs", value, f"an integer from 0 to {MAX_LOGPROBS}")
    return value


class CompletionShape:
    """Choices of a text completion: the same in chunks and whole."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, asked: Asked) -> None:
        shown = not asked.hides_logprobs
        self._with_logprobs = shown and asked.request.sampling.HasField("logprobs")
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def pieces(self, index: int, delta: SequenceDelta) -> list[dict[str, Any]]:
        if delta.text or delta.logprobs or delta.finish_reason:
            return [self.whole(index, delta)]
        return []

    def whole(self, index: int, delta: SequenceDelta) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            logprobs = self._logprobs.setdefault(index, CompletionLogprobs()).take(delta.logprobs)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason or None,
        }
