"""Sampling parameters: their names, types, ranges and defaults.

This is the one place where they are judged. `check_params` takes what a user wrote, whatever the
surface (Python, gRPC, JSON); `resolve_params` fills in what was left out; `resolve_length` fits the
answer into the context. What the engine sees afterwards is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from mii.engine.param_checks import (
    MAX_INT,
    Boolean,
    Choices,
    Integer,
    LogitBias,
    Number,
    ParameterCheck,
    SchemaText,
    Source,
    StopStrings,
    TokenIds,
)
from mii.errors import ContextLengthExceeded, InvalidArgument, UnknownArgument, shorten

MAX_CHOICES = 128
MAX_LOGPROBS = 20


class Defaults(Enum):
    """What stands in for parameters that a request leaves out."""

    MII = 0  # DeepSpeed-MII's
    MODEL = 1  # the model's generation_config.json, then temperature 1 and top_p 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is to be answered. Every value has passed `check_params`.

    Order of application, as in transformers: repetition penalty, presence and frequency penalty,
    logit bias, minimum length; then temperature, top_k, top_p, min_p.
    """

    max_new_tokens: int | None = None  # None: the rest of the context
    max_length: int | None = None  # prompt + new tokens; wins over max_new_tokens
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0: the most probable token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: drawn by whoever accepts the request
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # the k most probable tokens beside the sampled one; None: off
    return_full_text: bool = False
    # What the answer's text must match: one of them at most.
    guided_json: str | None = None  # a JSON schema, as text
    guided_regex: str | None = None
    guided_grammar: str | None = None  # Lark
    guided_choice: tuple[str, ...] | None = None

    @property
    def greedy(self) -> bool:
        """Whether each token is simply the most probable one, the lowest id of several."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens that came before, beyond the model itself."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


# Below this, logits divided by the temperature leave fp32's useful range: the result is greedy.
_LEAST_TEMPERATURE = 1e-5

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
}


_CHECKS: dict[str, ParameterCheck] = {
    "max_new_tokens": Integer(1, MAX_INT),
    "max_length": Integer(1, MAX_INT),
    "min_new_tokens": Integer(0, MAX_INT),
    "do_sample": Boolean(),
    "temperature": Number(0, 100),
    "top_k": Integer(-1, MAX_INT, " (0 or -1: off)"),
    "top_p": Number(0, 1),
    "min_p": Number(0, 1),
    "repetition_penalty": Number(0, 100, above=True),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "logit_bias": LogitBias(),
    "seed": Integer(0, 2**63 - 1),
    "n": Integer(1, MAX_CHOICES),
    "stop": StopStrings(),
    "stop_token_ids": TokenIds(),
    "ignore_eos": Boolean(),
    "logprobs": Integer(0, MAX_LOGPROBS),
    "return_full_text": Boolean(),
    "guided_json": SchemaText(),
    "guided_regex": Source(),
    "guided_grammar": Source(),
    "guided_choice": Choices(),
}

PARAMETER_NAMES = tuple(_CHECKS)
PARAMETER_SCHEMAS = {name: check.json_schema for name, check in _CHECKS.items()}


def check_params(values: Mapping[str, object], where: str = "generate()") -> dict[str, Any]:
    """Return the parameters under their own names, checked; None counts as left out.

    Raises:
        UnknownArgument: for a name that is no parameter.
        InvalidArgument: for a value of the wrong type or out of range.
    """
    checked: dict[str, Any] = {}
    spelling: dict[str, str] = {}  # the caller's names of what was given
    for given, value in values.items():
        if not isinstance(given, str):
            raise InvalidArgument(f"{where} has an argument whose name is {shorten(given)}")
        name = ALIASES.get(given, given)
        if name not in _CHECKS:
            raise UnknownArgument.named(given, [*_CHECKS, *ALIASES], where)
        if value is None:
            continue
        if name in checked:
            raise InvalidArgument(
                f"{spelling[name]} and {given} are the same parameter: give one of them", given
            )
        checked[name] = _CHECKS[name].check(given, value)
        spelling[name] = given
    guides = [given for name, given in spelling.items() if name.startswith("guided_")]
    if len(guides) > 1:
        raise InvalidArgument(f"give one of {' and '.join(guides)}: an answer has one", guides[1])
    low, high = checked.get("min_new_tokens", 0), checked.get("max_new_tokens")
    if high is not None and low > high:
        allowed = f"at most {spelling['max_new_tokens']}, which is {high}"
        raise InvalidArgument.of(spelling["min_new_tokens"], low, allowed)
    return checked


_MII_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
_FROM_GENERATION_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_defaults(generation_config: Mapping[str, object]) -> dict[str, Any]:
    """Return the sampling defaults that a model's generation_config.json states, if they are valid.

    A config with do_sample false says nothing about sampling: its other values do not count.
    """
    if generation_config.get("do_sample") is False:
        return {}
    defaults = {}
    for name in _FROM_GENERATION_CONFIG:
        value = generation_config.get(name)
        if value is not None:
            try:
                defaults[name] = _CHECKS[name].check(name, value)
            except InvalidArgument:
                continue
    return defaults


def resolve_params(
    checked: Mapping[str, Any],
    defaults: Defaults = Defaults.MII,
    generation_defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Fill in what `check_params` found absent. An explicit value always wins over a default."""
    base = _MII_DEFAULTS if defaults is Defaults.MII else dict(generation_defaults or {})
    values = {**base, **checked}
    do_sample = values.pop("do_sample", True)
    if not do_sample or values.get("temperature", 1.0) < _LEAST_TEMPERATURE:
        values["temperature"] = 0.0
    values["top_k"] = max(0, values.get("top_k", 0))
    return SamplingParams(**values)


def resolve_length(
    params: SamplingParams, prompt_length: int, max_length: int, *, strict: bool
) -> int:
    """Return how many new tokens the answer may have.

    Args:
        params: the request's parameters.
        prompt_length: tokens of the prompt.
        max_length: tokens that the engine can hold for one sequence.
        strict: refuse an explicit max_new_tokens that does not fit (the OpenAI API's rule) instead
            of ending the answer where the context ends (DeepSpeed-MII's).

    Raises:
        ContextLengthExceeded: if there is no room for the prompt and one new token, or, when
            strict, for max_new_tokens.
    """
    wanted = params.max_new_tokens
    if prompt_length >= max_length:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_length} tokens, and the context is {max_length} tokens "
            "for prompt and answer together: shorten the prompt",
            "prompt",
        )
    if strict and wanted is not None and prompt_length + wanted > max_length:
        raise ContextLengthExceeded(
            f"max_tokens = {wanted} does not fit: the context is {max_length} tokens, of which the "
            f"prompt takes {prompt_length}: ask for at most {max_length - prompt_length}",
            "max_tokens",
        )
    if params.max_length is not None:
        if params.max_length <= prompt_length:
            raise ContextLengthExceeded(
                f"max_length = {params.max_length} leaves no room for an answer: the prompt has "
                f"{prompt_length} tokens, and max_length counts them",
                "max_length",
            )
        max_length = min(max_length, params.max_length)
    room = max_length - prompt_length
    return room if wanted is None else min(wanted, room)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name ids outside the model's vocabulary.

    Raises:
        InvalidArgument: naming the parameter and the id.
    """
    allowed = f"a token id from 0 to {vocab_size - 1}"
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise InvalidArgument.of("logit_bias", token, allowed)
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise InvalidArgument.of("stop_token_ids", token, allowed)


assert {f.name for f in fields(SamplingParams)} | {"do_sample"} == set(_CHECKS)
