"""Guided decoding: which tokens keep an answer within a JSON schema, a regex, a grammar, a list.

The work is llguidance's, a parser over derivatives of regular expressions and Earley's algorithm;
what it may spend is bounded by its own limits, so that no grammar can hold up an engine's step for
more than some milliseconds. Like all else that draws a token, an answer's state follows from its
tokens alone (see `SamplingState`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mii.engine.params import SamplingParams
from mii.errors import InvalidArgument, shorten
from mii.models.tokenizer import TokenizerLike

MAX_GRAMMAR_BYTES: Final = {"json": 2**20, "regex": 2**15, "grammar": 2**17, "choice": 2**17}

_COMPILED: Final = 64  # grammars that are kept, since clients ask for the same ones again and again


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer's text must match, as a request says it.

    Args:
        kind: "json" (a JSON schema), "regex", "grammar" (Lark, as llguidance reads it) or "choice".
        source: the schema, expression or grammar; for "choice" a JSON list of strings.
    """

    kind: str
    source: str

    @staticmethod
    def of(params: SamplingParams) -> Guide | None:
        """Return what a request asks for, if it asks for anything."""
        if params.guided_json is not None:
            return Guide("json", params.guided_json)
        if params.guided_regex is not None:
            return Guide("regex", params.guided_regex)
        if params.guided_grammar is not None:
            return Guide("grammar", params.guided_grammar)
        if params.guided_choice is not None:
            return Guide("choice", json.dumps(params.guided_choice))
        return None


class Grammar:
    """Which tokens an answer may go on with. Starts at the answer's beginning.

    Args:
        matcher: llguidance's, at its beginning; belongs to this object.
        vocab_size: columns of the logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def fork(self) -> Grammar:
        """Return one of its own, at the beginning, for another answer."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return Grammar(matcher, self._vocab_size)

    def reset(self) -> None:
        """Go back to the answer's beginning."""
        self._matcher.reset()

    def append(self, token: int) -> None:
        """Take notice of the answer's next token."""
        if not self._matcher.is_stopped():  # then only the end may follow
            self._matcher.consume_token(token)

    @property
    def failure(self) -> str:
        """Why the answer cannot go on: a limit was met. "" if it can."""
        return str(self._matcher.get_error())

    def allowed(self) -> NDArray[np.bool_]:
        """Return for each token whether it may come next; an end of sequence where it may end."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little", count=self._vocab_size)
        if len(bits) < self._vocab_size:
            bits = np.pad(bits, (0, self._vocab_size - len(bits)))
        return bits.view(np.bool_)


class GrammarCompiler:
    """Compiles guides for one model. May be used from any thread.

    Args:
        tokenizer: the model's.
        vocab_size: columns of its logits.
    """

    def __init__(self, tokenizer: TokenizerLike, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Guide, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, guide: Guide) -> Grammar:
        """Return the grammar of a guide, to be forked for each answer.

        Raises:
            InvalidArgument: naming the parameter, if it is none, or takes too much to follow.
        """
        with self._lock:
            grammar = self._compiled.get(guide)
            if grammar is not None:
                self._compiled.move_to_end(guide)
                return grammar
        grammar = self._compile(guide)
        with self._lock:
            self._compiled[guide] = grammar
            while len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def _compile(self, guide: Guide) -> Grammar:
        from llguidance import LLMatcher

        field = f"guided_{guide.kind}"
        size, limit = len(guide.source.encode()), MAX_GRAMMAR_BYTES[guide.kind]
        if size > limit:
            raise InvalidArgument(f"{field} has {size} bytes: it must have at most {limit}", field)
        try:
            matcher = LLMatcher(self._vocabulary, _grammar_of(guide), log_level=0)
        except ValueError as error:
            raise InvalidArgument(f"{field} cannot be followed: {error}", field) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # not in an engine's step: the first one takes longest
        if matcher.is_error():
            raise InvalidArgument(
                f"{field} cannot be followed: {_first_lines(matcher.get_error())}", field
            )
        return Grammar(matcher, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(self._tokenizer.eos_token_ids)
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)), eos_token=ends
        )


class _Vocabulary:
    """A tokenizer as llguidance takes it."""

    bos_token_id = None

    def __init__(self, tokenizer: TokenizerLike, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.eos_token_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]

    def __call__(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, False)


def _grammar_of(guide: Guide) -> str:
    """Return a guide in llguidance's own form.

    Raises:
        ValueError: if the source cannot be read.
    """
    from llguidance import LLMatcher, regex_to_lark

    match guide.kind:
        case "json":
            return str(LLMatcher.grammar_from_json_schema(guide.source))
        case "regex":
            # \d is 0 to 9, as those who ask for it expect, and not any script's digits.
            expression = regex_to_lark(guide.source, "d")
            return str(LLMatcher.grammar_from_lark(f"start: /{expression}/"))
        case "choice":
            alternatives = " | ".join(json.dumps(choice) for choice in json.loads(guide.source))
            return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))
        case _:
            return str(LLMatcher.grammar_from_lark(guide.source))


def _first_lines(error: str) -> str:
    return shorten(" ".join(error.split()), 400).strip("'\"")
