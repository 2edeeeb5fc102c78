"""A blocked cache with scattered blocks, garbage where nothing was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@contextmanager
def nan_in_new_tensors() -> Iterator[None]:
    """Have `torch.empty` give NaN, so that what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_cache(
    lengths: list[int], kv_heads: int, page: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values [blocks, kv_heads, page, head_dim], block tables and context lengths."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).int()
    tables = torch.zeros(len(lengths), max(1, max(counts)), dtype=torch.int32)
    caches = poisoned(2, len(order), kv_heads, page, head_dim, dtype=dtype)
    used = 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[index, :count] = order[used : used + count]
        used += count
        for cache in caches:
            for block, start in zip(
                tables[index, :count].tolist(), range(0, length, page), strict=True
            ):
                filled = min(page, length - start)
                data = torch.randn(kv_heads, filled, head_dim, generator=generator)
                cache[block, :, :filled] = data.to(dtype)
    contexts = torch.tensor(lengths, dtype=torch.int32)
    return caches[0], caches[1], tables.to(DEVICE), contexts.to(DEVICE)


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error, by norm; NaN anywhere makes it NaN."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


# Triton's interpreter multiplies bfloat16 matrices wrongly: only a GPU can test them.
HALVES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
