"""Ids to text, token by token: only text that no later token can change, at a flat cost per token.

The pieces of a sequence join to exactly `tokenizer.decode(ids)` of all its new ids. Three habits of
decoders stand in the way of decoding each token alone:

- The first token is treated apart: Llama's loses its leading blank, WordPiece puts a blank before
  all others. So a token is decoded after the one before it, whose text is then cut off.
- A character's bytes may be spread over tokens. Byte-level decoders (GPT-2, Llama 3, Qwen) show an
  incomplete character as one U+FFFD at the end of the text: that one is held back. It stands for at
  most three bytes, and all before it is settled; so text flows on, one U+FFFD late, even if a model
  gives nothing but invalid bytes.
- Tokenizers with byte fallback (Llama 2, Gemma) have tokens like <0xE4>, and judge a run of
  them as a whole: it is valid UTF-8, or each of its bytes is a U+FFFD. So a run is held back while
  it is valid, and shown when it ends or is past saving. A run of more than 32 tokens is shown
  character by character from there on: should it turn out invalid after all, the characters shown
  stay, where a decode of the whole would have replaced them. This is the one exception.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_BYTES = 32

# A window that has not settled for so many tokens is cut to its last few: an incomplete character
# has at most three bytes, so it began within the last three tokens.
_MAX_WINDOW = 8
_TAIL = 4


class TokenDecoder(Protocol):
    """What a detokenizer asks of a tokenizer."""

    @property
    def byte_fallback(self) -> Mapping[int, int]:
        """The byte values of tokens like <0xE4>, by id; empty if the decoder has no fallback."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of the ids, without special tokens and ids that have no token."""
        ...


class Detokenizer:
    """Turns one sequence's new ids into text. The prompt plays no part.

    Args:
        tokenizer: decodes ids.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._decode = tokenizer.decode
        self._byte_fallback = tokenizer.byte_fallback
        self._context: list[int] = []  # the token before the window
        self._context_length = 0  # characters of its text
        self._window: list[int] = []  # tokens whose text is not all settled
        self._shown = 0  # characters of the window's text that were given out
        self._run: _ByteRun | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids; return the text that they settle."""
        return "".join([self._push_one(token) for token in ids])

    def flush(self) -> str:
        """Return the rest of the text: no further ids follow."""
        return self._end_window() + self._end_run()

    def _push_one(self, token: int) -> str:
        byte = self._byte_fallback.get(token)
        if byte is not None:
            piece = self._end_window()
            if self._run is None:
                self._run = _ByteRun()
            return piece + self._run.push(token, byte, self._text)
        alone = self._decode([token])
        if not alone and not self._decode([token, token]):
            return ""  # special or unknown; a lone blank would have shown the second time
        piece = self._end_run()
        self._window.append(token)
        text = self._text(self._window)
        settled = max(self._shown, len(text) - text.endswith(REPLACEMENT))
        piece += text[self._shown : settled]
        self._shown = settled
        if settled == len(text):
            self._begin_after(token, len(alone))
        elif len(self._window) > _MAX_WINDOW:
            self._context, self._context_length = [], 0
            self._window = self._window[-_TAIL:]
            self._shown = len(self._text(self._window)) - (len(text) - settled)
        return piece

    def _text(self, ids: list[int]) -> str:
        return self._decode(self._context + ids)[self._context_length :]

    def _begin_after(self, token: int, length: int) -> None:
        self._context, self._context_length = [token], length
        self._window, self._shown = [], 0

    def _end_window(self) -> str:
        if not self._window:
            return ""
        piece = self._text(self._window)[self._shown :]
        token = self._window[-1]
        self._begin_after(token, len(self._decode([token])))
        return piece

    def _end_run(self) -> str:
        if self._run is None:
            return ""
        piece = self._run.end(self._text)
        token = self._run.last
        self._run = None
        self._begin_after(token, len(self._decode([token])))
        return piece


class _ByteRun:
    """Consecutive byte tokens: valid UTF-8 as a whole, or each of them a U+FFFD."""

    def __init__(self) -> None:
        self.last = -1  # the newest token
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._held: list[int] = []
        self._spoiled = False
        self._limit = MAX_HELD_BYTES

    def push(self, token: int, byte: int, text_of: Callable[[list[int]], str]) -> str:
        """Take a further token; return the text that it settles."""
        self.last = token
        self._held.append(token)
        if self._spoiled:
            return self._replace_held()
        try:
            character = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._spoiled = True
            return self._replace_held()
        if len(self._held) <= self._limit or not character:
            return ""
        # Only the run's first text can be the sequence's first, which the tokenizer treats apart.
        text = text_of(self._held) if self._limit else character
        self._held.clear()
        self._limit = 0
        return text

    def end(self, text_of: Callable[[list[int]], str]) -> str:
        """Return the rest of the run's text: a token of another kind follows, or none."""
        return text_of(self._held)

    def _replace_held(self) -> str:
        text = REPLACEMENT * len(self._held)
        self._held.clear()
        return text
