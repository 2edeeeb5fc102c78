"""mii.v1.Worker: one rank's own account of itself."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import grpc

from mii.engine.metrics import EngineStats
from mii.proto.worker_pb2 import StatusRequest, StatusResponse
from mii.proto.worker_pb2_grpc import WorkerServicer


class RankStatus(WorkerServicer):
    """Answers Status calls, on a server of grpc or of grpc.aio.

    Args:
        replica, rank, size: this rank's place.
        stats: rank 0's counters; None on other ranks.
        steps: steps that this rank has computed.
    """

    def __init__(
        self,
        replica: int,
        rank: int,
        size: int,
        *,
        stats: Callable[[], EngineStats] | None = None,
        steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._place = {"replica": replica, "rank": rank, "tensor_parallel": size}
        self._stats = stats
        self._steps = steps

    def status(self) -> StatusResponse:
        """Return the account as it is now."""
        response = StatusResponse(
            **self._place,
            process_id=os.getpid(),
            steps=self._steps(),
            resident_bytes=resident_bytes(),
        )
        if self._stats is not None:
            stats = self._stats()
            response.steps = stats.steps
            response.running_requests = stats.running
            response.waiting_requests = stats.waiting
            response.total_blocks = stats.total_blocks
            response.free_blocks = stats.free_blocks
            response.block_size = stats.block_size
            response.prompt_tokens = stats.prompt_tokens
            response.generated_tokens = stats.generated_tokens
            response.prefix_cache_hit_tokens = stats.prefix_cache_hit_tokens
            response.preemptions = stats.preemptions
            response.last_step_seconds = stats.last_step_seconds
        return response


class AsyncRankStatus(RankStatus):
    """For a server of grpc.aio."""

    async def Status(  # type: ignore[override]
        self, request: StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> StatusResponse:
        return self.status()


class SyncRankStatus(RankStatus):
    """For a server of grpc."""

    def Status(self, request: StatusRequest, context: grpc.ServicerContext) -> StatusResponse:
        return self.status()


def resident_bytes() -> int:
    """Return the memory that this process holds now; where that is unknown, at most so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
