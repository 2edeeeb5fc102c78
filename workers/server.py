"""The gRPC server of one rank, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from mii.channel import MAX_MESSAGE_BYTES
from mii.errors import Unauthenticated
from mii.http2.limits import Limits
from mii.http2.server import Server
from mii.http2.server_call import ServerCall
from mii.keys import digest_of, is_among
from mii.proto import inference_pb2, worker_pb2
from mii.rpc import health, reflection
from mii.rpc.health import Health
from mii.rpc.methods import fault_of
from mii.workers.ranks import WorkerStatus
from mii.workers.servicer import Servicer

_INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_WORKER: Final = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 128
_TICK_SECONDS: Final = 0.2
# The router may have any number of requests under way, and give up as many at once.
_LIMITS: Final = Limits(
    max_message_bytes=MAX_MESSAGE_BYTES,
    max_streams=2**20,
    nuisances=2**31,
    stream_window=2**22,
    connection_window=2**26,
)

_Result = TypeVar("_Result")


class LoopThread:
    """An event loop in a thread, so that the main thread is the engine's.

    Args:
        on_tick: called several times a second while the loop runs.
    """

    def __init__(self, on_tick: Callable[[], None] | None = None) -> None:
        self._on_tick = on_tick
        self._runner = asyncio.Runner(loop_factory=_loop_factory())
        self._started: threading.Event = threading.Event()
        self._end: asyncio.Event
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="gRPC", daemon=True)
        self._thread.start()
        self._started.wait()

    def do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the loop; return what it returns. Not from the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._started.set()
        while not self._end.is_set():
            if self._on_tick is not None:
                self._on_tick()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), _TICK_SECONDS)


class WorkerServer:
    """Serves `mii.v1.Worker`, health and reflection, and on rank 0 `mii.v1.Inference`.

    Belongs to one event loop.
    """

    def __init__(
        self, status: WorkerStatus, inference: Servicer | None = None, token: str = ""
    ) -> None:
        """Listen on nothing yet.

        Args:
            status: of this rank.
            inference: on rank 0.
            token: that calls must show; "": they need none.
        """
        self._token = (digest_of(token),) if token else ()
        services = [_WORKER] if inference is None else [_WORKER, _INFERENCE]
        self._stopping = False
        self._inference = inference
        self._health = Health([*services, *reflection.SERVICES], self._serves)
        self._server = Server(
            {
                **status.handlers,
                **(inference.handlers if inference is not None else {}),
                **self._health.handlers,
                **reflection.reflection_handlers([*services, health.SERVICE]),
            },
            limits=_LIMITS,
            authorise=self._authorise,
            fault_of=fault_of,
        )

    def _authorise(self, call: ServerCall) -> None:
        key = call.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not is_among(key, self._token):
            raise Unauthenticated("this worker answers its own router only")

    def _serves(self) -> bool:
        return not self._stopping and (self._inference is None or self._inference.serving)

    async def start(self, preferred_port: int) -> int:
        """Listen on the preferred port if it is free, else on any; return which it is."""
        try:
            listener = socket.create_server((_HOST, preferred_port), backlog=_BACKLOG)
        except OSError:
            listener = socket.create_server((_HOST, 0), backlog=_BACKLOG)
        port: int = listener.getsockname()[1]
        await self._server.listen(listener)
        return port

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those under way `grace` seconds to end by themselves."""
        self._stopping = True
        self._health.changed()
        await self._server.stop(grace)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
