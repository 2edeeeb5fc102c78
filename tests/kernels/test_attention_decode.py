"""Paged decode attention equals a plain fp64 computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.kernels.attention_decode import attention_decode, attention_decode_reference, num_parts
from tests.kernels.cache import DEVICE, HALVES, TOLERANCE, error_of, make_cache, poisoned


def check(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    parts: int,
    window: int | None,
    softcap: float | None,
    seed: int,
    tile: int = 16,
) -> None:
    keys, values, tables, contexts = make_cache(lengths, kv_heads, page, head_dim, dtype, seed)
    wide = torch.randn(len(lengths), kv_heads * (group + 2), head_dim, device=DEVICE).to(dtype)
    query = wide[:, : kv_heads * group]  # as it lies within a fused projection
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    output = poisoned(*query.shape, dtype=dtype)
    attention_decode(
        query, keys, values, tables, contexts, output, parts=parts, tile=tile, **options
    )
    expected = attention_decode_reference(query, keys, values, tables, contexts, **options)
    is_query = contexts > 0
    assert error_of(output[is_query], expected[is_query]) < TOLERANCE[dtype]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(any),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]),
    page=st.sampled_from([16, 32, 64]),
    parts=st.integers(1, 5),
    window=st.sampled_from([None, 1, 16, 17, 40]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 1000),
)
def test_drawn_shapes(
    lengths, kv_heads, group, head_dim, page, parts, window, softcap, seed
) -> None:
    check(lengths, kv_heads, group, head_dim, page, torch.float32, parts, window, softcap, seed)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("page", [16, 64])
def test_half_precision(dtype: torch.dtype, page: int) -> None:
    check([70, 1, 33], 2, 4, 128, page, dtype, 2, None, None, 0, tile=32)


def test_large_heads() -> None:
    check([40, 5], 1, 4, 256, 32, torch.float32, 2, 20, None, 0)


def test_more_parts_for_fewer_sequences_and_never_more_than_there_are_keys() -> None:
    assert num_parts(256, 8, 1024, 132) == 1
    assert num_parts(1, 8, 4096, 132) == 32
    assert num_parts(1, 8, 300, 132) == 2
