"""`mii restart` and `mii scale`."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from mii.api import client_of, find_deployment
from mii.errors import DeploymentError, DeploymentNotFoundError, Unavailable, shorten
from mii.proto.deployment_pb2 import (
    DeploymentStatus,
    ReplicaState,
    RestartRequest,
    ScaleRequest,
    WatchStatusRequest,
)
from mii.proto.deployment_pb2_grpc import DeploymentStub
from mii.registry import DeploymentRecord, ProcessRecord

_ROUTER_SECONDS = 15.0  # until another router must serve
_POLL_SECONDS = 0.05


def restart(parsed: argparse.Namespace) -> int:
    """Start a deployment's replicas anew, one after the other, or else its router."""
    if parsed.router:
        return _restart_router(_deployment(parsed.name))
    return _operate(parsed.name, RestartRequest(operation=secrets.randbits(63)))


def scale(parsed: argparse.Namespace) -> int:
    """Give a deployment another number of replicas."""
    request = ScaleRequest(replicas=parsed.replicas, operation=secrets.randbits(63))
    return _operate(parsed.name, request)


def _restart_router(record: DeploymentRecord) -> int:
    """Let the router end what it can in a moment; the supervisor starts another one."""
    router = _router_of(record)
    os.kill(router.pid, signal.SIGTERM)
    deadline = time.monotonic() + _ROUTER_SECONDS
    while time.monotonic() < deadline:
        now = _router_of(_deployment(record.name))
        if now.pid != router.pid and now.state == "ready":
            print(f"{record.name}: done")
            return 0
        time.sleep(_POLL_SECONDS)
    raise DeploymentError(f"the router of {record.name} has not come back: see mii logs")


def _router_of(record: DeploymentRecord) -> ProcessRecord:
    return next(process for process in record.processes if process.role == "router")


def _operate(name: str, request: RestartRequest | ScaleRequest) -> int:
    """Ask for an operation until it has ended, by way of another router if need be."""
    record = _deployment(name)
    client = client_of(record)
    patience = client.patience(None)
    with client.security.open_channel(grpc, record.address) as channel:
        while True:
            try:
                _operate_once(DeploymentStub(channel), request, client.security.metadata)
                break
            except grpc.RpcError as error:
                failure = client.error_of(error)
                if not isinstance(failure, Unavailable):
                    raise failure from None
                time.sleep(client.pause_after(failure, patience))
    print(f"{record.name}: done")
    return 0


def _operate_once(
    stub: DeploymentStub, request: RestartRequest | ScaleRequest, key: tuple[tuple[str, str], ...]
) -> None:
    watch: Any = stub.WatchStatus(WatchStatusRequest(), metadata=key)
    shown = threading.Thread(target=_show, args=(watch,), daemon=True)
    shown.start()
    try:
        if isinstance(request, RestartRequest):
            stub.Restart(request, metadata=key)
        else:
            stub.Scale(request, metadata=key)
    finally:
        watch.cancel()
        shown.join()


def _deployment(name: str) -> DeploymentRecord:
    record = find_deployment(name)
    if record is None:
        raise DeploymentNotFoundError(f"no deployment {shorten(name)} is running: see mii ps")
    return record


def _show(watch: Iterator[DeploymentStatus]) -> None:
    """Print each change until the watch is cancelled."""
    last: dict[int, str] = {}
    try:
        for status in watch:
            now = {}
            for replica in status.replicas:
                state = ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
                busy = f" ({replica.busy_with})" if replica.busy_with else ""
                now[replica.replica] = state + busy
            for number in sorted(now.keys() | last.keys()):
                if last and now.get(number) != last.get(number):
                    print(f"replica {number}: {now.get(number, 'removed')}", file=sys.stderr)
            last = now
    except grpc.RpcError:
        return
