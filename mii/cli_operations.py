"""`mii restart` and `mii scale`."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from mii.api import client_of, find_deployment
from mii.errors import DeploymentNotFoundError, shorten
from mii.proto.deployment_pb2 import (
    DeploymentStatus,
    ReplicaState,
    RestartRequest,
    ScaleRequest,
    WatchStatusRequest,
)
from mii.proto.deployment_pb2_grpc import DeploymentStub
from mii.registry import DeploymentRecord
from mii.status import error_of_call


def restart(parsed: argparse.Namespace) -> int:
    """Start a deployment's replicas anew, one after the other."""
    return _operate(parsed.name, RestartRequest())


def scale(parsed: argparse.Namespace) -> int:
    """Give a deployment another number of replicas."""
    return _operate(parsed.name, ScaleRequest(replicas=parsed.replicas))


def _operate(name: str, request: RestartRequest | ScaleRequest) -> int:
    record = _deployment(name)
    security = client_of(record).security
    key = security.metadata
    with security.open_channel(grpc, record.address) as channel:
        stub = DeploymentStub(channel)
        watch: Any = stub.WatchStatus(WatchStatusRequest(), metadata=key)
        shown = threading.Thread(target=_show, args=(watch,), daemon=True)
        shown.start()
        try:
            if isinstance(request, RestartRequest):
                stub.Restart(request, metadata=key)
            else:
                stub.Scale(request, metadata=key)
        except grpc.RpcError as error:
            raise error_of_call(error) from None
        finally:
            watch.cancel()
            shown.join()
    print(f"{record.name}: done")
    return 0


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
