"""The life of a deployment: the real supervisor and router, with workers that have no model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mii.channel import channel_options
from mii.config import DeploymentConfig, EngineConfig
from mii.errors import DeploymentError, InvalidArgument, MIIError, ModelError, PortInUse
from mii.launch import start_attached, start_deployment, stop_deployment
from mii.proto.deployment_pb2 import (
    REPLICA_STATE_READY,
    ReplicaState,
    RestartRequest,
    ScaleRequest,
    WatchStatusRequest,
)
from mii.proto.deployment_pb2_grpc import DeploymentStub
from mii.proto.modelresponse_pb2_grpc import ModelResponseStub
from mii.registry import DeploymentRecord, ProcessRecord, Registry
from mii.status import error_of_call
from mii.supervised_replica import CausesOfDeath
from tests.system.leftovers import Belongings, no_new_children, socket_files

FAKE = "tests.system.fake_supervisor"


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    with no_new_children():
        yield
        for record in Registry(tmp_path).all():  # of a test that failed
            stop_deployment(record)


def config_of(
    cache: Path, behaviour: dict[str, str] | None = None, **changes: object
) -> DeploymentConfig:
    engine = EngineConfig(
        model_path=json.dumps(behaviour or {}),
        tokenizer_path="",
        model_name="fake",
        tensor_parallel=int(str(changes.pop("tensor_parallel", 1))),
    )
    config = DeploymentConfig(
        deployment_name="fake/one", engine=engine, port=0, cache_path=str(cache)
    )
    return replace(config, **changes)  # type: ignore[arg-type]


class Progress:
    """Remembers what a start has said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, what: str, fraction: float | None) -> None:
        self.said.append(what)


def start(
    cache: Path, behaviour: dict[str, str] | None = None, **changes: object
) -> DeploymentRecord:
    """Start a deployment, and return what the registry says of it."""
    config = config_of(cache, behaviour, **changes)
    start_deployment(config, Progress(), FAKE)
    return Registry(cache).get(config.deployment_name)


def terminate(record: DeploymentRecord) -> None:
    with grpc.insecure_channel(record.address, [("grpc.enable_http_proxy", 0)]) as channel:
        ModelResponseStub(channel).Terminate(Empty(), timeout=5)


def end_by_terminate(record: DeploymentRecord) -> None:
    terminate(record)


def end_by_sigterm(record: DeploymentRecord) -> None:
    os.kill(record.supervisor.pid, signal.SIGTERM)


def end_by_sigint(record: DeploymentRecord) -> None:
    os.kill(record.supervisor.pid, signal.SIGINT)


def end_by_sigkill(record: DeploymentRecord) -> None:
    os.kill(record.supervisor.pid, signal.SIGKILL)


ENDS = [
    end_by_terminate,
    end_by_sigterm,
    end_by_sigint,
    end_by_sigkill,
    stop_deployment,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_nothing_is_left_whatever_ends_it(end, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    record = start(tmp_path, replica_num=2, tensor_parallel=2, enable_rest=True, rest_port=0)
    belongings = Belongings.of(record.supervisor.pid)
    assert len(belongings.processes) == 6  # supervisor, router, two replicas of two ranks
    assert len(belongings.ports) == 6  # gRPC, REST, four workers
    end(record)
    belongings.assert_gone()
    assert Registry(tmp_path).all() == []
    assert not list(tmp_path.rglob("*.json")) and not socket_files(tmp_path)


def router_of(record: DeploymentRecord) -> ProcessRecord:
    return next(process for process in record.processes if process.role == "router")


def test_a_stubborn_worker_is_gone_in_time(tmp_path: Path) -> None:
    record = start(tmp_path, {"0.0": "stubborn"})
    belongings = Belongings.of(record.supervisor.pid)
    end_by_sigterm(record)
    belongings.assert_gone()


def test_what_the_registry_says_of_a_deployment(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2, tensor_parallel=2)
    assert record.state == "ready" and record.supervisor.alive
    places = [(p.role, p.replica, p.rank, p.state) for p in record.processes]
    assert places == [
        ("router", 0, 0, "ready"),
        ("worker", 0, 0, "ready"),
        ("worker", 0, 1, "ready"),
        ("worker", 1, 0, "ready"),
        ("worker", 1, 1, "ready"),
    ]
    for process in record.processes:
        assert process.port is not None
        socket.create_connection(("127.0.0.1", process.port)).close()
    stop_deployment(record)


def test_workers_take_the_ports_after_the_routers(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2)
    assert record.port is not None
    ports = [process.port for process in record.processes]
    stop_deployment(record)
    assert ports == [record.port, record.port + 1, record.port + 2]


def test_a_worker_whose_port_is_taken_takes_another(tmp_path: Path) -> None:
    for _ in range(20):  # until two neighbouring ports are free
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1] - 1
            try:
                record = start(tmp_path, port=port)
            except PortInUse:
                continue
            stop_deployment(record)
            assert record.port == port
            worker = record.processes[1].port
            assert worker is not None and worker != port + 1
            return
    pytest.fail("no free port has a neighbour")


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("fail", ModelError, ["shard 3 is corrupt"]),
        ("fail unforeseen", DeploymentError, ["worker 1.0: ZeroDivisionError: division by zero"]),
        ("raise", DeploymentError, ["worker 1.0 exited with status 1", "the very last words"]),
        ("die", DeploymentError, ["worker 1.0 was killed by SIGKILL"]),
        (
            "hang",
            DeploymentError,
            ["5 seconds", "startup_timeout", "worker 1.0 (reading weights)", "logs"],
        ),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    behaviour: str, kind: type[MIIError], words: list[str], tmp_path: Path
) -> None:
    config = config_of(tmp_path, {"1.0": behaviour}, replica_num=2)
    if behaviour == "hang":
        config = replace(config, startup_timeout=5.0)  # a router under load takes seconds
    with no_new_children(), pytest.raises(kind) as caught:
        start_deployment(config, Progress(), FAKE)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert not list(tmp_path.rglob("*.json"))


def test_the_rank_that_died_is_named_not_the_one_that_missed_it(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError) as caught:
        start(tmp_path, {"0.1": "die"}, tensor_parallel=3)
    assert "worker 0.1 was killed by SIGKILL" in str(caught.value)
    assert "worker 0.2" not in str(caught.value)


def test_progress_is_shown(tmp_path: Path) -> None:
    progress = Progress()
    config = config_of(tmp_path, replica_num=2)
    start_deployment(config, progress, FAKE)
    stop_deployment(Registry(tmp_path).get("fake/one"))
    assert progress.said[0] == "starting the router"
    assert "replica 1: reading weights" in progress.said
    assert "worker 1.0 is ready" in progress.said


def test_a_port_that_was_asked_for_and_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            start(tmp_path, port=port)
        record = start(tmp_path, port=port, port_is_default=True)
        stop_deployment(record)
    assert record.port != port


def test_a_host_name_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no-such-host"):
        start(tmp_path, host="no-such-host.invalid")


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", "::"])
def test_hosts(host: str, tmp_path: Path) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    record = start(tmp_path, host=host)
    belongings = Belongings.of(record.supervisor.pid)
    terminate(record)
    belongings.assert_gone()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_second_deployment_of_a_name_is_refused_and_the_first_lives_on(tmp_path: Path) -> None:
    record = start(tmp_path)
    with pytest.raises(DeploymentError, match="already running"):
        start(tmp_path)
    other = start(tmp_path, deployment_name="fake/two")
    stop_deployment(other)
    assert Registry(tmp_path).all() == [record]
    assert (
        "already running"
        not in (Registry(tmp_path).logs("fake/one") / "supervisor.log").read_text()
    )
    stop_deployment(record)


def test_a_name_is_free_again_at_once_after_terminate(tmp_path: Path) -> None:
    first = start(tmp_path)
    terminate(first)
    second = start(tmp_path)
    assert second.supervisor != first.supervisor
    stop_deployment(second)


def test_a_dead_replica_is_named_and_the_others_serve_on(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2, tensor_parallel=2, max_restarts=0)
    victim = next(p for p in record.processes if (p.replica, p.rank) == (0, 1))
    sibling = next(
        p for p in record.processes if (p.replica, p.rank) == (0, 0) and p.role == "worker"
    )
    processes = [psutil.Process(victim.pid), psutil.Process(sibling.pid)]
    os.kill(victim.pid, signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=5)[1]  # the sibling, too
    record = wait_for(tmp_path, lambda r: {p.state for p in r.processes} == {"ready", "dead"})
    states = {(p.role, p.replica): p.state for p in record.processes}
    assert states == {("router", 0): "ready", ("worker", 0): "dead", ("worker", 1): "ready"}
    words = {p.last_words for p in record.processes if p.state == "dead"}
    assert len(words) == 1 and "worker 0.1 was killed by SIGKILL" in words.pop()
    assert health(record) == "SERVING"
    survivor = next(p for p in record.processes if (p.replica, p.rank) == (1, 0))
    os.kill(survivor.pid, signal.SIGKILL)
    record = wait_for(tmp_path, lambda r: all(p.state == "dead" for p in r.processes[1:]))
    wait_until(lambda: health(record) == "NOT_SERVING")  # up, and honest about it
    stop_deployment(record)


def worker_of(record: DeploymentRecord, replica: int, rank: int = 0) -> ProcessRecord:
    return next(
        p for p in record.processes if (p.role, p.replica, p.rank) == ("worker", replica, rank)
    )


def is_new_and_ready(old: ProcessRecord, new: ProcessRecord) -> bool:
    return new.state == "ready" and new.pid != old.pid


def test_a_replica_that_dies_is_started_again_as_a_whole(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2, tensor_parallel=2)
    belongings = Belongings.of(record.supervisor.pid)
    before = [worker_of(record, 0, rank) for rank in range(2)]
    os.kill(before[1].pid, signal.SIGKILL)
    record = wait_for(
        tmp_path,
        lambda r: all(is_new_and_ready(old, worker_of(r, 0, old.rank)) for old in before),
    )
    assert worker_of(record, 0).port == before[0].port
    assert health(record) == "SERVING"
    stop_deployment(record)
    belongings.assert_gone()


def test_who_was_killed_did_not_fail() -> None:
    deaths = CausesOfDeath()
    assert deaths.by_itself(1, killed=False)
    assert deaths.by_itself(-signal.SIGSEGV, killed=False)
    assert not deaths.by_itself(-signal.SIGKILL, killed=False)
    assert not deaths.by_itself(-signal.SIGKILL, killed=True)


def test_a_process_that_is_stopped_counts_as_dead(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2)
    before = worker_of(record, 1)
    os.kill(before.pid, signal.SIGSTOP)
    record = wait_for(tmp_path, lambda r: "stood still" in worker_of(r, 1).last_words)
    record = wait_for(tmp_path, lambda r: is_new_and_ready(before, worker_of(r, 1)))
    stop_deployment(record)


def test_a_replica_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2, max_restarts=1)
    before = worker_of(record, 0)
    os.kill(before.pid, signal.SIGKILL)
    record = wait_for(tmp_path, lambda r: is_new_and_ready(before, worker_of(r, 0)))
    os.kill(worker_of(record, 0).pid, signal.SIGKILL)
    record = wait_for(tmp_path, lambda r: worker_of(r, 0).state == "dead")
    assert "killed by SIGKILL" in worker_of(record, 0).last_words
    assert health(record) == "SERVING"
    stop_deployment(record)


def operator(record: DeploymentRecord) -> DeploymentStub:
    return DeploymentStub(grpc.insecure_channel(record.address, channel_options()))


def states(record: DeploymentRecord) -> dict[int, str]:
    status = next(operator(record).WatchStatus(WatchStatusRequest(), timeout=10))
    return {r.replica: ReplicaState.Name(r.state).rpartition("_")[2] for r in status.replicas}


def test_a_restart_starts_every_replica_anew_one_at_a_time(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=3, tensor_parallel=2)
    before = {p.pid for p in record.processes if p.role == "worker"}
    watch = operator(record).WatchStatus(WatchStatusRequest(), timeout=60)
    fewest_ready: list[int] = []

    def look() -> None:
        with contextlib.suppress(grpc.RpcError):
            for status in watch:
                ready = [r for r in status.replicas if r.state == REPLICA_STATE_READY]
                fewest_ready.append(len(ready))

    looking = threading.Thread(target=look)
    looking.start()
    operator(record).Restart(RestartRequest(), timeout=60)
    watch.cancel()
    looking.join()
    assert min(fewest_ready) == 2
    record = Registry(tmp_path).get("fake/one")
    workers = [p for p in record.processes if p.role == "worker"]
    assert len(workers) == 6 and not before & {p.pid for p in workers}
    assert {p.state for p in workers} == {"ready"}
    stop_deployment(record)


def test_replicas_come_and_go_as_asked(tmp_path: Path) -> None:
    record = start(tmp_path, replica_num=2)
    belongings = Belongings.of(record.supervisor.pid)
    for wanted in (4, 1, 2):
        operator(record).Scale(ScaleRequest(replicas=wanted), timeout=60)
        assert states(record) == dict.fromkeys(range(wanted), "READY")
        record = Registry(tmp_path).get("fake/one")
        workers = [p for p in record.processes if p.role == "worker"]
        assert [(p.replica, p.state) for p in workers] == [(n, "ready") for n in range(wanted)]
        assert all(psutil.pid_exists(p.pid) for p in workers)
    with pytest.raises(grpc.RpcError) as caught:
        operator(record).Scale(ScaleRequest(replicas=0), timeout=60)
    assert isinstance(error_of_call(caught.value), InvalidArgument)
    belongings = Belongings.of(record.supervisor.pid)
    stop_deployment(record)
    belongings.assert_gone()


def test_a_restart_that_fails_says_why_and_touches_no_further_replica(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    record = start(tmp_path, {"0.0": f"fail once there is {gone}"}, replica_num=2, max_restarts=1)
    survivor = worker_of(record, 1)
    gone.touch()
    with pytest.raises(grpc.RpcError) as caught:
        operator(record).Restart(RestartRequest(), timeout=60)
    assert "replica 0 did not start" in str(error_of_call(caught.value))
    assert worker_of(Registry(tmp_path).get("fake/one"), 1) == survivor
    stop_deployment(record)


def health(record: DeploymentRecord) -> str:
    with grpc.insecure_channel(record.address, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=5
        )
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(cache: Path, condition) -> DeploymentRecord:  # type: ignore[no-untyped-def]
    wait_until(lambda: condition(Registry(cache).get("fake/one")))
    return Registry(cache).get("fake/one")


def test_an_attached_deployment_ends_when_it_is_told_to(tmp_path: Path) -> None:
    attached = start_attached(config_of(tmp_path), Progress(), FAKE)
    belongings = Belongings.of(attached.supervisor.pid)
    attached.stop()
    belongings.assert_gone()
    assert attached.supervisor.returncode == 0


def test_who_waits_for_an_attached_deployment_hears_why_it_ended(tmp_path: Path) -> None:
    attached = start_attached(config_of(tmp_path, replica_num=2, max_restarts=0), Progress(), FAKE)
    record = Registry(tmp_path).get("fake/one")
    worker = next(p for p in record.processes if p.role == "worker")
    os.kill(worker.pid, signal.SIGKILL)
    wait_for(tmp_path, lambda r: any(p.state == "dead" for p in r.processes))
    os.kill(router_of(record).pid, signal.SIGKILL)
    heard = Progress()
    with pytest.raises(DeploymentError, match="router was killed by SIGKILL"):
        attached.wait(heard)
    assert "replica 0 has died" in heard.said[0]


def test_waiting_returns_when_a_client_terminates(tmp_path: Path) -> None:
    attached = start_attached(config_of(tmp_path), Progress(), FAKE)
    terminate(Registry(tmp_path).get("fake/one"))
    attached.wait(Progress())


STARTER = """
import sys
from pathlib import Path
from mii.channel import channel_options
from mii.config import DeploymentConfig
from mii.launch import start_attached, start_deployment

start = start_attached if sys.argv[1] == "attached" else start_deployment
running = start(
    DeploymentConfig.from_json(sys.stdin.readline()),
    lambda what, fraction: print(what, flush=True),
    "tests.system.fake_supervisor",
)
print("started", flush=True)
sys.stdin.readline()
"""


def starter(config: DeploymentConfig, kind: str) -> subprocess.Popen[str]:
    """A script that starts a deployment, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdin is not None
    process.stdin.write(config.to_json() + "\n")
    process.stdin.flush()
    return process


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while process.stdout.readline() != f"{line}\n":
        assert process.poll() is None


def test_a_deployment_outlives_the_script_that_started_it(tmp_path: Path) -> None:
    with starter(config_of(tmp_path), "detached") as script:
        read_until(script, "started")
        script.kill()
    record = Registry(tmp_path).get("fake/one")
    assert health(record) == "SERVING"
    belongings = Belongings.of(record.supervisor.pid)
    terminate(record)
    belongings.assert_gone()


def test_an_attached_deployment_dies_with_its_starter(tmp_path: Path) -> None:
    with starter(config_of(tmp_path), "attached") as script:
        read_until(script, "started")
        belongings = Belongings.of(Registry(tmp_path).get("fake/one").supervisor.pid)
        script.kill()
    belongings.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_start_that_is_interrupted_leaves_nothing(number: int, tmp_path: Path) -> None:
    with starter(config_of(tmp_path, {"0.0": "hang"}), "detached") as script:
        read_until(script, "reading weights")
        belongings = Belongings.of(Registry(tmp_path).get("fake/one").supervisor.pid)
        script.send_signal(number)
        script.stdin.close()  # type: ignore[union-attr]
        script.wait(10)
    belongings.assert_gone()
    assert Registry(tmp_path).all() == []


@pytest.mark.parametrize("behaviour", ["hang", "hold the lock"])
def test_no_worker_outlives_its_supervisor_even_while_loading(
    behaviour: str, tmp_path: Path
) -> None:
    reached = "holding the lock" if behaviour == "hold the lock" else "reading weights"
    with starter(config_of(tmp_path, {"0.0": behaviour}), "detached") as script:
        read_until(script, reached)
        belongings = Belongings.of(Registry(tmp_path).get("fake/one").supervisor.pid)
        belongings.processes[0].kill()
        belongings.assert_gone()
        script.wait(10)


def test_a_supervisor_that_cannot_even_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="No module named"):
        start_deployment(config_of(tmp_path), Progress(), "mii.no_such_module")
