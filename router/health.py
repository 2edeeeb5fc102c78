"""grpc.health.v1 on the router: every service is SERVING while a replica can answer.

So is "readiness"; "liveness" is SERVING while the router runs.

Unlike the servicer of grpcio-health-checking, a watcher that does not read holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

_LIVENESS, _READINESS = "liveness", "readiness"

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):  # type: ignore[misc]  # generated without types
    """Answers for the whole server ("") and for each of its services by full name."""

    def __init__(self, services: Collection[str], serving: Callable[[], bool]) -> None:
        self._services = frozenset(("", _LIVENESS, _READINESS, *services))
        self._serving = serving
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Have the watchers look again."""
        self._change.set()
        self._change = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return self._answer(request.service)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        last = None
        while True:
            change = self._change
            answer = self._answer(request.service)
            if answer.status != last:
                last = answer.status
                await context.write(answer)
            await change.wait()

    def _answer(self, service: str) -> HealthCheckResponse:
        if service not in self._services:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        if service == _LIVENESS or self._serving():
            return HealthCheckResponse(status=HealthCheckResponse.SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
