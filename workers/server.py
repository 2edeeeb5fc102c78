"""The gRPC server of one rank, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from mii.channel import server_options
from mii.proto import inference_pb2, worker_pb2
from mii.proto.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from mii.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

_INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_WORKER: Final = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_HOST: Final = "127.0.0.1"
_TICK_SECONDS: Final = 0.2

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

    def __init__(self, status: WorkerServicer, inference: InferenceServicer | None = None) -> None:
        self._server = grpc.aio.server(options=server_options())
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its types lack it
        self._services = [_WORKER, health.SERVICE_NAME, reflection.SERVICE_NAME]
        add_WorkerServicer_to_server(status, self._server)
        if inference is not None:
            self._services.append(_INFERENCE)
            add_InferenceServicer_to_server(inference, self._server)
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(self._services, self._server)

    async def start(self, preferred_port: int) -> int:
        """Listen on the preferred port if it is free, else on any; return which it is."""
        port = self._bind(preferred_port)
        await self._server.start()
        for service in ("", *self._services):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those under way `grace` seconds to end by themselves."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    def _bind(self, preferred_port: int) -> int:
        # C-core says nothing of use about a port it cannot have, so ask the system first.
        if preferred_port and _is_free(preferred_port):
            with contextlib.suppress(RuntimeError):  # taken in this very moment
                return int(self._server.add_insecure_port(f"{_HOST}:{preferred_port}"))
        return int(self._server.add_insecure_port(f"{_HOST}:0"))


def _is_free(port: int) -> bool:
    try:
        socket.create_server((_HOST, port)).close()
    except OSError:
        return False
    return True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
