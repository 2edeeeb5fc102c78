"""Fields that the OpenAI API's routes share: which are read, which are refused, which ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mii.engine.params import ALIASES, PARAMETER_NAMES, check_params
from mii.errors import InvalidArgument
from mii.messages import choices_of, sampling_message
from mii.proto.inference_pb2 import (
    DEFAULTS_MODEL,
    GenerateRequest,
    Prompt,
    SamplingParams,
)
from mii.router.gateway import response_format

_SAMPLING: Final = {*PARAMETER_NAMES, *ALIASES} - {"logprobs", "return_full_text", "max_length"}
_READ: Final = _SAMPLING | response_format.FIELDS | {"model", "stream", "stream_options"}

# What would change the answer and is not built, with the values by which nothing is asked for.
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
}


@dataclass(frozen=True)
class Asked:
    """A request of the OpenAI API, understood."""

    request: GenerateRequest
    choices: int  # answers to each prompt
    include_usage: bool  # at the end of a stream
    ignored: tuple[str, ...]  # fields that nothing here reads
    returned: int | None = None  # of the answers to each prompt, the best; None: all of them
    hides_logprobs: bool = False  # they are only there to tell the best answers

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"x-mii-ignored": ", ".join(self.ignored)} if self.ignored else {}


def understand(
    body: Mapping[str, Any],
    prompts: list[Prompt],
    own_fields: frozenset[str],
    own_sampling: Mapping[str, object],
) -> Asked:
    """Put together what was asked.

    Args:
        body: the request's JSON object.
        prompts: read from it already.
        own_fields: fields that the route reads itself.
        own_sampling: sampling parameters that the route has read, or its defaults.

    Raises:
        InvalidArgument: naming the field.
    """
    _refuse_unsupported(body)
    stream = flag(body, "stream")
    sampling = _sampling(body, own_sampling)
    request = GenerateRequest(
        model=text(body, "model", "default"),
        prompts=prompts,
        sampling=sampling,
        stream=stream,
        defaults=DEFAULTS_MODEL,
    )
    given = {name for name, value in body.items() if value is not None}
    ignored = given - _READ - own_fields - _UNSUPPORTED.keys()
    # Names of fields come from the client: only those that are fit for a header are named in one.
    words = sorted(name for name in ignored if name.isidentifier() and name.isascii())
    return Asked(
        request=request,
        choices=choices_of(request),
        include_usage=_include_usage(body, stream),
        ignored=tuple(name[:40] for name in words[:20]),
    )


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false; null counts as left out.

    Raises:
        InvalidArgument: if it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidArgument.of(name, value, "true or false")
    return value


def text(body: Mapping[str, Any], name: str, default: str) -> str:
    """Return a field that is a string; null counts as left out.

    Raises:
        InvalidArgument: if it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise InvalidArgument.of(name, value, "a string")
    return value


def _sampling(body: Mapping[str, Any], own: Mapping[str, object]) -> SamplingParams:
    values = {n: value for n, value in body.items() if n in _SAMPLING and value is not None}
    if "max_completion_tokens" in values:
        values.pop("max_tokens", None)  # which it supersedes
    limits = ("max_new_tokens", "max_tokens", "max_completion_tokens")
    if any(name in values for name in limits):
        own = {name: value for name, value in own.items() if name not in limits}
    guides = response_format.guide_of(body)
    twice = next((name for name in guides if name in values or name in own), None)
    if twice is not None:
        raise InvalidArgument(f"{twice} says again what the answer must match", twice)
    return sampling_message(check_params({**own, **values, **guides}, "this route"))


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise InvalidArgument(f"{name} is not supported here: leave it out", name)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidArgument.of("stream_options", options, "an object")
    if not stream:
        raise InvalidArgument("stream_options is only for stream = true", "stream_options")
    return flag(options, "include_usage")
