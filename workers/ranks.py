"""One rank's place in its replica, and what it says of itself (mii.v1.Worker)."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from mii.control import Start
from mii.engine.metrics import EngineStats
from mii.http2.server_call import Handler, ServerCall
from mii.parallel.links import PlanReceiver, PlanSender
from mii.parallel.rank import Rank
from mii.proto.worker_pb2 import StatusRequest, StatusResponse
from mii.pulse import Pulse
from mii.rpc.methods import answered_once

Counters = Callable[[], StatusResponse]


def rank_of(start: Start) -> Rank:
    """Return this process's place among the ranks of its replica, over the links it inherited."""
    size = start.config.engine.tensor_parallel
    if size == 1:
        return Rank()
    links = [socket.socket(fileno=descriptor) for descriptor in start.plan_fds]
    return Rank(
        start.rank,
        size,
        plans=PlanSender(links) if start.rank == 0 else PlanReceiver(links[0]),
        shared_memory=start.shared_memory_fd,
        peers_alive=lambda: all_open(links),
    )


def pulse_of(start: Start) -> Pulse:
    """Return the pulse that the supervisor reads; one that nobody reads, where there is none."""
    return Pulse.create() if start.pulse_fd is None else Pulse(start.pulse_fd)


def all_open(links: Sequence[socket.socket]) -> bool:
    """Return whether none of the links has been closed by the other side. Reads nothing."""
    for link in links:
        try:
            if not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return False
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True


class WorkerStatus:
    """Serves mii.v1.Worker.

    Args:
        start: says which rank this is.
        counters: what this rank counts.
    """

    def __init__(self, start: Start, counters: Counters) -> None:
        self._start = start
        self._counters = counters

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        return {"/mii.v1.Worker/Status": answered_once(StatusRequest, self._status)}

    async def _status(self, request: StatusRequest, call: ServerCall) -> StatusResponse:
        status = self._counters()
        status.replica = self._start.replica
        status.rank = self._start.rank
        status.tensor_parallel = self._start.config.engine.tensor_parallel
        status.process_id = os.getpid()
        status.resident_bytes = resident_bytes()
        return status


def engine_counters(stats: EngineStats) -> StatusResponse:
    """Return rank 0's counters as a message."""
    return StatusResponse(
        steps=stats.steps,
        running_requests=stats.running,
        waiting_requests=stats.waiting,
        total_blocks=stats.total_blocks,
        free_blocks=stats.free_blocks,
        block_size=stats.block_size,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        prefix_cache_hit_tokens=stats.prefix_cache_hit_tokens,
        preemptions=stats.preemptions,
        last_step_seconds=stats.last_step_seconds,
    )


def resident_bytes() -> int:
    """Return the memory that this process holds now; where that is unknown, at most so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
