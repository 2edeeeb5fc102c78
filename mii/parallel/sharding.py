"""Which part of the model each rank holds: arithmetic for any degree up to the number of heads."""

from __future__ import annotations

from dataclasses import dataclass

from mii.errors import InvalidArgument


def split(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the rank's [start, end) of `total` things, dealt out in order, as evenly as can be."""
    return total * rank // size, total * (rank + 1) // size


def widths(total: int, size: int) -> tuple[int, ...]:
    """Return how many of `total` things each rank holds."""
    ends = [split(total, rank, size) for rank in range(size)]
    return tuple(end - start for start, end in ends)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one rank.

    Query heads are dealt out in order. The rank holds every key/value head that one of its query
    heads reads, so a key/value head may be on two ranks. Attention kernels want the same number of
    query heads for each key/value head: where the deal cuts through a group, `query_heads` has None
    in the place of the missing one, whose weights are zeros. Nine query heads over three key/value
    heads on two ranks:

        rank 0: kv 0 (q 0, 1, 2), kv 1 (q 3, -, -)
        rank 1: kv 1 (q -, 4, 5), kv 2 (q 6, 7, 8)      (- is None)
    """

    query_heads: tuple[int | None, ...]  # group * len(kv_heads) of them, group after group
    kv_heads: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return len(self.query_heads) // len(self.kv_heads)


def check_degree(num_heads: int, size: int) -> None:
    """Refuse a tensor-parallel degree that leaves a rank without a query head.

    Raises:
        InvalidArgument: naming both numbers.
    """
    if not 1 <= size <= num_heads:
        raise InvalidArgument(
            f"tensor_parallel = {size} is not allowed: the model has {num_heads} attention heads, "
            f"and each rank needs at least one: use 1 to {num_heads}",
            "tensor_parallel",
        )


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
    """Return the heads of one rank."""
    check_degree(num_heads, size)
    start, end = split(num_heads, rank, size)
    whole_group = num_heads // num_kv_heads
    kv_heads = range(start // whole_group, (end - 1) // whole_group + 1)
    of_kv = [[q for q in range(start, end) if q // whole_group == kv_head] for kv_head in kv_heads]
    group = max(map(len, of_kv))
    query_heads: list[int | None] = []
    for heads in of_kv:
        query_heads += [*heads, *[None] * (group - len(heads))]
    return HeadShard(tuple(query_heads), tuple(kv_heads))
