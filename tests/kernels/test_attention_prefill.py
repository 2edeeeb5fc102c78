"""Paged causal attention over ragged queries equals a plain fp64 computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.kernels.attention_prefill import (
    attention_prefill,
    attention_prefill_reference,
    query_tiles,
)
from tests.kernels.cache import DEVICE, HALVES, TOLERANCE, error_of, make_cache, poisoned


def check(
    queries: list[tuple[int, int]],  # (tokens, keys before them)
    kv_heads: int,
    group: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    seed: int,
    rows: int = 16,
) -> None:
    counts = [count for count, _ in queries]
    lengths = [count + before for count, before in queries]
    keys, values, tables, contexts = make_cache(lengths, kv_heads, page, head_dim, dtype, seed)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    wide = torch.randn(sum(counts), kv_heads * (group + 2), head_dim, device=DEVICE).to(dtype)
    query = wide[:, : kv_heads * group]
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    output = poisoned(*query.shape, dtype=dtype)
    tiles = [torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in query_tiles(counts, rows)]
    attention_prefill(
        query, keys, values, tables, starts, contexts, *tiles, output, rows=rows, tile=16, **options
    )
    expected = attention_prefill_reference(query, keys, values, tables, starts, contexts, **options)
    assert error_of(output, expected) < TOLERANCE[dtype]


@settings(max_examples=10, deadline=None)
@given(
    queries=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    page=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([None, 1, 16, 33]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 1000),
)
def test_drawn_shapes(queries, kv_heads, group, head_dim, page, window, softcap, seed) -> None:
    check(queries, kv_heads, group, head_dim, page, torch.float32, window, softcap, seed)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(dtype: torch.dtype) -> None:
    check([(35, 20), (1, 0), (64, 0)], 2, 4, 128, 64, dtype, None, None, 0, rows=32)


def test_every_query_token_is_in_one_tile() -> None:
    sequences, starts = query_tiles([1, 128, 129, 300], 128)
    assert sorted(zip(sequences, starts, strict=True)) == [
        (0, 0), (1, 0), (2, 0), (2, 128), (3, 0), (3, 128), (3, 256),
    ]  # fmt: skip
