"""The engine's thread, and how calls on the event loop talk with it.

The thread sleeps while there is nothing to compute. What a step gave crosses to the event loop in
one go, however many calls it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mii.engine.generator import Delta, Generator
from mii.engine.prompts import GenerationRequest
from mii.errors import InternalError, MIIError, Unavailable

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """What has come of one of a call's sequences since it was last looked at."""

    index: int  # which of the call's requests
    delta: Delta


class EngineCall:
    """One call's sequences. Belongs to the event loop; deltas not yet fetched are merged."""

    def __init__(self, abort: Callable[[EngineCall], None], count: int) -> None:
        self._abort = abort
        self._open = set(range(count))
        self._pieces: dict[int, Delta] = {}
        self._error: MIIError | None = None
        self._news = asyncio.Event()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        """Whether all sequences have ended and have been fetched."""
        return not self._open

    async def next(self) -> list[SequencePiece]:
        """Wait for news; return what has come of each sequence since the last time.

        Raises:
            MIIError: if the engine has failed or is stopping.
        """
        await self._news.wait()
        self._news.clear()
        pieces = [SequencePiece(index, delta) for index, delta in self._pieces.items()]
        self._pieces = {}
        if not pieces and self._error is not None:
            raise self._error
        if self._error is not None:
            self._news.set()
        self._open.difference_update(p.index for p in pieces if p.delta.finish_reason is not None)
        return pieces

    def close(self) -> None:
        """Stop what has not ended; its blocks are free within one step."""
        if self._open:
            self._abort(self)

    def deliver(self, index: int, delta: Delta) -> None:
        """Take in what a step added to one sequence."""
        held = self._pieces.get(index)
        self._pieces[index] = delta if held is None else _merge(held, delta)
        self._news.set()

    def fail(self, error: MIIError) -> None:
        """End the call with an error, after what has already come."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._error = error
        self._news.set()


def _merge(first: Delta, second: Delta) -> Delta:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
    )


@dataclass(frozen=True)
class _Add:
    call: EngineCall
    requests: Sequence[GenerationRequest]


@dataclass(frozen=True)
class _Abort:
    call: EngineCall


class EngineLoop:
    """Runs a generator in a thread of its own.

    Args:
        generator: driven by that thread alone from now on.
        on_failure: called on the event loop when the engine has failed; calls have been told.
    """

    def __init__(self, generator: Generator, on_failure: Callable[[BaseException], None]) -> None:
        self._generator = generator
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[_Add | _Abort] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: MIIError | None = None
        self._calls: set[EngineCall] = set()  # on the event loop
        self._owners: dict[int, tuple[EngineCall, int]] = {}  # by handle, in the thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def open(self, requests: Sequence[GenerationRequest]) -> EngineCall:
        """Queue all requests of a call, or none of them.

        Raises:
            InvalidArgument, Overloaded: if the engine refuses one of them.
            Unavailable, InternalError: if the engine is stopping or has failed.
        """
        if self._failure is not None:
            raise self._failure
        call = EngineCall(self._abort, len(requests))
        self._calls.add(call)
        self._post(_Add(call, requests))
        try:
            await call.accepted
        except asyncio.CancelledError:
            self._abort(call)
            raise
        except MIIError:
            self._calls.discard(call)
            raise
        return call

    async def stop(self) -> None:
        """End the thread; calls under way end as unavailable."""
        self._fail(Unavailable("this worker is stopping: send the request again"))
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _abort(self, call: EngineCall) -> None:
        self._calls.discard(call)
        self._post(_Abort(call))

    def _post(self, command: _Add | _Abort) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _fail(self, error: MIIError) -> None:
        self._failure = self._failure or error
        for call in self._calls:
            call.fail(error)
        self._calls.clear()

    def _deliver(
        self, pieces: Sequence[tuple[EngineCall, int, Delta]], ended: set[EngineCall]
    ) -> None:
        for call, index, delta in pieces:
            call.deliver(index, delta)
        self._calls -= ended

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self._generator.has_work and not self._stopping:
                    self._step()
        except BaseException as error:
            _logger.critical("the engine has failed", exc_info=error)
            self._loop.call_soon_threadsafe(self._engine_failed, error)
        finally:
            self._generator.close()

    def _engine_failed(self, error: BaseException) -> None:
        self._fail(InternalError(f"the engine has failed: {type(error).__name__}: {error}"))
        self._on_failure(error)

    def _take_commands(self) -> None:
        with self._wake:
            while not (self._inbox or self._stopping or self._generator.has_work):
                self._wake.wait()
            commands = tuple(self._inbox)
            self._inbox.clear()
        for command in commands:
            if isinstance(command, _Add):
                self._add(command)
            else:
                self._forget(command.call)

    def _add(self, command: _Add) -> None:
        error = None
        try:
            for index, request in enumerate(command.requests):
                self._owners[self._generator.add(request)] = (command.call, index)
        except MIIError as refused:
            self._forget(command.call)
            error = refused
        self._loop.call_soon_threadsafe(_answer, command.call.accepted, error)

    def _forget(self, call: EngineCall) -> None:
        handles = [handle for handle, (owner, _) in self._owners.items() if owner is call]
        for handle in handles:
            del self._owners[handle]
            self._generator.abort(handle)

    def _step(self) -> None:
        pieces = []
        for delta in self._generator.step():
            call, index = self._owners[delta.handle]
            if delta.finish_reason is not None:
                del self._owners[delta.handle]
            pieces.append((call, index, delta))
        if pieces:
            finished = {call for call, _, delta in pieces if delta.finish_reason is not None}
            running = {call for call, _ in self._owners.values()} if finished else set()
            self._loop.call_soon_threadsafe(self._deliver, pieces, finished - running)


def _answer(accepted: asyncio.Future[None], error: MIIError | None) -> None:
    if accepted.done():  # the caller has gone
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
