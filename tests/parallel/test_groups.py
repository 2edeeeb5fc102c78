"""Collectives between real processes give what a sum and a concatenation give."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mii.errors import InternalError
from mii.parallel.links import PlanReceiver, PlanSender
from mii.parallel.memory import create_shared_memory
from mii.parallel.shared_memory import SharedMemoryGroup

PROCESS = Path(__file__).with_name("rank_process.py")


def start_ranks(size: int, memory: int) -> list[subprocess.Popen[bytes]]:
    pairs = [socket.socketpair() for _ in range(size - 1)]
    ends = [[pair[0].fileno() for pair in pairs], *([pair[1].fileno()] for pair in pairs)]
    processes = []
    for rank in range(size):
        inherited = [*ends[rank], *([memory] if memory >= 0 else [])]
        arguments = [str(PROCESS), str(rank), str(size), str(memory), *map(str, ends[rank])]
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments], pass_fds=inherited, stderr=subprocess.PIPE
            )
        )
    for pair in pairs:
        pair[0].close()
        pair[1].close()
    return processes


@pytest.mark.parametrize(("size", "kind"), [(2, "memory"), (3, "memory"), (2, "gloo")])
def test_collectives_between_processes(size: int, kind: str) -> None:
    memory = create_shared_memory(size) if kind == "memory" else -1
    processes = start_ranks(size, memory)
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert all(process.returncode == 0 for process in processes), b"".join(errors).decode()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        if memory >= 0:
            os.close(memory)


def test_shared_memory_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    descriptor = create_shared_memory(2)
    assert set(os.listdir("/dev/shm")) == before
    os.close(descriptor)


def test_waiting_for_a_dead_rank_is_an_error() -> None:
    import torch

    descriptor = create_shared_memory(2)
    group = SharedMemoryGroup(descriptor, 0, 2, peers_alive=lambda: False)
    with pytest.raises(InternalError, match="rank 1 of this replica has died"):
        group.all_reduce(torch.ones(4))
    os.close(descriptor)


def test_plans_arrive_whole_and_in_order_and_the_end_is_seen() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = PlanSender([ours]), PlanReceiver(theirs)
    for plan in (b"", b"x", bytes(range(256)) * 100):
        sender.send(plan)
        assert receiver.receive() == plan
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_sending_to_a_rank_that_is_gone_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    sender = PlanSender([ours])
    with pytest.raises(InternalError, match="rank 1"):
        sender.send(b"plan")
    sender.close()


def test_a_killed_rank_is_noticed_by_its_link() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert PlanReceiver(ours).receive() is None
    ours.close()
