"""What a user gets for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GenerationFinishReason(StrEnum):
    """Why an answer, or a piece of one, ends where it does; DeepSpeed-MII's names."""

    STOP = "stop"  # end of sequence, a stop string or a stop token
    LENGTH = "length"  # as many tokens as were asked for, or as the context holds
    NONE = "none"  # it goes on: this is a piece of a stream


@dataclass
class Response:
    """An answer, or a piece of one. `str()` is its text."""

    generated_text: str
    prompt_length: int  # tokens
    generated_length: int  # tokens of the answer so far
    finish_reason: str  # "stop", "length", or "none" for a piece of a stream that goes on
    token_ids: list[int] = field(default_factory=list)  # of this text
    logprobs: list[Any] = field(default_factory=list)  # one for each of token_ids, if asked for

    def __str__(self) -> str:
        return self.generated_text

    __repr__ = __str__

    def to_msg_dict(self) -> dict[str, Any]:
        """Return the fields of DeepSpeed-MII's message for this."""
        return {
            "response": self.generated_text,
            "finish_reason": str(self.finish_reason),
            "prompt_tokens": self.prompt_length,
            "generated_tokens": self.generated_length,
        }

    @staticmethod
    def from_msg_dict(message: dict[str, Any]) -> Response:
        """Build a response of the fields of DeepSpeed-MII's message."""
        return Response(
            generated_text=message["response"],
            prompt_length=message["prompt_tokens"],
            generated_length=message["generated_tokens"],
            finish_reason=message["finish_reason"],
        )
