"""The gRPC service `mii.v1.Deployment`: what an operator asks, passed on to the supervisor."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping

from mii import control
from mii.errors import DeploymentError, InvalidArgument, Unavailable
from mii.http2.server_call import Handler, ServerCall
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
from mii.router.replicas import Replicas
from mii.rpc.methods import answered_by_stream, answered_once

MAX_REPLICAS = 1024


class OperatorServicer:
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
        self._waiting: defaultdict[int, list[asyncio.Future[str]]] = defaultdict(list)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        return {
            "/mii.v1.Deployment/WatchStatus": answered_by_stream(WatchStatusRequest, self._watch),
            "/mii.v1.Deployment/Restart": answered_once(RestartRequest, self._restart),
            "/mii.v1.Deployment/Scale": answered_once(ScaleRequest, self._scale),
        }

    def ended(self, told: control.OperationEnded) -> None:
        """Take the supervisor's word that an operation has ended."""
        for future in self._waiting.pop(told.number, ()):
            if not future.done():
                future.set_result(told.error)

    async def _watch(self, request: WatchStatusRequest, call: ServerCall) -> None:
        last: DeploymentStatus | None = None
        while True:
            status = DeploymentStatus(
                deployment=self._name, replicas=map(_status, self._replicas.told)
            )
            if status != last:
                call.send(status.SerializeToString())
                last = status
            await self._replicas.changed()

    async def _restart(self, request: RestartRequest, call: ServerCall) -> OperationResponse:
        return await self._operate(request.operation, None)

    async def _scale(self, request: ScaleRequest, call: ServerCall) -> OperationResponse:
        return await self._operate(request.operation, request.replicas)

    async def _operate(self, number: int, replicas: int | None) -> OperationResponse:
        if replicas is not None and not 1 <= replicas <= MAX_REPLICAS:
            raise InvalidArgument.of("replicas", replicas, f"from 1 to {MAX_REPLICAS}")
        if not self._replicas.told:  # by the supervisor, which is about to
            raise Unavailable("nothing is known of the replicas yet: ask again")
        if not any(replica.ready or replica.returning for replica in self._replicas.told):
            raise DeploymentError("the deployment is starting: wait until it is ready")
        number = number or secrets.randbits(63)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number].append(future)
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
