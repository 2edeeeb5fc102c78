"""The registry, with real processes as supervisors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mii.config import DeploymentConfig, EngineConfig
from mii.errors import DeploymentError, DeploymentNotFoundError
from mii.registry import (
    DeploymentRecord,
    ProcessIdentity,
    ProcessRecord,
    Registry,
    address_of,
    mark,
    start_of,
)

Sleeper = subprocess.Popen[bytes]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def record_of(name: str, pid: int) -> DeploymentRecord:
    engine = EngineConfig(model_path="/m", tokenizer_path="/m", model_name="m")
    config = DeploymentConfig(deployment_name=name, engine=engine)
    return DeploymentRecord(config, ProcessIdentity.of(pid), port=50050)


NAMES = ["plain", "org/model-mii-deployment", "..", ".", " x ", "%2F", "ü\u2013\U0001f600" * 60]


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_of_any_name_is_found(registry: Registry, name: str, tmp_path: Path) -> None:
    worker = ProcessRecord("worker", 0, 0, pid=7, state="dead", last_words="boom")
    record = mark(record_of(name, os.getpid()), worker)
    registry.claim(record)
    assert registry.find(name) == registry.get(name) == record
    assert registry.all() == [record]
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "deployments"]
    assert registry.logs(name).parent == tmp_path / "logs"
    registry.remove(record)
    assert registry.find(name) is None and not list(tmp_path.rglob("*.json"))


def test_names_do_not_share_a_file(registry: Registry) -> None:
    names = [*NAMES, "a/b", "a%2Fb", "x" * 199 + "y", "x" * 199 + "z", "A", "a"]
    assert len({registry.logs(name) for name in names}) == len(names)


def test_no_such_deployment_names_those_that_run(registry: Registry) -> None:
    registry.claim(record_of("here", os.getpid()))
    with pytest.raises(DeploymentNotFoundError, match=r"'gone' is running \(running: here\)"):
        registry.get("gone")


def test_an_entry_dies_with_its_supervisor(registry: Registry, sleeper: Sleeper) -> None:
    registry.claim(record_of("a", sleeper.pid))
    assert registry.find("a") is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet reaped
    assert registry.find("a") is None
    assert registry.all() == []


def test_a_pid_that_another_process_was_given_counts_as_dead(registry: Registry) -> None:
    record = record_of("a", os.getpid())
    other = replace(record, supervisor=ProcessIdentity(os.getpid(), "another start"))
    registry.claim(other)
    assert registry.find("a") is None
    registry.claim(record)
    assert registry.find("a") == record


def test_one_name_twice_is_an_error_that_says_what_to_do(
    registry: Registry, sleeper: Sleeper
) -> None:
    registry.claim(record_of("a", os.getpid()))
    with pytest.raises(DeploymentError, match=rf"pid {os.getpid()}.*mii stop a") as caught:
        registry.claim(record_of("a", sleeper.pid))
    assert "localhost:50050" in str(caught.value)


def test_a_deployment_that_is_stopping_is_waited_for(registry: Registry, sleeper: Sleeper) -> None:
    old = replace(record_of("a", sleeper.pid), state="stopping")
    registry.claim(old)
    new = record_of("a", os.getpid())
    thread = threading.Thread(target=registry.claim, args=(new,))
    thread.start()
    registry.remove(old)
    thread.join(10)
    assert registry.find("a") == new


def test_of_many_claims_at_once_one_wins(registry: Registry) -> None:
    claim = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.test_registry import record_of\n"
        "from mii.registry import Registry\n"
        "sys.stdin.readline()\n"
        "Registry(Path(sys.argv[1])).claim(record_of('a', os.getpid()))\n"
        "print('won', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    folder = str(registry.logs("").parent.parent)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", claim, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    losers = 0
    winner = None
    while losers < 2:
        for child in children:
            if child is not winner and child.poll() is not None:
                losers += 1
                children.remove(child)
                assert "already running" in child.communicate()[1]
                break
    winner = children[0]
    assert winner.communicate("\n")[0] == "won\n"


def test_a_file_that_is_no_record_counts_as_absent(registry: Registry, tmp_path: Path) -> None:
    registry.claim(record_of("a", os.getpid()))
    (tmp_path / "deployments" / "a.json").write_text('{"config": 1}')
    assert registry.find("a") is None and registry.all() == []
    registry.claim(record_of("a", os.getpid()))


def test_another_deployments_entry_is_not_removed(registry: Registry, sleeper: Sleeper) -> None:
    old = record_of("a", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    new = record_of("a", os.getpid())
    registry.claim(new)
    registry.remove(old)
    assert registry.find("a") == new


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(tmp_path: Path) -> None:
    (tmp_path / "deployments").write_text("a file")
    with pytest.raises(DeploymentError, match="MII_CACHE_PATH"):
        Registry(tmp_path).claim(record_of("a", os.getpid()))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "localhost:1"),
        ("0.0.0.0", "localhost:1"),
        ("::", "localhost:1"),
        ("::1", "[::1]:1"),
        ("[::1]", "[::1]:1"),
        ("10.0.0.1", "10.0.0.1:1"),
    ],
)
def test_addresses(host: str, address: str) -> None:
    assert address_of(host, 1) == address


def test_the_start_of_a_process_stays_the_same_and_ends_with_it(sleeper: Sleeper) -> None:
    started = start_of(sleeper.pid)
    assert started is not None and started == start_of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert start_of(sleeper.pid) is None
