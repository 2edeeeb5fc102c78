"""A worker without a model: the real server, servicer and engine loop, over tokens made by a clock.

    python -m benchmarks.router_worker     # prints its port, serves until its standard input ends

The first id of a prompt says how its answer comes, see `Pace`. The ids of an answer count up from
`FIRST_ID`, so that whoever reads it sees what is missing.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, cast

from mii.config import DeploymentConfig, EngineConfig
from mii.control import Start
from mii.engine.generator import Delta, Generator, Usage
from mii.engine.prompts import GenerationRequest, ModelLimits, PromptProcessor
from mii.http2.server_call import Handler, ServerCall
from mii.proto.worker_pb2 import StatusResponse
from mii.workers.loop import EngineLoop
from mii.workers.ranks import WorkerStatus
from mii.workers.server import LoopThread, WorkerServer
from mii.workers.servicer import Servicer

MODEL: Final = "acme/clock"
FIRST_ID: Final = 10_000
STEPS_PER_SECOND: Final = 20  # of `Pace.CLOCK`

_LIMITS: Final = ModelLimits(2**20, 2**20, frozenset(), {})


class Pace(IntEnum):
    """How the tokens of an answer come."""

    FLAT = 1  # one a step, and the next step as soon as all readers have room
    CLOCK = 2  # one a step, and so many steps a second
    AT_ONCE = 3  # all in one step
    NEVER = 4


@dataclass(slots=True)
class _Sequence:
    handle: int
    pace: Pace
    prompt_tokens: int
    wanted: int
    made: int = 0

    def advance(self) -> Delta:
        count = self.wanted if self.pace is Pace.AT_ONCE else 1
        first = FIRST_ID + self.made
        self.made += count
        ended = self.made >= self.wanted
        return Delta(
            self.handle,
            " token" * count,
            tuple(range(first, first + count)),
            (),
            "length" if ended else None,
            None,
            Usage(self.prompt_tokens, self.made, 0, 0.0, 0.0, 0.0) if ended else None,
        )


class Clock:
    """Stands where `Generator` does."""

    def __init__(self, readers: Readers) -> None:
        self.prompts = PromptProcessor(None, _LIMITS)
        self._readers = readers
        self._handles = itertools.count(1)
        self._sequences: dict[int, _Sequence] = {}  # that something is to come of
        self._next = 0.0  # step of `Pace.CLOCK`

    def add(self, request: GenerationRequest) -> int:
        handle, pace = next(self._handles), Pace(request.prompt_ids[0])
        if pace is not Pace.NEVER:
            self._sequences[handle] = _Sequence(
                handle,
                pace,
                len(request.prompt_ids),
                request.max_new_tokens,
                len(request.answer_ids),
            )
        return handle

    def abort(self, handle: int) -> None:
        self._sequences.pop(handle, None)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[Delta]:
        paces = {sequence.pace for sequence in self._sequences.values()}
        if Pace.FLAT in paces:
            self._readers.wait_for_room()
        elif paces == {Pace.CLOCK}:
            period = 1 / STEPS_PER_SECOND
            now = time.monotonic()
            self._next = max(self._next + period, now)
            time.sleep(self._next - now)
        deltas = [sequence.advance() for sequence in self._sequences.values()]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._sequences[delta.handle]
        return deltas


class Readers:
    """The calls under way, whose readers a flat-out engine must not outrun."""

    def __init__(self) -> None:
        self._calls: dict[ServerCall, None] = {}
        self.loop: asyncio.AbstractEventLoop

    def noting(self, handler: Handler) -> Handler:
        """Return a handler that is known here while it runs."""

        async def handle(call: ServerCall) -> None:
            self._calls[call] = None
            try:
                await handler(call)
            finally:
                del self._calls[call]

        return handle

    def wait_for_room(self) -> None:
        """Return when all that was sent has gone out. Not from the event loop's thread."""
        room = threading.Event()
        self.loop.call_soon_threadsafe(self._look, room)
        room.wait()

    def _look(self, room: threading.Event) -> None:
        # A moment later if need be: none of ours may be in the way of the servicer's own callback.
        if all(call.writable or call.ended for call in self._calls):
            room.set()
        else:
            self.loop.call_later(0.001, self._look, room)


class _NotedServicer(Servicer):
    readers: Readers

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {path: self.readers.noting(handler) for path, handler in super().handlers.items()}


def main() -> None:
    readers = Readers()
    clock = Clock(readers)
    generator = cast(Generator, clock)
    thread = LoopThread()
    readers.loop = thread.loop
    engine = EngineLoop(generator, thread.loop)
    config = EngineConfig("/m", "/m", MODEL, dtype="float32")
    start = Start(DeploymentConfig("clock", config), "worker")

    async def make() -> WorkerServer:
        servicer = _NotedServicer(engine, clock.prompts, config)
        servicer.readers = readers
        status = WorkerStatus(start, StatusResponse)
        return WorkerServer(status, servicer)

    server = thread.do(make())
    print(thread.do(server.start(0)), flush=True)
    threading.Thread(target=engine.run, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
