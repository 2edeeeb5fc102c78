"""Paged decode attention equals a plain fp64 computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.kernels.attention_decode import (
    attention_decode,
    attention_decode_reference,
    plan_decode,
    wanted_parts,
)
from tests.kernels.cache import DEVICE, HALVES, TOLERANCE, error_of, make_cache, poisoned


def check(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    wanted: int,
    window: int | None,
    softcap: float | None,
    seed: int,
    tile: int = 16,
) -> None:
    keys, values, tables, contexts = make_cache(lengths, kv_heads, page, head_dim, dtype, seed)
    wide = torch.randn(len(lengths), kv_heads * (group + 2), head_dim, device=DEVICE).to(dtype)
    query = wide[:, : kv_heads * group]  # as it lies within a fused projection
    work = plan_decode(
        contexts,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        wanted=wanted,
        tile=tile,
    )
    options = {"scale": head_dim**-0.5, "softcap": softcap}
    expected = attention_decode_reference(
        query, keys, values, tables, contexts, window=window, **options
    )
    for _ in range(2):  # the second layer of a step starts from what the first one left
        output = poisoned(*query.shape, dtype=dtype)
        attention_decode(query, keys, values, tables, work, output, **options)
        assert error_of(output, expected) < TOLERANCE[dtype]
    assert not output[contexts == 0].any()


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(any),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]),
    page=st.sampled_from([16, 32, 64]),
    wanted=st.integers(1, 9),
    window=st.sampled_from([None, 1, 16, 17, 40]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 1000),
)
def test_drawn_shapes(
    lengths, kv_heads, group, head_dim, page, wanted, window, softcap, seed
) -> None:
    check(lengths, kv_heads, group, head_dim, page, torch.float32, wanted, window, softcap, seed)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("page", [16, 64])
def test_half_precision(dtype: torch.dtype, page: int) -> None:
    check([70, 1, 33], 2, 4, 128, page, dtype, 2, None, None, 0, tile=32)


def test_large_heads() -> None:
    check([40, 5], 1, 4, 256, 32, torch.float32, 2, 20, None, 0)


def parts_of(lengths: list[int], wanted: int, window: int | None = None) -> list[list[int]]:
    """Return the planned parts: sequence, begin, end, its sequence's first part, parts, length."""
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    work = plan_decode(
        contexts, heads=2, kv_heads=1, head_dim=16, window=window, wanted=wanted, tile=16
    )
    rows = work.parts[:, :6].tolist()
    assert len(rows) == len(lengths) + wanted
    used = [row for row in rows if row[0] >= 0]
    assert rows[: len(used)] == used
    return used


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=40),
    wanted=st.integers(1, 70),
    window=st.sampled_from([None, 1, 50]),
)
def test_parts_cover_every_visible_key_once(lengths, wanted, window) -> None:
    found: dict[int, list[tuple[int, int]]] = {}
    for index, row in enumerate(parts_of(lengths, wanted, window)):
        sequence, begin, end, first_part, parts, length = row
        assert length == lengths[sequence]
        assert begin % 16 == 0
        assert first_part <= index < first_part + parts
        found.setdefault(sequence, []).append((begin, end))
    assert sorted(found) == list(range(len(lengths)))  # also those that get nothing but zeros
    for sequence, pieces in found.items():
        begins, ends = zip(*pieces, strict=True)
        assert begins[1:] == ends[:-1]
        assert ends[-1] == lengths[sequence]
        oldest = max(0, lengths[sequence] - window) if window else 0
        assert begins[0] == oldest // 16 * 16
        assert all(begin < end for begin, end in pieces) or lengths[sequence] == 0


def test_one_long_sequence_is_spread_and_equal_ones_are_left_whole() -> None:
    counts = [row[4] for row in parts_of([32] * 10 + [3200], 16)]
    assert counts[:10] == [1] * 10
    assert counts[10] >= 14
    assert [row[4] for row in parts_of([512] * 15, 16)] == [1] * 15


def test_about_four_programs_for_each_multiprocessor() -> None:
    assert wanted_parts(8, 132) == 66
    assert wanted_parts(1, 132) == 128
    assert wanted_parts(1000, 1) == 1
