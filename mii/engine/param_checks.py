"""The kinds of values that sampling parameters take: what is allowed, and how a schema says it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Protocol

from mii.errors import InvalidArgument, shorten

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGIT_BIASES = 4096
MAX_GUIDED_CHOICES = 4096
MAX_INT = 2**31 - 1

JsonSchema = dict[str, Any]


class ParameterCheck(Protocol):
    """One kind of value."""

    @property
    def json_schema(self) -> JsonSchema:
        """What JSON allows for it, null apart."""
        ...

    def check(self, name: str, value: object) -> Any:
        """Return the value in its own form.

        Raises:
            InvalidArgument: naming the parameter, the value and what is allowed.
        """
        ...


@dataclass(frozen=True)
class Integer:
    """A whole number from low to high, of Python's or numpy's; a truth value is none."""

    low: int
    high: int
    note: str = ""

    @property
    def json_schema(self) -> JsonSchema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def check(self, name: str, value: object) -> int:
        number = _as_integer(value)
        if number is None or not self.low <= number <= self.high:
            allowed = f"an integer from {self.low} to {self.high}{self.note}"
            raise InvalidArgument.of(name, value, allowed)
        return number


@dataclass(frozen=True)
class Number:
    """A finite number from low to high."""

    low: float
    high: float
    above: bool = False  # and not low itself

    @property
    def json_schema(self) -> JsonSchema:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}

    def check(self, name: str, value: object) -> float:
        begin = f"above {self.low:g} and up" if self.above else f"from {self.low:g}"
        allowed = f"a number {begin} to {self.high:g}"
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidArgument.of(name, value, allowed)
        try:
            number = float(value)
        except OverflowError:
            raise InvalidArgument.of(name, value, allowed) from None
        inside = self.low <= number <= self.high and not (self.above and number == self.low)
        if not math.isfinite(number) or not inside:
            raise InvalidArgument.of(name, value, allowed)
        return number


class Boolean:
    """True or false."""

    @property
    def json_schema(self) -> JsonSchema:
        return {"type": "boolean"}

    def check(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise InvalidArgument.of(name, value, "true or false")
        return value


class StopStrings:
    """A string, or several."""

    @property
    def json_schema(self) -> JsonSchema:
        text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
        several = {"type": "array", "items": text, "maxItems": MAX_STOP_STRINGS}
        return {"anyOf": [text, several]}

    def check(self, name: str, value: object) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        allowed = (
            f"a string or up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters "
            "each"
        )
        if not isinstance(items, list | tuple) or len(items) > MAX_STOP_STRINGS:
            raise InvalidArgument.of(name, value, allowed)
        for item in items:
            if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_LENGTH:
                raise InvalidArgument.of(name, item, allowed)
            try:
                item.encode()
            except UnicodeEncodeError:
                allowed = "Unicode without lone surrogates"
                raise InvalidArgument.of(name, item, allowed) from None
        return tuple(dict.fromkeys(items))


class TokenIds:
    """A short list of token ids."""

    @property
    def json_schema(self) -> JsonSchema:
        token = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
        return {"type": "array", "items": token, "maxItems": MAX_STOP_STRINGS}

    def check(self, name: str, value: object) -> tuple[int, ...]:
        allowed = f"up to {MAX_STOP_STRINGS} token ids"
        if not isinstance(value, list | tuple) or len(value) > MAX_STOP_STRINGS:
            raise InvalidArgument.of(name, value, allowed)
        return tuple(dict.fromkeys(_TOKEN.check(name, item) for item in value))


class LogitBias:
    """Numbers by token id; ids may be strings, as in JSON, where every key is one."""

    @property
    def json_schema(self) -> JsonSchema:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": _BIAS.json_schema,
            "maxProperties": MAX_LOGIT_BIASES,
        }

    def check(self, name: str, value: object) -> tuple[tuple[int, float], ...]:
        allowed = f"a map of up to {MAX_LOGIT_BIASES} token ids to numbers from -100 to 100"
        if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIASES:
            raise InvalidArgument.of(name, value, allowed)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            token = _token_of_key(key)
            if token is None:
                raise InvalidArgument(
                    f"{name} has the key {shorten(key)}: keys must be token ids of the model's "
                    f"vocabulary, as integers or decimal strings",
                    name,
                )
            try:
                biases[token] = _BIAS.check(name, bias)
            except InvalidArgument:
                raise InvalidArgument(
                    f"{name} of token {token} is {shorten(bias)}: it must be a number from -100 "
                    "to 100",
                    name,
                ) from None
        return tuple(sorted(biases.items()))


class SchemaText:
    """A JSON schema, which is kept as its text."""

    @property
    def json_schema(self) -> JsonSchema:
        return {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}

    def check(self, name: str, value: object) -> str:
        if isinstance(value, Mapping | bool):
            try:
                return json.dumps(value, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidArgument(f"{name} is no JSON schema: {error}", name) from None
        if isinstance(value, str):
            try:
                json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"{name} is not JSON: {error}", name) from None
            return value
        allowed = "a JSON schema: an object, or a string with its JSON"
        raise InvalidArgument.of(name, value, allowed)


class Source:
    """The text of an expression or a grammar."""

    @property
    def json_schema(self) -> JsonSchema:
        return {"type": "string", "minLength": 1}

    def check(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise InvalidArgument.of(name, value, "a string that is not empty")
        return value


class Choices:
    """A list of texts."""

    @property
    def json_schema(self) -> JsonSchema:
        text = {"type": "string", "minLength": 1}
        return {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_GUIDED_CHOICES}

    def check(self, name: str, value: object) -> tuple[str, ...]:
        allowed = f"a list of 1 to {MAX_GUIDED_CHOICES} strings, none of them empty"
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_GUIDED_CHOICES:
            raise InvalidArgument.of(name, value, allowed)
        for item in value:
            if not isinstance(item, str) or not item:
                raise InvalidArgument.of(name, item, allowed)
        return tuple(dict.fromkeys(value))


_TOKEN: Final = Integer(0, MAX_INT)
_BIAS: Final = Number(-100, 100)


def _as_integer(value: object) -> int | None:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _token_of_key(key: object) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        key = int(key)
    token = _as_integer(key)
    return token if token is not None and 0 <= token <= MAX_INT else None
