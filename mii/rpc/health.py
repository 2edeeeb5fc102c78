"""grpc.health.v1: every service is SERVING while the server's owner says so.

So is "readiness"; "liveness" is SERVING while the process runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.server_call import Handler, ServerCall
from mii.rpc.methods import answered_by_stream, answered_once

SERVICE: Final = "grpc.health.v1.Health"

_LIVENESS, _READINESS = "liveness", "readiness"


class Health:
    """Answers for the whole server ("") and for each of its services by full name.

    Args:
        services: their names.
        serving: whether a request would be served.
    """

    def __init__(self, services: Collection[str], serving: Callable[[], bool]) -> None:
        self._services = frozenset(("", _LIVENESS, _READINESS, SERVICE, *services))
        self._serving = serving
        self._change = asyncio.Event()  # a new one for each change

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        return {
            f"/{SERVICE}/Check": answered_once(HealthCheckRequest, self._check),
            f"/{SERVICE}/Watch": answered_by_stream(HealthCheckRequest, self._watch),
        }

    def changed(self) -> None:
        """Have the watchers look again."""
        self._change.set()
        self._change = asyncio.Event()

    async def _check(self, request: HealthCheckRequest, call: ServerCall) -> HealthCheckResponse:
        if request.service not in self._services:
            raise CallFault(StatusCode.NOT_FOUND, "there is no such service here")
        return self._answer(request.service)

    async def _watch(self, request: HealthCheckRequest, call: ServerCall) -> None:
        last = None
        while True:
            change = self._change
            answer = self._answer(request.service)
            if answer.status != last:
                last = answer.status
                call.send(answer.SerializeToString())
            await change.wait()

    def _answer(self, service: str) -> HealthCheckResponse:
        if service not in self._services:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        if service == _LIVENESS or self._serving():
            return HealthCheckResponse(status=HealthCheckResponse.SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
