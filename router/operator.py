"""The gRPC service `mii.v1.Deployment`: what an operator asks, passed on to the supervisor."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc

from mii import control
from mii.errors import DeploymentError, InvalidArgument
from mii.messages import new_request_id
from mii.proto.deployment_pb2 import (
    REPLICA_STATE_DEAD,
    REPLICA_STATE_READY,
    REPLICA_STATE_RESTARTING,
    REPLICA_STATE_STARTING,
    DeploymentStatus,
    OperationResponse,
    ReplicaStatus,
    RestartRequest,
    ScaleRequest,
    WatchStatusRequest,
)
from mii.proto.deployment_pb2_grpc import DeploymentServicer
from mii.router.replicas import Replicas
from mii.status import errors_as_status

MAX_REPLICAS = 1024

Context = grpc.aio.ServicerContext[Any, Any]


class OperatorServicer(DeploymentServicer):
    """`mii.v1.Deployment`.

    Args:
        name: the deployment's.
        replicas: as the supervisor has told of them.
        ask: passes an operation on to the supervisor.
    """

    def __init__(
        self, name: str, replicas: Replicas, ask: Callable[[control.Operation], None]
    ) -> None:
        self._name = name
        self._replicas = replicas
        self._ask = ask
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}

    def ended(self, told: control.OperationEnded) -> None:
        """Take the supervisor's word that an operation has ended."""
        future = self._waiting.pop(told.number, None)
        if future is not None and not future.done():
            future.set_result(told.error)

    # A coroutine that writes, not a generator: a cancelled one is cleaned up at once.
    async def WatchStatus(self, request: WatchStatusRequest, context: Context) -> None:  # type: ignore[override]
        last: DeploymentStatus | None = None
        while True:
            status = DeploymentStatus(
                deployment=self._name, replicas=map(_status, self._replicas.told)
            )
            if status != last:
                await context.write(status)
                last = status
                continue  # it may have changed meanwhile
            await self._replicas.changed()

    async def Restart(self, request: RestartRequest, context: Context) -> OperationResponse:
        return await self._operate(None, context)

    async def Scale(self, request: ScaleRequest, context: Context) -> OperationResponse:
        return await self._operate(request.replicas, context)

    async def _operate(self, replicas: int | None, context: Context) -> OperationResponse:
        async with errors_as_status(context, new_request_id()):
            if replicas is not None and not 1 <= replicas <= MAX_REPLICAS:
                raise InvalidArgument.of("replicas", replicas, f"from 1 to {MAX_REPLICAS}")
            if not any(replica.ready or replica.returning for replica in self._replicas.told):
                raise DeploymentError("the deployment is starting: wait until it is ready")
            number = next(self._numbers)
            future = self._waiting[number] = asyncio.get_running_loop().create_future()
            self._ask(control.Operation(number, replicas))
            error = await future
            if error:
                raise DeploymentError(error)
        return OperationResponse()


def _status(replica: control.Replica) -> ReplicaStatus:
    state = (
        REPLICA_STATE_READY
        if replica.ready
        else REPLICA_STATE_DEAD
        if replica.dead
        else REPLICA_STATE_RESTARTING
        if replica.returning
        else REPLICA_STATE_STARTING
    )
    return ReplicaStatus(
        replica=replica.replica,
        state=state,
        busy_with=replica.busy_with,
        address=replica.address,
        last_words=replica.words,
    )
