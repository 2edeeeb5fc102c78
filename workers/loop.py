"""The engine's loop, and how calls on the event loop talk with it.

    event loop    EngineCall   --commands-->  inbox
    engine        EngineLoop.run: take commands, step, hand over what the step gave; sleep if idle

What a step gave crosses to the event loop in one go, however many calls it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mii.engine.generator import Delta, Generator, Usage
from mii.engine.plan import StepPlan, TokenLogprobs
from mii.engine.prompts import GenerationRequest
from mii.errors import InvalidArgument, Leaving, MIIError, Unavailable
from mii.pulse import Pulse
from mii.status import known_error

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Piece:
    """What has come of one sequence since it was last taken."""

    index: int  # which of the call's requests
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_match: str | None = None
    usage: Usage | None = None

    def add(self, delta: Delta) -> None:
        """Append what one more step has added."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_match = delta.stop_match
        self.usage = delta.usage


class EngineCall:
    """The sequences of one call, whose pieces go to a sink. Belongs to the event loop.

    What the sink has no room for is merged, so that a slow reader costs no more than its answers'
    length.

    Args:
        count: how many sequences.
        least: tokens of a piece at least, unless it is a sequence's last.
    """

    def __init__(self, count: int, *, least: int) -> None:
        self._least = least
        self._running = count
        self._pieces: dict[int, Piece] = {}
        self._ended: list[Piece] = []
        self._error: Exception | None = None
        self._sink: Callable[[list[Piece]], None] | None = None
        self._has_room: Callable[[], bool]
        self._news = asyncio.Event()  # it is accepted, or has failed, or the sink has all of it
        self._accepted = False

    @property
    def running(self) -> bool:
        """Whether the engine may still work on a sequence of the call."""
        return self._running > 0

    async def accepted(self) -> None:
        """Wait until the engine has queued all sequences.

        Raises:
            MIIError: if it has not.
        """
        while not self._accepted:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def send_to(
        self, sink: Callable[[list[Piece]], None], has_room: Callable[[], bool]
    ) -> None:
        """Pass pieces on as they come; return when the sink has taken the last one.

        Args:
            sink: takes what has come of some of the sequences.
            has_room: whether it may be called now; if not, `pass_on` is to be called when it may.

        Raises:
            MIIError: if the engine has failed, after what came before.
            Exception: what the sink has raised.
        """
        self._sink = sink
        self._has_room = has_room
        self.pass_on()
        while self._running > 0 or self._ended:
            if self._error is not None:
                raise self._error
            await self._wait()

    def redirect(self, sink: Callable[[list[Piece]], None]) -> None:
        """Give what has come and what will come to a sink that always has room."""
        self._sink, self._has_room = sink, _always
        self.pass_on()

    def pass_on(self) -> None:
        """Give the sink what waits for it, if it has room."""
        if self._sink is None or not self._has_room():
            return
        pieces = self._take()
        if pieces:
            try:
                self._sink(pieces)
            except Exception as error:
                self._error = self._error or error
                self._sink = None
        if self._running == 0 or self._error is not None:
            self._news.set()

    def accept(self) -> None:
        """Note that all sequences are queued."""
        self._accepted = True
        self._news.set()

    def deliver(self, index: int, delta: Delta) -> None:
        """Take in what a step has added to a sequence; `pass_on` is to follow."""
        if delta.failure:
            self.fail(
                InvalidArgument(f"an answer cannot go on within its grammar: {delta.failure}")
            )
            return
        piece = self._pieces.get(index)
        if piece is None:
            piece = self._pieces[index] = Piece(index)
        piece.add(delta)
        if delta.finish_reason is not None:
            self._ended.append(self._pieces.pop(index))
            self._running -= 1

    def fail(self, error: MIIError) -> None:
        """End the call with an error, after what has already come."""
        self._error = self._error or error
        self.pass_on()
        self._news.set()

    def _take(self) -> list[Piece]:
        pieces, self._ended = self._ended, []
        for index, piece in list(self._pieces.items()):
            if len(piece.token_ids) >= self._least:
                pieces.append(self._pieces.pop(index))
        return pieces

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


@dataclass(frozen=True, slots=True)
class _Add:
    call: EngineCall
    requests: Sequence[GenerationRequest]


@dataclass(frozen=True, slots=True)
class _Abort:
    call: EngineCall


class EngineLoop:
    """Drives a generator in the thread that calls `run`, for calls on an event loop.

    Args:
        generator: nobody else may use it.
        loop: the event loop that all calls belong to.
        pulse: is told about every step.
    """

    def __init__(
        self, generator: Generator, loop: asyncio.AbstractEventLoop, pulse: Pulse | None = None
    ) -> None:
        self._generator = generator
        self._pulse = pulse
        if pulse is not None:
            generator.engine.on_launch = self._begin_step
        self._loop = loop
        # Of the event loop.
        self._calls: set[EngineCall] = set()
        self._refusal: MIIError | None = None  # why there will be no more answers
        # Shared.
        self._wake = threading.Condition()
        self._inbox: list[_Add | _Abort] = []
        self._stopping = False
        self._fatal: BaseException | None = None  # why `run` is to end
        # Of the engine's thread.
        self._owners: dict[int, tuple[EngineCall, int]] = {}  # by handle
        self._request_ids: dict[int, str] = {}  # by handle
        self._shown: list[int] = []  # handles that the pulse tells
        self._handles: dict[EngineCall, set[int]] = {}

    # On the event loop.

    @property
    def takes_requests(self) -> bool:
        """Whether a request would be answered."""
        return self._refusal is None

    async def submit(self, requests: Sequence[GenerationRequest], *, least: int = 1) -> EngineCall:
        """Queue all requests of a call, or none; in the end the call is to be released.

        Args:
            requests: one for each sequence.
            least: tokens of a piece at least, unless it is a sequence's last.

        Raises:
            InvalidArgument, Overloaded: if the engine refuses one of them.
            Unavailable: if the engine is stopping or has failed.
        """
        if self._refusal is not None:
            raise _again(self._refusal)
        call = EngineCall(len(requests), least=least)
        self._calls.add(call)
        self._post(_Add(call, requests))
        try:
            await call.accepted()
        except BaseException:
            self.release(call)
            raise
        return call

    def release(self, call: EngineCall) -> None:
        """Leave nothing of a call running."""
        self._calls.discard(call)
        if call.running:
            self._post(_Abort(call))

    def fail_calls(self, error: MIIError) -> None:
        """End all calls, and those that will come, with an error."""
        self._refusal = self._refusal or error
        for call in self._calls:
            call.fail(_again(error))

    def give_up(self, error: BaseException) -> None:
        """End all calls as unavailable, and let `run` raise the error: this process is unwell."""
        self.fail_calls(Unavailable(f"this worker cannot go on: {error}"))
        with self._wake:
            self._fatal = error
            self._wake.notify()

    def _post(self, command: _Add | _Abort) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # From any thread.

    def stop(self) -> None:
        """End all calls as unavailable, and let `run` return."""
        self._tell(self.fail_calls, Leaving("this worker is stopping: send the request again"))
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Run a function on the event loop, if that still runs."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # In the engine's thread.

    def run(self) -> None:
        """Drive the engine until `stop`.

        Raises:
            Exception: what the engine has raised; all calls have been told.
        """
        try:
            while self._take_commands():
                if self._generator.has_work:
                    self._step()
        except BaseException as error:
            kind = "" if isinstance(error, MIIError) else f"{type(error).__name__}: "
            self._tell(self.fail_calls, Unavailable(f"the engine has failed: {kind}{error}"))
            raise

    def _take_commands(self) -> bool:
        """Do what was asked meanwhile, asleep until there is something to do; False: stop."""
        with self._wake:
            while not (self._inbox or self._stopping or self._fatal or self._generator.has_work):
                if self._pulse is not None:
                    self._pulse.rest()
                    self._shown = []
                self._wake.wait()
            if self._fatal is not None:
                raise self._fatal
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        verdicts = []
        for command in commands:
            if isinstance(command, _Add):
                verdicts.append((command.call, self._add(command)))
            else:
                self._abort(command.call)
        if verdicts:
            self._tell(_announce, verdicts)
        return True

    def _add(self, command: _Add) -> MIIError | None:
        """Queue a call's sequences; return why that is not possible."""
        handles = self._handles[command.call] = set()
        for index, request in enumerate(command.requests):
            try:
                handle = self._generator.add(request)
            except MemoryError:
                raise
            except Exception as error:
                self._abort(command.call)
                return known_error(error, request.request_id)
            handles.add(handle)
            self._owners[handle] = command.call, index
            self._request_ids[handle] = request.request_id
        return None

    def _abort(self, call: EngineCall) -> None:
        for handle in self._handles.pop(call, ()):
            del self._owners[handle], self._request_ids[handle]
            self._generator.abort(handle)

    def _begin_step(self, plans: Sequence[StepPlan]) -> None:
        """Have the pulse tell what the engine computes."""
        assert self._pulse is not None
        handles = [planned.uid for plan in plans for planned in plan.sequences]
        if handles == self._shown:
            self._pulse.begin_step(None)
            return
        self._shown = handles
        # Steps under way may hold requests that have been aborted.
        ids = (self._request_ids.get(handle, "") for handle in handles)
        self._pulse.begin_step([request_id for request_id in dict.fromkeys(ids) if request_id])

    def _step(self) -> None:
        news = []
        began = time.monotonic()
        deltas = self._generator.step()
        if self._pulse is not None:
            self._pulse.end_step(time.monotonic() - began)
        for delta in deltas:
            call, index = self._owners[delta.handle]
            news.append((call, index, delta))
            if delta.finish_reason is not None or delta.failure:
                self._forget(delta.handle, call)
        if news:
            self._tell(_deliver, news)

    def _forget(self, handle: int, call: EngineCall) -> None:
        del self._owners[handle], self._request_ids[handle]
        handles = self._handles[call]
        handles.remove(handle)
        if not handles:
            del self._handles[call]


def _always() -> bool:
    return True


def _announce(verdicts: Sequence[tuple[EngineCall, MIIError | None]]) -> None:
    for call, error in verdicts:
        if error is None:
            call.accept()
        else:
            call.fail(error)


def _deliver(news: Sequence[tuple[EngineCall, int, Delta]]) -> None:
    for call, index, delta in news:
        call.deliver(index, delta)
    for call in dict.fromkeys(call for call, _, _ in news):
        call.pass_on()


def _again(error: MIIError) -> MIIError:
    """Return an error like this one: each call raises its own, with its own traceback."""
    return type(error)(*error.args)
