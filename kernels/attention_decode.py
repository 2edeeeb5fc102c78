"""Attention of single query tokens over the blocked cache, split over the keys.

Flash-Decoding (Dao et al., 2023): each program attends over one part of a sequence's keys, and a
second kernel joins the parts by their log-sum-exp.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl


def attention_decode_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return softmax(q . k * scale) . v over each sequence's last `window` keys, in fp64.

    Args:
        query: [sequences, heads, head_dim]
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim]
        block_tables: int [sequences, blocks of the longest]
        context_lengths: int [sequences], the query's own key included; 0: no query, and what the
            kernel leaves in the output means nothing (here: zeros)
        scale: factor on q . k
        window: keys seen at most; None: all
        softcap: c in c * tanh(score / c)
    """
    output = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // key_cache.shape[1]
    for index, length in enumerate(context_lengths.tolist()):
        if length == 0:
            continue
        keys, values = (
            cache[block_tables[index].long()].transpose(1, 2).flatten(0, 1)[:length].double()
            for cache in (key_cache, value_cache)
        )
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        scores = torch.einsum("hd,lhd->hl", query[index].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[:, : max(0, length - window)] = float("-inf")
        output[index] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
    return output.to(query.dtype)


@triton.jit
def _attend_part_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    length_ptr,
    output_ptr,
    part_ptr,
    lse_ptr,
    scale_log2e,
    softcap,
    query_stride,
    table_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(length_ptr + sequence)
    if length == 0:
        return

    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    tiles = tl.cdiv(length - first, TILE)
    tiles_per_part = tl.cdiv(tiles, PARTS)
    begin = first + part * tiles_per_part * TILE
    end = tl.minimum(begin + tiles_per_part * TILE, length)

    heads = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    columns = tl.arange(0, TILE)
    in_head = dims < HEAD_DIM
    in_group = heads < GROUP
    head = kv_head * GROUP + heads

    query = tl.load(
        query_ptr + sequence.to(tl.int64) * query_stride + head[:, None] * HEAD_DIM + dims[None, :],
        mask=in_group[:, None] & in_head[None, :],
        other=0.0,
    )
    greatest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)

    table = table_ptr + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, TILE):
        position = start + columns
        seen = position < end
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        if PAGE >= TILE:
            # A tile lies within one page: one look into the table.
            page = tl.load(table + start // PAGE).to(tl.int64)
            row = (page * KV_HEADS + kv_head) * PAGE + start % PAGE + columns
        else:
            page = tl.load(table + position // PAGE, mask=position < end, other=0).to(tl.int64)
            row = (page * KV_HEADS + kv_head) * PAGE + position % PAGE
        offsets = row[:, None] * HEAD_DIM + dims[None, :]
        mask = seen[:, None] & in_head[None, :]
        key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2e
        if HAS_SOFTCAP:
            # The scores carry log2(e): take it off, cap, put it on again.
            capped = scores * (0.6931471805599453 / softcap)
            capped = 2.0 / (1.0 + tl.exp2(-2.885390081777927 * capped)) - 1.0
            scores = capped * (softcap * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, 1))
        # A tile may lie wholly outside the window: then nothing has been seen yet.
        safe = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(greatest - safe)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
        greatest = new_greatest

    mask = in_group[:, None] & in_head[None, :]
    if PARTS == 1:
        divisor = tl.where(total > 0.0, total, 1.0)
        out = result / divisor[:, None]
        rows = (sequence.to(tl.int64) * KV_HEADS * GROUP + head) * HEAD_DIM
        tl.store(
            output_ptr + rows[:, None] + dims[None, :], out.to(output_ptr.dtype.element_ty), mask
        )
    else:
        rows = (sequence.to(tl.int64) * KV_HEADS * GROUP + head) * PARTS + part
        divisor = tl.where(total > 0.0, total, 1.0)
        tl.store(
            part_ptr + rows[:, None] * HEAD_DIM + dims[None, :], result / divisor[:, None], mask
        )
        lse = tl.where(total > 0.0, greatest + tl.log2(divisor), float("-inf"))
        tl.store(lse_ptr + rows, lse, in_group)


@triton.jit
def _join_parts_kernel(
    part_ptr,
    lse_ptr,
    output_ptr,
    length_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(length_ptr + row // HEADS) == 0:
        return
    dims = tl.arange(0, DIM_PADDED)
    parts = tl.arange(0, PARTS_PADDED)
    in_head = dims < HEAD_DIM
    is_part = parts < PARTS
    lse = tl.load(lse_ptr + row * PARTS + parts, mask=is_part, other=float("-inf"))
    greatest = tl.max(lse, 0)
    safe = tl.where(greatest == float("-inf"), 0.0, greatest)
    weights = tl.exp2(lse - safe)
    total = tl.sum(weights, 0)
    offsets = (row * PARTS + parts)[:, None] * HEAD_DIM + dims[None, :]
    mask = is_part[:, None] & in_head[None, :]
    values = tl.load(part_ptr + offsets, mask=mask, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(
        output_ptr + row * HEAD_DIM + dims, result.to(output_ptr.dtype.element_ty), mask=in_head
    )


def num_parts(sequences: int, kv_heads: int, max_context: int, multiprocessors: int) -> int:
    """Return into how many parts each sequence's keys are split.

    About four programs for each multiprocessor keep its memory pipes full; parts of less than 128
    keys cost more to join than they save. A power of two: each number is a kernel of its own.
    """
    wanted = 4 * multiprocessors // max(1, sequences * kv_heads)
    limit = max(1, min(wanted, max_context // 128, 32))
    return 1 << (limit.bit_length() - 1)


def attention_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lengths: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    parts: int = 1,
    tile: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Compute `attention_decode_reference` into `output`; nothing depends on host-side lengths.

    Args:
        query: [sequences, heads, head_dim], heads contiguous; rows may be part of a wider tensor
        output: [sequences, heads, head_dim], contiguous
        parts: see `num_parts`
        tile, warps, stages: launch settings
    """
    sequences, heads, head_dim = query.shape
    blocks, kv_heads, page, _ = key_cache.shape
    group = heads // kv_heads
    if sequences == 0:
        return
    part = lse = output
    if parts > 1:
        size = (sequences, heads, parts)
        part = torch.empty((*size, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty(size, dtype=torch.float32, device=query.device)
    dim_padded = triton.next_power_of_2(head_dim)
    _attend_part_kernel[(sequences, kv_heads, parts)](
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lengths,
        output,
        part,
        lse,
        scale * math.log2(math.e),
        softcap or 0.0,
        query.stride(0),
        block_tables.stride(0),
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        PAGE=page,
        TILE=tile,
        PARTS=parts,
        num_warps=warps,
        num_stages=stages,
    )
    if parts > 1:
        _join_parts_kernel[(sequences * heads,)](
            part,
            lse,
            output,
            context_lengths,
            HEADS=heads,
            HEAD_DIM=head_dim,
            DIM_PADDED=dim_padded,
            PARTS=parts,
            PARTS_PADDED=triton.next_power_of_2(parts),
            num_warps=2,
        )
