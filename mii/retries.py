"""How clients go on when the router, or the way to it, breaks off.

A request that is sent again has the same id and the same seed, asks only for what has not come yet,
and has the tokens with it that have: nothing comes twice, and nothing is generated twice that the
client has.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from mii.errors import Unavailable
from mii.messages import new_request_id
from mii.proto.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    PartialAnswer,
    SequenceDelta,
)

# For a deployment that is known to run, and for one of which only the address is known.
RETRY_SECONDS, REMOTE_RETRY_SECONDS = 60.0, 10.0

_FIRST_PAUSE: Final = 0.05  # seconds; doubled each time
_LONGEST_PAUSE: Final = 1.0


@dataclass
class _Answer:
    """What has come of one answer."""

    token_ids: list[int] = field(default_factory=list)
    ended: bool = False


class Patience:
    """When to try again, and when to give up.

    Args:
        seconds: from the first failure in a row to the last try; 0: there is no second try.
        deadline: when nobody waits for the answer any more, on `time.monotonic`'s clock.
    """

    def __init__(self, seconds: float, deadline: float | None) -> None:
        self._seconds = seconds
        self._deadline = deadline
        self._failing_since: float | None = None
        self._pause = _FIRST_PAUSE

    def pause_after(self, error: Exception) -> float:
        """Return the seconds until the next try.

        Raises:
            Exception: the error itself, if a further try is of no use.
        """
        now = time.monotonic()
        since = self._failing_since = self._failing_since or now
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        late = self._deadline is not None and now + pause >= self._deadline
        if not isinstance(error, Unavailable) or late or now + pause - since > self._seconds:
            raise error
        return pause

    def worked(self) -> None:
        """Note that the server answers: what fails next begins a new row."""
        self._failing_since = None
        self._pause = _FIRST_PAUSE

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


class Attempts:
    """One request on its way, however often it has to be sent.

    Args:
        request: of any number of prompts; gets an id, and a single prompt gets a seed.
    """

    def __init__(self, request: GenerateRequest) -> None:
        request.request_id = request.request_id or new_request_id()
        if len(request.prompts) == 1 and not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)
        self._request = request
        choices = request.sampling.n if request.sampling.HasField("n") else 1
        self._answers = [[_Answer() for _ in range(choices)] for _ in request.prompts]
        self._prompts = list(range(len(request.prompts)))  # those of the latest request, by place
        self._sent = False

    def next_request(self) -> GenerateRequest:
        """Return what to send: the request, and then what is left of it."""
        if not self._sent:
            self._sent = True
            return self._request
        self._prompts = [
            index
            for index, answers in enumerate(self._answers)
            if not all(answer.ended for answer in answers)
        ]
        rest = GenerateRequest()
        rest.CopyFrom(self._request)
        del rest.prompts[:]
        rest.prompts.extend(self._request.prompts[index] for index in self._prompts)
        if len(self._prompts) == 1 and rest.sampling.HasField("seed"):
            answers = self._answers[self._prompts[0]]
            if any(answer.token_ids or answer.ended for answer in answers):
                rest.resume.extend(
                    PartialAnswer(choice_index=index, token_ids=answer.token_ids)
                    for index, answer in enumerate(answers)
                    if not answer.ended
                )
        return rest

    def take(self, message: GenerateResponse) -> GenerateResponse:
        """Note what has come; return it as if the request had been sent once."""
        if len(self._prompts) == len(self._answers) and not any(
            self._answers[self._prompts[delta.prompt_index]][delta.choice_index].ended
            for delta in message.deltas
        ):
            for delta in message.deltas:
                self._note(delta)
            return message
        news = GenerateResponse()
        for delta in message.deltas:
            delta.prompt_index = self._prompts[delta.prompt_index]
            if not self._answers[delta.prompt_index][delta.choice_index].ended:
                self._note(delta)
                news.deltas.append(delta)
        return news

    @property
    def finished(self) -> bool:
        """Whether all answers have come to their end."""
        return all(answer.ended for answers in self._answers for answer in answers)

    def _note(self, delta: SequenceDelta) -> None:
        answer = self._answers[delta.prompt_index][delta.choice_index]
        answer.token_ids.extend(delta.token_ids)
        answer.ended = bool(delta.finish_reason)


def deadline_of(timeout: float | None) -> float | None:
    """Return when a call that begins now has to be over, on `time.monotonic`'s clock."""
    return None if timeout is None else time.monotonic() + timeout
