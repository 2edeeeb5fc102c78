"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any, Final

from mii.proto.inference_pb2 import TokenLogprob, TokenLogprobs

# JSON has no infinity. This is what the OpenAI API sends for a token that cannot come.
_LEAST: Final = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return a chat choice's `logprobs`."""
    content = []
    for token in tokens:
        entry = _chat_entry(token.sampled)
        entry["top_logprobs"] = [_chat_entry(other) for other in token.top]
        content.append(entry)
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes a completion choice's `logprobs`, piece by piece: offsets run over the whole answer."""

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the entries of the next tokens."""
        entries: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            entries["tokens"].append(_text(token.sampled))
            entries["token_logprobs"].append(_finite(token.sampled.logprob))
            # The sampled token is always among them: its entry comes last, lest it be replaced.
            top = {_text(other): _finite(other.logprob) for other in reversed(token.top)}
            top[_text(token.sampled)] = _finite(token.sampled.logprob)
            entries["top_logprobs"].append(top)
            entries["text_offset"].append(self._characters)
            self._characters += len(self._decoder.decode(token.sampled.token))
        return entries


def _chat_entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": _text(token),
        "logprob": _finite(token.logprob),
        "bytes": list(token.token),
    }


def _text(token: TokenLogprob) -> str:
    """Return a token's text; a token that is part of a character is told by its bytes."""
    try:
        return token.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
