"""One prompt on its way: what is needed to go on with it on another replica."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Final

from mii.errors import InternalError, Leaving, Unavailable
from mii.messages import choices_of, partial_answers
from mii.proto.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    PartialAnswer,
    Prompt,
    SequenceDelta,
)
from mii.router.request_record import PromptRecord

_MAX_MOVES: Final = 16  # from replica to replica
_MOST_BLAME: Final = 2.0  # two replicas that failed, or four that were killed from outside
_USUAL_ANSWER: Final = 256  # tokens, where a request does not limit its answer
_CHARACTERS_PER_TOKEN: Final = 4.0


def begun_answers(request: GenerateRequest) -> list[ChoiceState]:
    """Return the states of a prompt's answers as its client has them."""
    partial = partial_answers(request)
    if partial is None:
        return [ChoiceState() for _ in range(choices_of(request))]
    begun = partial[0]
    return [
        ChoiceState(array("i", begun[index]))
        if index in begun
        else ChoiceState(finish_reason="before")
        for index in range(choices_of(request))
    ]


@dataclass(slots=True)
class ChoiceState:
    """What has come back of one answer."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: str = ""
    whole: SequenceDelta | None = None  # all of it, where the client wants it in one piece


@dataclass(eq=False)
class Submission:
    """One prompt on its way.

    Args:
        request: one prompt, its seed drawn.
        prompt_index: of the prompt in the client's request.
        choices: one for each answer, empty.
        seen: counts what comes; None: nobody wants to know.
    """

    request: GenerateRequest
    prompt_index: int
    choices: list[ChoiceState]
    seen: PromptRecord | None = None
    holder: int | None = field(default=None, init=False)  # a replica that has answered it before
    moves: int = field(default=0, init=False)
    blame: float = field(default=0.0, init=False)  # for deaths in a row, without a token between
    _accepted: bool = field(default=False, init=False)  # by any replica
    _in_hands: bool = field(default=False, init=False)  # of the replica that it is sent to now
    _moved_on: bool = field(default=False, init=False)  # a token has come from that replica
    _began: float = field(default_factory=time.monotonic, init=False)
    _sent: float = field(default=0.0, init=False)  # to the replica that has it now

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        limit = sampling.max_new_tokens if sampling.HasField("max_new_tokens") else _USUAL_ANSWER
        self._limit = limit
        self._streamed = self.request.stream
        awaited = [choice for choice in self.choices if not choice.finish_reason]
        self._unfinished = len(awaited)
        self._answer_tokens = sum(max(0, limit - len(choice.token_ids)) for choice in awaited)
        self._prompt_tokens = _size_of(self.request.prompts[0])

    @property
    def remaining_tokens(self) -> float:
        """The tokens of the prompt and of what is still to come of its answers, estimated."""
        return self._prompt_tokens + self._answer_tokens if self._unfinished else 0.0

    def next_request(self) -> GenerateRequest:
        """Return what to ask the next replica: the whole request, or what is left of it."""
        self._in_hands = self._moved_on = False
        self._sent = time.monotonic()
        if not self.moves:
            return self.request
        rest = GenerateRequest()
        rest.CopyFrom(self.request)
        rest.ClearField("resume")  # the client's own: the tokens that it had are among these
        rest.resume.extend(
            PartialAnswer(choice_index=index, token_ids=choice.token_ids)
            for index, choice in enumerate(self.choices)
            if not choice.finish_reason
        )
        return rest

    def accept(self) -> bool:
        """Note that a replica has queued the request; return whether it is the first to do so."""
        first = not self._accepted
        self._accepted = self._in_hands = True
        return first

    def record(self, body: bytes) -> bytes:
        """Take in a message of a worker's; return what of it the client is to get now, if anything.

        Called for every token: what need not be altered is passed on as it came.

        Raises:
            InternalError: if the worker breaks the protocol.
        """
        response = GenerateResponse.FromString(body)
        altered = self.prompt_index > 0
        whole = []
        # Slices: to iterate over a message's field itself takes four times as long.
        for delta in response.deltas[:]:
            choice = self._add(delta)
            if altered:
                delta.prompt_index = self.prompt_index
            if choice.finish_reason:
                altered |= self._end(delta)
            if not self._streamed:
                joined = _joined(choice, delta)
                if joined.finish_reason:
                    whole.append(joined)
                    choice.whole = None
        if self._streamed:
            return response.SerializeToString() if altered else body
        return GenerateResponse(deltas=whole).SerializeToString()

    def _add(self, delta: SequenceDelta) -> ChoiceState:
        """Take in what has come of an answer."""
        index = delta.choice_index
        if index >= len(self.choices):
            raise InternalError(f"a worker answered as choice {index} of {self}")
        choice = self.choices[index]
        if choice.finish_reason:
            raise InternalError(f"a worker went on after the end of {self}")
        ids = delta.token_ids[:]
        left = self._limit - len(choice.token_ids)  # of the answer, before these
        choice.token_ids.extend(ids)
        choice.finish_reason = delta.finish_reason
        self._moved_on = True
        if left > 0:
            self._answer_tokens -= left if choice.finish_reason else min(left, len(ids))
        if self.seen is not None:
            self.seen.tokens(index, len(ids))
        return choice

    def _end(self, delta: SequenceDelta) -> bool:
        """Note that an answer has come to its end; return whether its last delta was altered."""
        self._unfinished -= 1
        if self.moves:  # its usage is to count from the beginning
            earlier = self._sent - self._began
            delta.usage.total_seconds += earlier
            delta.usage.time_to_first_token_seconds += earlier
        if self.seen is not None:
            self.seen.ended(delta.usage)
        return self.moves > 0

    @property
    def finished(self) -> bool:
        """Whether every answer to the prompt has come to its end."""
        return self._unfinished == 0

    def is_suspect(self, error: Unavailable) -> bool:
        """Whether its replica may have died of this request: it had it, and gave no token of it."""
        return self._in_hands and not self._moved_on and not isinstance(error, Leaving)

    def lose(self, replica: int, error: Unavailable, blame: float) -> None:
        """Note that the replica that had the request is gone.

        Args:
            replica: its number.
            error: how it is known.
            blame: 0 to 1, how likely it is that the replica died of this request.

        Raises:
            InternalError: if the request seems to be what replicas die of.
            Unavailable: if it has been moved too often.
        """
        self.moves += 1
        if self._moved_on:
            self.blame = 0.0
        self.blame += blame
        if self.blame >= _MOST_BLAME:
            raise InternalError(
                f"{self} is given up: replica after replica has died while computing it, the last "
                f"of them replica {replica} ({error}); it is sent to no other one"
            )
        if self.moves > _MAX_MOVES:
            raise Unavailable(
                f"{self} has been moved {_MAX_MOVES} times from a replica that was gone, the last "
                f"time from replica {replica} ({error}): send it again"
            )

    def __str__(self) -> str:
        return f"request {self.request.request_id}"


def _size_of(prompt: Prompt) -> float:
    """Estimate the tokens of a prompt."""
    if prompt.HasField("token_ids"):
        return float(len(prompt.token_ids.ids))
    return (len(prompt.chat.messages_json) + len(prompt.text)) / _CHARACTERS_PER_TOKEN


def _joined(choice: ChoiceState, delta: SequenceDelta) -> SequenceDelta:
    """Append a part of an answer to what has come of it."""
    if choice.whole is None:
        choice.whole = delta
    else:
        choice.whole.text += delta.text
        choice.whole.token_ids.extend(delta.token_ids)
        choice.whole.logprobs.extend(delta.logprobs)
        choice.whole.finish_reason = delta.finish_reason
        choice.whole.usage.CopyFrom(delta.usage)
        if delta.HasField("stop_match"):
            choice.whole.stop_match = delta.stop_match
    return choice.whole
