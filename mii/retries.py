"""How clients go on when the router, or the way to it, breaks off.

A request that is sent again has the same id and the same seeds, asks only for the answers that have
not come to their end, and has the tokens of them with it that have come. So nothing comes twice,
and nothing is generated twice that the client has; what it does not have is kept for it where it
was generated (see `mii.workers.orphans`).
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from mii.errors import Overloaded, Unavailable
from mii.messages import choices_of, new_request_id
from mii.proto.inference_pb2 import GenerateRequest, GenerateResponse, PartialAnswer

# For a deployment that is known to run, and for one of which only the address is known.
RETRY_SECONDS, REMOTE_RETRY_SECONDS = 60.0, 10.0

_FIRST_PAUSE: Final = 0.05  # seconds; doubled each time
_LONGEST_PAUSE: Final = 1.0
# A connection that broke off after so many seconds had been of use: what follows is a new failure.
# But only so many times, if nothing comes in between: something on the way may end it each time.
_LASTING: Final = 1.0
_MOST_BREAKS: Final = 8
_REFUSALS: Final = 2  # for a full queue, after which a request that is new is tried again


class BrokenOff(Unavailable):
    """There was a connection, and it broke off in the middle of a call."""


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
        self._tried_at = time.monotonic()
        self._refusals = 0
        self._breaks = 0  # of connections that had lasted, without an answer between them
        self._under_way = False  # it had been taken on, perhaps, before a connection broke

    def pause_after(self, error: Exception) -> float:
        """Return the seconds until the next try.

        A full queue is waited for as long as the refusal says, twice; it is no reason to give up
        what had been under way before a connection broke off.

        Raises:
            Exception: the error itself, if a further try is of no use.
        """
        now = time.monotonic()
        if isinstance(error, BrokenOff) and now - self._tried_at >= _LASTING:
            self._breaks += 1
            if self._breaks <= _MOST_BREAKS:
                self._begin_anew()
        since = self._failing_since = self._failing_since or now
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if isinstance(error, Overloaded):
            if error.retry_after is not None:
                pause = error.retry_after * random.uniform(1.0, 1.1)  # not all at the same time
            self._refusals += 1
            told_when = error.retry_after is not None and self._refusals <= _REFUSALS
            useful = told_when or self._under_way
        else:
            useful = isinstance(error, Unavailable)
            self._under_way = True
        late = self._deadline is not None and now + pause >= self._deadline
        if not useful or late or now + pause - since > self._seconds:
            raise error
        self._tried_at = now + pause
        return pause

    def worked(self) -> None:
        """Note that the server answers: what fails next begins a new row."""
        self._breaks = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._failing_since = None
        self._pause = _FIRST_PAUSE

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


class Attempts:
    """One request on its way, however often it has to be sent.

    Args:
        request: of any number of prompts; gets an id, and seeds if it has none.
    """

    def __init__(self, request: GenerateRequest) -> None:
        request.request_id = request.request_id or new_request_id()
        if not request.sampling.HasField("seed"):
            request.seeds.extend(secrets.randbits(63) for _ in request.prompts)
        self._request = request
        choices = choices_of(request)
        self._answers = [[_Answer() for _ in range(choices)] for _ in request.prompts]

    def next_request(self) -> GenerateRequest:
        """Return what to send: the request, and from the second time on what is left of it."""
        request = self._request
        request.attempt += 1
        del request.resume[:]
        if any(answer.token_ids or answer.ended for of in self._answers for answer in of):
            request.resume.extend(
                PartialAnswer(prompt_index=prompt, choice_index=choice, token_ids=answer.token_ids)
                for prompt, answers in enumerate(self._answers)
                for choice, answer in enumerate(answers)
                if not answer.ended
            )
        return request

    def take(self, message: GenerateResponse) -> None:
        """Note what has come."""
        for delta in message.deltas:
            answer = self._answers[delta.prompt_index][delta.choice_index]
            answer.token_ids.extend(delta.token_ids)
            answer.ended = bool(delta.finish_reason)

    @property
    def finished(self) -> bool:
        """Whether all answers have come to their end."""
        return all(answer.ended for answers in self._answers for answer in answers)


def deadline_of(timeout: float | None) -> float | None:
    """Return when a call that begins now has to be over, on `time.monotonic`'s clock."""
    return None if timeout is None else time.monotonic() + timeout
