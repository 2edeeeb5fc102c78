"""Which rank of a replica this process is, and what connects it to the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mii.parallel.distributed import TorchDistributedGroup
from mii.parallel.group import ParallelGroup, SingleRank
from mii.parallel.links import PlanReceiver, PlanSender
from mii.parallel.shared_memory import SharedMemoryGroup


@dataclass(frozen=True)
class Rank:
    """This process's place among the ranks of its replica."""

    rank: int = 0
    size: int = 1
    plans: PlanSender | PlanReceiver | None = None  # rank 0 sends, the others receive
    shared_memory: int | None = None  # descriptor, where the ranks share a host and memory
    peers_alive: Callable[[], bool] = lambda: True


def join_group(rank: Rank, device: str) -> ParallelGroup:
    """Return the group of a replica's ranks; on more than one rank, waits for the others."""
    if rank.size == 1:
        return SingleRank()
    if device == "cpu" and rank.shared_memory is not None:
        return SharedMemoryGroup(rank.shared_memory, rank.rank, rank.size, rank.peers_alive)
    assert rank.plans is not None
    backend = "gloo" if device == "cpu" else "nccl"
    return TorchDistributedGroup(backend, rank.rank, rank.size, rank.plans)
