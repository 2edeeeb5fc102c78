"""Attention of many query tokens over the blocked cache, causal (FlashAttention-2, Dao 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mii.kernels.attention_decode import attention_decode_reference


def attention_prefill_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return each token's attention over the keys up to its own, which are in the cache already.

    Args:
        query: [tokens, heads, head_dim], sequence after sequence
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim]
        block_tables: int [sequences, blocks of the longest]
        query_starts: int [sequences + 1], where each sequence's tokens begin
        context_lengths: int [sequences], keys of each sequence, those of its tokens included
        scale, window, softcap: see `attention_decode_reference`
    """
    starts, rows, lengths = query_starts.tolist(), [], []
    for index, context in enumerate(context_lengths.tolist()):
        count = starts[index + 1] - starts[index]
        rows += [index] * count
        lengths += list(range(context - count + 1, context + 1))
    return attention_decode_reference(
        query[: starts[-1]],
        key_cache,
        value_cache,
        block_tables[torch.tensor(rows, device=block_tables.device)],
        torch.tensor(lengths),
        scale=scale,
        window=window,
        softcap=softcap,
    )


@triton.jit
def _attend_tile(
    query,
    greatest,
    total,
    result,
    start,
    end,
    position,
    key_ptr,
    value_ptr,
    table,
    kv_head,
    scale_log2e,
    softcap,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take the keys [start, start + TILE) in; without a mask, every query token sees them all."""
    dims = tl.arange(0, DIM_PADDED)
    key_position = start + tl.arange(0, TILE)
    in_keys = key_position < end
    if PAGE >= TILE:
        page = tl.load(table + start // PAGE).to(tl.int64)
        row = (page * KV_HEADS + kv_head) * PAGE + start % PAGE + tl.arange(0, TILE)
    else:
        page = tl.load(table + key_position // PAGE, mask=in_keys, other=0).to(tl.int64)
        row = (page * KV_HEADS + kv_head) * PAGE + key_position % PAGE
    offsets = row[:, None] * HEAD_DIM + dims[None, :]
    mask = dims[None, :] < HEAD_DIM
    if MASKED:
        mask = mask & in_keys[:, None]
    if MASKED or HEAD_DIM < DIM_PADDED:
        key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
        value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
    else:
        key = tl.load(key_ptr + offsets)
        value = tl.load(value_ptr + offsets)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scale = scale_log2e
    if HAS_SOFTCAP:
        # tanh(x) = 2 / (1 + exp(-2 x)) - 1, and the cap in the scale's place.
        scores = 2.0 / (1.0 + tl.exp2(scores * (scale_log2e / softcap * -2.0))) - 1.0
        scale = softcap * 1.4426950408889634
    if MASKED:
        seen = key_position[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    # Scaled after the maximum is taken, so that scaling and subtraction are one instruction.
    new_greatest = tl.maximum(greatest, tl.max(scores, 1) * scale)
    safe = new_greatest
    if MASKED:
        safe = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(greatest - safe)
    total = total * shrink + tl.sum(weights, 1)
    result = result * shrink[:, None]
    result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
    return new_greatest, total, result


@triton.jit
def _prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    starts_ptr,
    length_ptr,
    tile_sequence_ptr,
    tile_start_ptr,
    output_ptr,
    scale_log2e,
    softcap,
    query_stride,
    table_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    sequence = tl.load(tile_sequence_ptr + tile)
    if sequence < 0:
        return
    tile_start = tl.load(tile_start_ptr + tile)
    kv_head = head // (HEADS // KV_HEADS)

    query_start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - query_start
    length = tl.load(length_ptr + sequence)
    computed = length - count  # keys before this sequence's first query token

    rows = tile_start + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    in_head = dims < HEAD_DIM
    is_row = rows < count
    token = (query_start + rows).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride + head * HEAD_DIM + dims[None, :],
        mask=is_row[:, None] & in_head[None, :],
        other=0.0,
    )
    position = computed + rows  # of each query token
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM_PADDED], tl.float32)

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(computed + tile_start - WINDOW + 1, 0) // TILE * TILE
    end = tl.minimum(computed + tile_start + ROWS, length)
    # Keys before the tile's first query token are seen by all of its tokens, but for a window.
    whole = begin
    if WINDOW == 0:
        whole = (computed + tile_start) // TILE * TILE
    table = table_ptr + sequence.to(tl.int64) * table_stride
    for start in range(begin, whole, TILE):
        greatest, total, result = _attend_tile(
            query, greatest, total, result, start, end, position, key_ptr, value_ptr, table,
            kv_head, scale_log2e, softcap, False, WINDOW, HAS_SOFTCAP, KV_HEADS, HEAD_DIM,
            DIM_PADDED, PAGE, TILE,
        )  # fmt: skip
    for start in range(whole, end, TILE):
        greatest, total, result = _attend_tile(
            query, greatest, total, result, start, end, position, key_ptr, value_ptr, table,
            kv_head, scale_log2e, softcap, True, WINDOW, HAS_SOFTCAP, KV_HEADS, HEAD_DIM,
            DIM_PADDED, PAGE, TILE,
        )  # fmt: skip

    out = result / tl.where(total > 0.0, total, 1.0)[:, None]
    # Computed anew from memory: kept through the loops, these would not leave registers enough.
    rows = tl.load(tile_start_ptr + tile, volatile=True) + tl.arange(0, ROWS)
    token = (query_start + rows).to(tl.int64)
    is_row = rows < count
    tl.store(
        output_ptr + (token[:, None] * HEADS + head) * HEAD_DIM + dims[None, :],
        out.to(output_ptr.dtype.element_ty),
        mask=is_row[:, None] & in_head[None, :],
    )


def query_tiles(
    query_lengths: Sequence[int], rows: int, first: int = 0
) -> tuple[list[int], list[int]]:
    """Cut sequences' query tokens into tiles of `rows`, those late in their sequence first.

    Args:
        query_lengths: tokens of each sequence
        rows: tokens of a tile at most
        first: sequences before this one get no tiles

    Returns:
        For each tile, its sequence, and the tile's first token within the sequence.
    """
    tiles = [
        (sequence, start)
        for sequence in range(first, len(query_lengths))
        for start in range(0, query_lengths[sequence], rows)
    ]
    tiles.sort(key=lambda tile: -tile[1])
    return [tile[0] for tile in tiles], [tile[1] for tile in tiles]


def prefill_rows(head_dim: int) -> int:
    """Return how many query tokens one program takes."""
    return 128 if head_dim <= 128 else 64


def attention_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    tile_sequences: torch.Tensor,
    tile_starts: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: int | None = None,
    tile: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Compute `attention_prefill_reference` into `output`.

    Args:
        query: [tokens, heads, head_dim]; rows may be part of a wider tensor
        tile_sequences, tile_starts: int32 [tiles], from `query_tiles`; a negative sequence stands
            for no tile
        output: [tokens, heads, head_dim], contiguous
        rows: query tokens of a program, as given to `query_tiles`
        tile, warps, stages: launch settings
    """
    _, heads, head_dim = query.shape
    _, kv_heads, page, _ = key_cache.shape
    if len(tile_sequences) == 0:
        return
    _prefill_kernel[(heads, len(tile_sequences))](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lengths,
        tile_sequences,
        tile_starts,
        output,
        scale * math.log2(math.e),
        softcap or 0.0,
        query.stride(0),
        block_tables.stride(0),
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        PAGE=page,
        ROWS=rows or prefill_rows(head_dim),
        TILE=tile,
        num_warps=warps,
        num_stages=stages,
    )
