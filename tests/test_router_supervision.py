"""The life of a deployment's router: the real supervisor and router, workers without a model."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mii.channel import channel_options
from mii.launch import start_attached, stop_deployment
from mii.proto.deployment_pb2 import RestartRequest
from mii.registry import DeploymentRecord, Registry
from tests.system.leftovers import Belongings
from tests.test_deployment import (
    FAKE,
    Progress,
    _nothing_left,
    config_of,
    operator,
    router_of,
    start,
    terminate,
    wait_for,
    wait_until,
)

__all__ = ["_nothing_left"]


def workers_of(record: DeploymentRecord) -> set[int]:
    return {process.pid for process in record.processes if process.role == "worker"}


def next_router(cache: Path, record: DeploymentRecord) -> DeploymentRecord:
    """Return what the registry says once another router than that of `record` serves."""
    deadline = time.monotonic() + 20
    while True:
        now = Registry(cache).get(record.name)
        if router_of(now).pid != router_of(record).pid and router_of(now).state == "ready":
            return now
        assert time.monotonic() < deadline, now.processes
        time.sleep(0.02)


def wait_until_serving(record: DeploymentRecord) -> None:
    with grpc.insecure_channel(record.address, channel_options()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True
        )
        next(each for each in watch if each.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_router_that_ends_or_hangs_is_started_again_where_it_was(
    number: signal.Signals, tmp_path: Path
) -> None:
    record = start(tmp_path, replica_num=2, enable_rest=True, rest_port=0)
    belongings = Belongings.of(record.supervisor.pid)
    for _ in range(2):
        os.kill(router_of(record).pid, number)
        again = next_router(tmp_path, record)
        assert (again.port, again.rest_port) == (record.port, record.rest_port)
        assert workers_of(again) == workers_of(record)
        wait_until_serving(again)
        record = again
    terminate(record)
    belongings.assert_gone()


def test_a_router_that_dies_again_and_again_ends_the_deployment(tmp_path: Path) -> None:
    record = start(tmp_path, max_restarts=2)
    belongings = Belongings.of(record.supervisor.pid)
    for _ in range(2):
        os.kill(router_of(record).pid, signal.SIGKILL)
        record = next_router(tmp_path, record)
    os.kill(router_of(record).pid, signal.SIGKILL)
    belongings.assert_gone()
    assert Registry(tmp_path).all() == []


def test_a_router_that_dies_during_the_start_does_not_end_it(tmp_path: Path) -> None:
    may_go_on = tmp_path / "go"
    config = config_of(tmp_path, {"0.0": f"wait until there is {may_go_on}"})
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(start_attached, config, Progress(), FAKE)
        wait_until(
            lambda: any(p.role == "worker" for r in Registry(tmp_path).all() for p in r.processes)
        )
        record = Registry(tmp_path).get("fake/one")
        os.kill(router_of(record).pid, signal.SIGKILL)
        record = next_router(tmp_path, record)
        may_go_on.touch()
        attached = starting.result(20)
    wait_until_serving(record)
    attached.stop()


def test_an_operation_goes_on_without_the_router_that_it_was_asked_of(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2)
    before = workers_of(record)
    request = RestartRequest(operation=7)
    first = operator(record).Restart.future(request, timeout=60)
    record = wait_for(tmp_path, lambda r: any(p.state == "leaving" for p in r.processes))
    os.kill(router_of(record).pid, signal.SIGKILL)
    assert first.code() is grpc.StatusCode.UNAVAILABLE
    record = next_router(tmp_path, record)
    wait_until_serving(record)
    operator(record).Restart(request, timeout=60)
    after = workers_of(Registry(tmp_path).get("fake/one"))
    assert len(after) == 2 and not after & before
    operator(record).Restart(request, timeout=60)  # it has ended already
    assert workers_of(Registry(tmp_path).get("fake/one")) == after
    stop_deployment(record)
