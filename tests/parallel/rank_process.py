"""One rank of tests/parallel/test_groups.py, in a process of its own."""

from __future__ import annotations

import socket
import sys

import torch

from mii.parallel.links import PlanReceiver, PlanSender
from mii.parallel.rank import Rank, join_group


def main(rank: int, size: int, memory: int, sockets: list[int]) -> None:
    torch.set_num_threads(1)
    ends = [socket.socket(fileno=fd) for fd in sockets]
    plans = PlanSender(ends) if rank == 0 else PlanReceiver(ends[0])
    group = join_group(Rank(rank, size, plans, memory if memory >= 0 else None), "cpu")
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 3), (7, 576), (2000, 1200), (1, 0)):
        parts = [torch.randn(shape, generator=generator) for _ in range(size)]
        for _ in range(3):
            total = group.all_reduce(parts[rank].clone())
            expected = torch.stack(parts).double().sum(0).float()
            torch.testing.assert_close(total, expected)
    widths = tuple(1000 + 300 * r for r in range(size))
    for rows in (1, 3, 1500):
        parts = [torch.randn((rows, width), generator=generator) for width in widths]
        gathered = group.gather_columns(parts[rank], widths)
        assert torch.equal(gathered, torch.cat(parts, dim=1))
    # All ranks hold the same bits.
    mine = group.all_reduce(torch.randn(999, generator=torch.Generator().manual_seed(rank)))
    everyone = group.gather_columns(mine[None], (999,) * size).view(size, 999)
    assert all(torch.equal(everyone[0], row) for row in everyone)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [int(a) for a in sys.argv[4:]])
