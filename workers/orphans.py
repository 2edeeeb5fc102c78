"""Answers that are kept for clients whose router is gone.

A client that tells its attempts (`GenerateRequest.attempt`) sends a request again, under its id,
when its connection breaks off. A streamed answer goes on after the tokens that it has. One that is
not streamed would begin anew, as nothing has come of it; so a call that has lost its *connection*
(one that is cancelled is not wanted any more) goes on for a while, and whoever sends the request
again gets all messages of it. An answer that has ended is kept for a while, too: the router may
have died before it has passed it on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mii.messages import choices_of
from mii.proto.inference_pb2 import GenerateRequest, GenerateResponse
from mii.workers.loop import EngineCall, EngineLoop, Piece

_SECONDS: Final = 15.0  # until a router that has died serves again, and its clients have come back
_MAX_BYTES: Final = 2**26  # of requests and messages that are kept, all together
_MAX_CALL_BYTES: Final = 2**22  # of one call's messages; beyond that it is not kept

_OVERHEAD: Final = 1024  # bytes that a call takes besides

_logger = logging.getLogger(__name__)


class RecordedCall:
    """A call of which all messages are remembered, if it may have to be kept.

    Args:
        request: what is answered.
        answers: the engine's side of it.
        encode: makes a message of what has come.
    """

    def __init__(
        self,
        request: GenerateRequest,
        answers: EngineCall,
        encode: Callable[[list[Piece]], GenerateResponse],
    ) -> None:
        self.request = request
        self.answers = answers
        self.may_be_kept = _may_be_kept(request)
        self.message_bytes = 0
        self._encode = encode
        self._messages: list[bytes] = []

    def message_of(self, pieces: list[Piece]) -> bytes:
        """Return the message that tells of what has come, and remember it."""
        message = self._encode(pieces).SerializeToString()
        if self.may_be_kept:
            self._messages.append(message)
            self.message_bytes += len(message)
            if self.message_bytes > _MAX_CALL_BYTES:
                self.may_be_kept = False
                self._messages.clear()
        return message

    def settle(self) -> None:
        """Let go of what is only needed while there is more to come."""
        if not self.answers.running:
            self._encode = _no_message

    def answers_to(self, request: GenerateRequest) -> bool:
        """Whether this is the call for a request that is sent again."""
        ours = self.request
        return (
            self.may_be_kept
            and _may_be_kept(request)
            and request.sampling == ours.sampling
            and request.defaults == ours.defaults
            and request.model == ours.model
            and request.client == ours.client
            and request.prompts == ours.prompts
            and _wanted(request) <= _wanted(ours)
        )

    def messages_for(self, request: GenerateRequest) -> Iterator[bytes]:
        """Iterate over the messages so far, without answers that `request` does not want."""
        wanted = _wanted(request)
        if wanted == _wanted(self.request):
            yield from self._messages
            return
        for body in self._messages:
            message = GenerateResponse.FromString(body)
            deltas = [delta for delta in message.deltas if delta.choice_index in wanted]
            if deltas:
                yield GenerateResponse(deltas=deltas).SerializeToString()


class Orphans:
    """The calls that are kept. Belongs to one event loop.

    Args:
        engine: runs them.
        seconds: for which each is kept.
        max_bytes: of requests and messages of all of them; the oldest ones go first.
    """

    def __init__(
        self, engine: EngineLoop, seconds: float = _SECONDS, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._engine = engine
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._kept: dict[str, RecordedCall] = {}  # by request id, the oldest one first
        self._timers: dict[RecordedCall, asyncio.TimerHandle] = {}
        self._sizes: dict[RecordedCall, int] = {}
        self._bytes = 0  # their sum

    def keep(self, call: RecordedCall, at_most: float | None = None) -> None:
        """Keep a call that has lost its connection or has ended; or end it, if it may not be.

        Args:
            call: belongs to nobody else any more.
            at_most: seconds for which anybody can want it; None: nobody knows.
        """
        if not call.may_be_kept:
            self._engine.release(call.answers)
            return
        request_id = call.request.request_id
        self._drop(request_id)
        if call.answers.running:
            _logger.info("request %s goes on without a router", request_id)
        self._kept[request_id] = call
        seconds = self._seconds if at_most is None else min(self._seconds, at_most)
        timer = asyncio.get_running_loop().call_later(seconds, self._drop, request_id)
        self._timers[call] = timer
        self._count(call, _OVERHEAD + call.request.ByteSize() + call.message_bytes)
        call.answers.redirect(lambda pieces: self._take(call, pieces))
        call.settle()

    def claim(self, request: GenerateRequest) -> RecordedCall | None:
        """Return the call that answers a request which is sent again, if it is kept.

        It is kept no longer then. One of that id which answers another request is ended.
        """
        call = self._kept.get(request.request_id)
        if call is None:
            return None
        if request.attempt > 1 and call.answers_to(request):
            self._forget(call)
            return call
        self._drop(request.request_id)
        return None

    def holding(self, request_ids: Iterable[str]) -> list[str]:
        """Return which of some requests are kept."""
        return [each for each in request_ids if each in self._kept]

    def _take(self, call: RecordedCall, pieces: list[Piece]) -> None:
        message = call.message_of(pieces)
        call.settle()
        if call.may_be_kept:
            self._count(call, len(message))
        else:
            self._drop(call.request.request_id)

    def _count(self, call: RecordedCall, size: int) -> None:
        self._sizes[call] = self._sizes.get(call, 0) + size
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, request_id: str) -> None:
        call = self._kept.get(request_id)
        if call is not None:
            self._forget(call)
            self._engine.release(call.answers)

    def _forget(self, call: RecordedCall) -> None:
        del self._kept[call.request.request_id]
        self._bytes -= self._sizes.pop(call)
        self._timers.pop(call).cancel()


def _may_be_kept(request: GenerateRequest) -> bool:
    """Whether a request's client comes back, and would have to begin from the beginning."""
    begun = any(answer.token_ids for answer in request.resume)
    alone = len(request.prompts) == 1 and bool(request.request_id)
    return request.attempt > 0 and not request.stream and alone and not begun


def _wanted(request: GenerateRequest) -> set[int]:
    """Return which of the answers to a prompt are asked for."""
    listed = {answer.choice_index for answer in request.resume}
    return listed or set(range(choices_of(request)))


def _no_message(pieces: list[Piece]) -> GenerateResponse:
    raise AssertionError("the call has ended")
