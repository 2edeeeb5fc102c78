"""What a user gets for a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mii.engine.plan import TokenLogprobs


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
    generated_length: int  # tokens of the answer; in a stream, so far
    finish_reason: str  # one of GenerationFinishReason's
    token_ids: list[int] = field(default_factory=list)  # of this text
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if asked for

    def __str__(self) -> str:
        return self.generated_text

    __repr__ = __str__

    def to_msg_dict(self) -> dict[str, Any]:
        """Return the fields by name, as DeepSpeed-MII does."""
        return asdict(self)

    @staticmethod
    def from_msg_dict(msg: Mapping[str, Any]) -> Response:
        """Return the response whose fields `to_msg_dict` gave, perhaps by way of JSON."""
        logprobs = [_logprobs(each) for each in msg.get("logprobs", ())]
        return Response(**{**msg, "logprobs": logprobs})


def _logprobs(fields: Mapping[str, Any]) -> TokenLogprobs:
    from mii.engine.plan import TokenLogprobs  # imports NumPy

    return TokenLogprobs(fields["sampled"], tuple((token, value) for token, value in fields["top"]))
