"""Collectives through torch.distributed: NCCL between GPUs, gloo where memory cannot be shared."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mii.parallel.links import PlanReceiver, PlanSender

# A rank may wait this long for the others: idle replicas make no collective calls at all, so this
# bounds only the difference in speed between ranks.
_TIMEOUT = timedelta(minutes=10)


class TorchDistributedGroup:
    """A ParallelGroup over torch.distributed's default process group of this process.

    The ranks meet in a TCP store on a port that the system picks; rank 0 tells it over the links
    on which step plans will follow.
    """

    def __init__(self, backend: str, rank: int, size: int, link: PlanSender | PlanReceiver) -> None:
        self.rank = rank
        self.size = size
        if isinstance(link, PlanSender):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            link.send(str(store.port).encode())
        else:
            port = int(link.receive() or b"0")
            store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def gather_columns(self, tensor: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        rows, widest = tensor.shape[0], max(widths)
        padded = tensor.new_zeros(rows, widest)
        padded[:, : tensor.shape[1]] = tensor
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded)
        return torch.cat([p[:, :w] for p, w in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
