"""The kinds of values that options take: what is allowed, and how a command line spells it.

Each kind has `check(name, value)`, which returns the value in its own form or raises
InvalidArgument, and `parse(text)`, which gives `check` what a command line or an environment
variable says; text that cannot be read is passed on, for `check` to refuse.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from mii.errors import InvalidArgument
from mii.keys import LEAST_KEY_LENGTH, MAX_KEY_LENGTH, digest_of, is_key

MAX_INTEGER = 2**31 - 1
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}


class Check(Protocol):
    """One kind of value."""

    @property
    def metavar(self) -> str:
        """How help texts show such a value."""
        ...

    def parse(self, text: str) -> object:
        """Return what `text` stands for, unchecked."""
        ...

    def check(self, name: str, value: object) -> Any:
        """Return the value in its own form, or raise InvalidArgument naming `name`."""
        ...


@dataclass(frozen=True)
class Integer:
    """A whole number from low to high."""

    low: int
    high: int = MAX_INTEGER
    note: str = ""
    metavar: str = "N"

    def parse(self, text: str) -> object:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,30}", text) else text

    def check(self, name: str, value: object) -> int:
        number = _whole(value)
        if number is not None and self.low <= number <= self.high:
            return number
        raise InvalidArgument.of(
            name, value, f"an integer from {self.low} to {self.high}{self.note}"
        )


@dataclass(frozen=True)
class PowerOfTwo:
    """A power of two from low to high."""

    low: int
    high: int
    metavar: str = "N"

    def parse(self, text: str) -> object:
        return Integer(self.low).parse(text)

    def check(self, name: str, value: object) -> int:
        powers = [2**power for power in range(32) if self.low <= 2**power <= self.high]
        number = _whole(value)
        if number is not None and number in powers:
            return number
        raise InvalidArgument.of(name, value, "one of " + ", ".join(map(str, powers)))


@dataclass(frozen=True)
class Number:
    """A number above low and up to high."""

    low: float
    high: float
    metavar: str = "X"

    def parse(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    def check(self, name: str, value: object) -> float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if self.low < number <= self.high:
                return number
        allowed = f"a number above {self.low:g} and up to {self.high:g}"
        raise InvalidArgument.of(name, value, allowed)


@dataclass(frozen=True)
class Keys:
    """Keys of clients, of which digests are kept: a list, or a file with one on each line."""

    metavar: str = "FILE"

    def parse(self, text: str) -> object:
        return text

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str | os.PathLike):
            try:
                text = Path(value).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise InvalidArgument(
                    f"{name} is neither a list of keys nor a file that can be read: {error}", name
                ) from None
            lines = (line.strip() for line in text.splitlines())
            value = [line for line in lines if line and not line.startswith("#")]
        if not isinstance(value, list | tuple) or not value:
            raise InvalidArgument(f"{name} must be a list of keys, or a file of them", name)
        for key in value:
            if not isinstance(key, str) or not is_key(key):  # which stays out of the message
                raise InvalidArgument(
                    f"{name} has a key that is none: a key has {LEAST_KEY_LENGTH} to "
                    f"{MAX_KEY_LENGTH} printable ASCII characters and no blanks",
                    name,
                )
        return tuple(dict.fromkeys(map(digest_of, value)))


@dataclass(frozen=True)
class Boolean:
    """True or false."""

    metavar: str = ""

    def parse(self, text: str) -> object:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return words.get(text.lower(), text)

    def check(self, name: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise InvalidArgument.of(name, value, "True or False")


@dataclass(frozen=True)
class Text:
    """Text without null bytes, not empty; paths count as text."""

    what: str  # such as "the name of a model"
    max_length: int = 4096
    metavar: str = "TEXT"

    def parse(self, text: str) -> object:
        return text

    def check(self, name: str, value: object) -> str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(text, str) and 0 < len(text) <= self.max_length and _is_plain(text):
            return text
        raise InvalidArgument.of(
            name, value, f"{self.what}: text of 1 to {self.max_length} characters"
        )


@dataclass(frozen=True)
class Numbers:
    """A list of positive numbers; on a command line with commas between them."""

    metavar: str = "X,X,..."

    def parse(self, text: str) -> object:
        return [Number(0, 1e6).parse(part) for part in text.split(",")]

    def check(self, name: str, value: object) -> tuple[float, ...]:
        if isinstance(value, list | tuple) and len(value) <= 1024:
            return tuple(Number(0, 1e6).check(name, each) for each in value)
        raise InvalidArgument.of(name, value, "a list of up to 1024 positive numbers")


@dataclass(frozen=True)
class Choice:
    """One of a few words. `words` maps each accepted spelling to the word it stands for."""

    words: tuple[tuple[str, str], ...]
    metavar: str = "NAME"

    def parse(self, text: str) -> object:
        return text

    def check(self, name: str, value: object) -> str:
        word = _word(value)
        for spelling, meaning in self.words:
            if word.lower() == spelling.lower():
                return meaning
        allowed = ", ".join(dict.fromkeys(meaning for _, meaning in self.words))
        raise InvalidArgument.of(name, value, f"one of {allowed}")


@dataclass(frozen=True)
class Bytes:
    """An amount of memory: a number of bytes, or text such as "2GiB"."""

    low: int = 1
    high: int = 2**50
    metavar: str = "SIZE"

    def parse(self, text: str) -> object:
        return text

    def check(self, name: str, value: object) -> int:
        number = _whole(value)
        if isinstance(value, str) and len(value) < 40:
            match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?i?)b?", value.strip().lower())
            units = {**_UNITS, **_BINARY_UNITS}
            if match and match[2] in units:
                number = int(float(match[1]) * units[match[2]])
        if number is not None and self.low <= number <= self.high:
            return number
        raise InvalidArgument.of(name, value, 'a number of bytes, or text such as "2GiB"')


def _whole(value: object) -> int | None:
    """Return a whole number as an int, numpy's too; None for anything else, True and False too."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return None


def _is_plain(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _word(value: object) -> str:
    """Return the word that text, a member of an Enum or a torch.dtype stands for, or nothing."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return str(value)
    kind = type(value)
    return str(value) if (kind.__module__, kind.__name__) == ("torch", "dtype") else ""


@dataclass(frozen=True)
class Only:
    """A choice that other systems have and this one has not: nothing but `words` will do."""

    words: tuple[str, ...]  # accepted; "false" accepts False
    otherwise: str  # what the value must be, as the end of the message
    metavar: str = ""

    def parse(self, text: str) -> object:
        return text

    def check(self, name: str, value: object) -> None:
        word = str(value).lower() if isinstance(value, bool) else _word(value)
        if word not in self.words:
            raise InvalidArgument.of(name, value, self.otherwise)


@dataclass(frozen=True)
class Anything:
    """A value that changes nothing here."""

    metavar: str = ""

    def parse(self, text: str) -> object:
        return text

    def check(self, name: str, value: object) -> None:
        return None
