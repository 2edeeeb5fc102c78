"""A worker process, one rank of a replica: `python -P -m mii.workers.main --control-fd N`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mii.channel import server_options
from mii.control import ControlChannel, Failed, Message, Progress, Ready, Start, Stop
from mii.engine.build import FollowerStats, build_generator, run_follower
from mii.engine.generator import Generator
from mii.parallel.links import PlanReceiver, PlanSender
from mii.parallel.rank import Rank
from mii.proto import inference_pb2, worker_pb2
from mii.proto.inference_pb2_grpc import add_InferenceServicer_to_server
from mii.proto.worker_pb2_grpc import add_WorkerServicer_to_server
from mii.workers.loop import EngineLoop
from mii.workers.rank_status import AsyncRankStatus, SyncRankStatus
from mii.workers.servicer import Servicer

_SERVICES: Final = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
)
_STOP_GRACE: Final = 0.5  # seconds for answers under way, of the three that a Stop allows
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

_logger = logging.getLogger(__name__)


def main() -> None:
    """Run one rank until it is told to stop, its parent is gone, or it fails."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    channel = ControlChannel.from_arguments(sys.argv[1:])
    start = channel.receive_start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's
    channel.listen(_on_message)
    try:
        rank = rank_of(start)
        if start.rank == 0:
            generator = build_generator(
                start.config.engine, rank, lambda what, part: channel.send(Progress(what, part))
            )
            asyncio.run(_serve(start, generator, channel))
        else:
            _follow(start, rank, channel)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        _logger.critical("this worker cannot go on", exc_info=error)
        channel.send(Failed.of(error))
        os._exit(1)  # threads of libraries must not keep a failed worker alive
    os._exit(0)


def rank_of(start: Start) -> Rank:
    """Return this process's place among the ranks of its replica."""
    links = [socket.socket(fileno=descriptor) for descriptor in start.plan_fds]
    size = start.config.engine.tensor_parallel
    if size == 1:
        return Rank()
    plans = PlanSender(links) if start.rank == 0 else PlanReceiver(links[0])
    return Rank(start.rank, size, plans, start.shared_memory_fd)


def _on_message(message: Message) -> None:
    if isinstance(message, Stop):  # it means what the signal means, which ends a start at once
        os.kill(os.getpid(), signal.SIGTERM)


async def _serve(start: Start, generator: Generator, channel: ControlChannel) -> None:
    """Serve rank 0's engine."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    failures: list[BaseException] = []

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        stopping.set()

    config = start.config.engine
    engine = EngineLoop(generator, on_failure)
    server = grpc.aio.server(options=server_options())
    servicer = Servicer(engine, generator.prompts, config.model_name, config.dtype)
    add_InferenceServicer_to_server(servicer, server)
    status = AsyncRankStatus(
        start.replica, start.rank, config.tensor_parallel, stats=generator.stats
    )
    add_WorkerServicer_to_server(status, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection(_SERVICES, server)
    port = _bind(server, start.preferred_port)
    await server.start()
    for service in ("", *_SERVICES):
        await checks.set(service, _SERVING)
    channel.send(Ready(port=port))
    await stopping.wait()
    await checks.enter_graceful_shutdown()
    await engine.stop()
    await server.stop(_STOP_GRACE)
    if failures:
        raise failures[0]


def _follow(start: Start, rank: Rank, channel: ControlChannel) -> None:
    """Compute what rank 0 says, and answer for this rank's health meanwhile."""
    server = grpc.server(ThreadPoolExecutor(2), options=server_options())
    checks = health.HealthServicer()

    def on_ready(stats: FollowerStats) -> None:
        size = start.config.engine.tensor_parallel
        status = SyncRankStatus(start.replica, start.rank, size, steps=lambda: stats.steps)
        add_WorkerServicer_to_server(status, server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection(_SERVICES[1:], server)
        port = _bind(server, start.preferred_port)
        server.start()
        for service in ("", *_SERVICES[1:]):
            checks.set(service, _SERVING)
        channel.send(Ready(port=port))

    run_follower(
        start.config.engine,
        rank,
        lambda what, part: channel.send(Progress(what, part)),
        on_ready,
    )
    checks.enter_graceful_shutdown()
    server.stop(_STOP_GRACE)


def _bind(server: Any, preferred: int) -> int:
    """Listen on the preferred port if it can be had, else on any."""
    if preferred:
        with contextlib.suppress(OSError, RuntimeError):
            with socket.create_server(("127.0.0.1", preferred)):
                pass  # C-core says nothing of use about a port that is taken: ask the system first
            return int(server.add_insecure_port(f"127.0.0.1:{preferred}"))
    return int(server.add_insecure_port("127.0.0.1:0"))


if __name__ == "__main__":
    main()
