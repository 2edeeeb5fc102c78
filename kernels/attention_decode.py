"""Attention of single query tokens over the blocked cache, split over the keys.

Flash-Decoding (Dao et al., 2023): each program attends over one part of a sequence's keys. The
program that ends last of a sequence's joins the parts by their log-sum-exp. Which parts there are
is decided on the device from the true lengths, once a step: so one long sequence among short ones
is spread over the whole GPU, and a step can be a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        context_lengths: int [sequences], the query's own key included; 0: no query, zeros
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


# What the device decides of a part: a row of as many int32.
_PART_FIELDS = tl.constexpr(8)  # sequence, begin, end, its sequence's first part, parts, length


@triton.jit(do_not_specialize=["sequences", "max_parts", "num_counters"])
def _plan_kernel(
    length_ptr,
    part_ptr,
    arrived_ptr,
    sequences,
    max_parts,
    num_counters,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    WANTED: tl.constexpr,
    SEQUENCES_PADDED: tl.constexpr,
):
    sequence = tl.arange(0, SEQUENCES_PADDED)
    is_sequence = sequence < sequences
    length = tl.load(length_ptr + sequence, mask=is_sequence, other=0)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    tiles = tl.cdiv(length - first, TILE)
    total = tl.sum(tiles, 0)
    # Many parts of one tile each take longer to join than to attend to.
    least = tl.where(total > WANTED // 2, 2, 1)
    share = tl.maximum(tl.cdiv(total, WANTED), least)
    # A sequence up to a quarter longer than a share is not worth cutting.
    parts = tl.cdiv(tl.maximum(tiles - share // 4, 1), share)
    size = tl.maximum(tl.cdiv(tiles, parts), 1)
    parts = tl.where(is_sequence, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    first_part = tl.cumsum(parts, 0) - parts
    for number in range(0, tl.max(parts, 0)):
        row = part_ptr + (first_part + number) * _PART_FIELDS
        begin = first + number * size * TILE
        is_part = number < parts
        tl.store(row, sequence, is_part)
        tl.store(row + 1, begin, is_part)
        tl.store(row + 2, tl.minimum(begin + size * TILE, length), is_part)
        tl.store(row + 3, first_part, is_part)
        tl.store(row + 4, parts, is_part)
        tl.store(row + 5, length, is_part)
    for start in range(tl.sum(parts, 0), max_parts, SEQUENCES_PADDED):
        unused = start + sequence
        tl.store(part_ptr + unused * _PART_FIELDS, -1, unused < max_parts)
    for start in range(0, num_counters, SEQUENCES_PADDED):
        tl.store(arrived_ptr + start + sequence, 0, start + sequence < num_counters)


@dataclass(frozen=True)
class DecodeWork:
    """How the sequences of one step are cut into parts, and where parts leave their results."""

    parts: torch.Tensor  # int32 [max_parts, 8]; a negative sequence stands for no part
    arrived: torch.Tensor  # int32 [sequences, kv_heads], parts that have ended
    results: torch.Tensor  # fp32 [max_parts, heads, head_dim]
    lse: torch.Tensor  # fp32 [max_parts, heads], log2 of the sum of exponentials
    window: int | None
    tile: int


def wanted_parts(kv_heads: int, multiprocessors: int) -> int:
    """Return into how many parts all sequences together are cut, for each head of keys.

    About four programs for each multiprocessor keep its memory pipes full.
    """
    return min(128, max(1, 4 * multiprocessors // kv_heads))


def plan_decode(
    context_lengths: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    wanted: int = 1,
    tile: int = 64,
) -> DecodeWork:
    """Cut the sequences into parts of about equal length; all layers of a step share the result.

    Args:
        context_lengths: int32 [sequences], see `attention_decode_reference`
        window: as the layers have it that will use this
        wanted: see `wanted_parts`
        tile: keys that a program takes at a time; parts are made of whole tiles
    """
    device = context_lengths.device
    sequences = len(context_lengths)
    max_parts = sequences + wanted
    work = DecodeWork(
        parts=torch.empty((max_parts, _PART_FIELDS.value), dtype=torch.int32, device=device),
        arrived=torch.empty((sequences, kv_heads), dtype=torch.int32, device=device),
        results=torch.empty((max_parts, heads, head_dim), dtype=torch.float32, device=device),
        lse=torch.empty((max_parts, heads), dtype=torch.float32, device=device),
        window=window,
        tile=tile,
    )
    _plan_kernel[(1,)](
        context_lengths,
        work.parts,
        work.arrived,
        sequences,
        max_parts,
        work.arrived.numel(),
        WINDOW=window or 0,
        TILE=tile,
        WANTED=wanted,
        SEQUENCES_PADDED=max(32, triton.next_power_of_2(sequences)),
        num_warps=4,
    )
    return work


@triton.jit
def _join_parts(
    result_ptr,
    lse_ptr,
    output_ptr,
    first_part,
    parts,
    first_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the attention of one group of heads: its parts, each weighted by its sum."""
    dims = tl.arange(0, DIM_PADDED)
    heads = tl.arange(0, GROUP_PADDED)
    in_group = heads < GROUP
    in_head = dims < HEAD_DIM
    greatest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(0, parts, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        rows = (first_part + number)[:, None] * HEADS + first_head + heads[None, :]
        is_part = (number < parts)[:, None] & in_group[None, :]
        # Past the first-level cache: other multiprocessors wrote these.
        lse = tl.load(lse_ptr + rows, is_part, other=float("-inf"), cache_modifier=".cg")
        offsets = rows.to(tl.int64)[:, :, None] * HEAD_DIM + dims[None, None, :]
        mask = is_part[:, :, None] & in_head[None, None, :]
        values = tl.load(result_ptr + offsets, mask, other=0.0, cache_modifier=".cg")
        new_greatest = tl.maximum(greatest, tl.max(lse, 0))
        safe = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        weights = tl.exp2(lse - safe[None, :])
        shrink = tl.exp2(greatest - safe)
        total = total * shrink + tl.sum(weights, 0)
        result = result * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        greatest = new_greatest
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        output_ptr + heads[:, None] * HEAD_DIM + dims[None, :],
        result.to(output_ptr.dtype.element_ty),
        in_group[:, None] & in_head[None, :],
    )


@triton.jit
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    output_ptr,
    part_ptr,
    arrived_ptr,
    result_ptr,
    lse_ptr,
    scale_log2e,
    softcap,
    query_stride,
    table_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    fields = part_ptr + part * _PART_FIELDS
    sequence = tl.load(fields)
    begin = tl.load(fields + 1)
    end = tl.load(fields + 2)
    first_part = tl.load(fields + 3)
    parts = tl.load(fields + 4)
    length = tl.load(fields + 5)
    if sequence < 0:
        return
    sequence = sequence.to(tl.int64)

    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    columns = tl.arange(0, TILE)
    in_head = dims < HEAD_DIM
    in_group = heads < GROUP
    first_head = kv_head * GROUP
    in_result = in_group[:, None] & in_head[None, :]
    query = tl.load(
        query_ptr
        + sequence * query_stride
        + (first_head + heads)[:, None] * HEAD_DIM
        + dims[None, :],
        mask=in_result,
        other=0.0,
    )
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM_PADDED], tl.float32)

    table = table_ptr + sequence * table_stride
    for start in range(begin, end, TILE):
        position = start + columns
        seen = position < end
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        if PAGE >= TILE:
            # A tile lies within one page: one look into the table, and offsets that never change.
            page = tl.load(table + start // PAGE).to(tl.int64)
            first = ((page * KV_HEADS + kv_head) * PAGE + start % PAGE) * HEAD_DIM
            offsets = columns[:, None] * HEAD_DIM + dims[None, :]
        else:
            page = tl.load(table + position // PAGE, mask=position < end, other=0).to(tl.int64)
            row = (page * KV_HEADS + kv_head) * PAGE + position % PAGE
            first = 0
            offsets = row[:, None] * HEAD_DIM + dims[None, :]
        mask = seen[:, None] & in_head[None, :]
        key = tl.load(key_ptr + first + offsets, mask=mask, other=0.0)
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
        value = tl.load(value_ptr + first + offsets, mask=mask, other=0.0)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
        greatest = new_greatest

    divisor = tl.where(total > 0.0, total, 1.0)
    result = result / divisor[:, None]
    output = output_ptr + (sequence * KV_HEADS + kv_head) * GROUP * HEAD_DIM
    if parts == 1:
        tl.store(
            output + heads[:, None] * HEAD_DIM + dims[None, :],
            result.to(output_ptr.dtype.element_ty),
            in_result,
        )
    else:
        rows = part.to(tl.int64) * KV_HEADS * GROUP + first_head + heads
        tl.store(result_ptr + rows[:, None] * HEAD_DIM + dims[None, :], result, in_result)
        tl.store(lse_ptr + rows, greatest + tl.log2(divisor), in_group)
        tl.debug_barrier()  # all of this program's results, before it says that it has ended
        counter = arrived_ptr + sequence * KV_HEADS + kv_head
        ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if ended == parts - 1:
            tl.store(counter, 0)  # for the next layer
            _join_parts(
                result_ptr, lse_ptr, output, first_part, parts, first_head, KV_HEADS * GROUP,
                GROUP, GROUP_PADDED, HEAD_DIM, DIM_PADDED, AT_ONCE,
            )  # fmt: skip


def attention_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    work: DecodeWork,
    output: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    warps: int | None = None,
    stages: int = 2,
    join: int | None = None,
) -> None:
    """Compute `attention_decode_reference` into `output`; nothing depends on host-side lengths.

    Args:
        query: [sequences, heads, head_dim], heads contiguous; rows may be part of a wider tensor
        work: from `plan_decode` over the context lengths and with the layer's window
        output: [sequences, heads, head_dim], contiguous
        warps, stages: launch settings
        join: numbers of the parts' results that a program takes at a time when it joins them; many
            take registers of which a full GPU has too few
    """
    sequences, heads, head_dim = query.shape
    _, kv_heads, page, _ = key_cache.shape
    group = heads // kv_heads
    if sequences != len(work.arrived):
        raise ValueError(
            f"query has {sequences} sequences and work was planned for {len(work.arrived)}; "
            "pass as many queries as context lengths were given to plan_decode"
        )
    if sequences == 0:
        return
    group_padded = triton.next_power_of_2(group)
    dim_padded = triton.next_power_of_2(head_dim)
    warps = warps or (2 if dim_padded <= 128 else 4)
    join = join or (8192 if sequences <= 4 else 4096)
    _attend_kernel[(kv_heads, len(work.parts))](
        query,
        key_cache,
        value_cache,
        block_tables,
        output,
        work.parts,
        work.arrived,
        work.results,
        work.lse,
        scale * math.log2(math.e),
        softcap or 0.0,
        query.stride(0),
        block_tables.stride(0),
        WINDOW=work.window or 0,
        HAS_SOFTCAP=softcap is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, group_padded),
        GROUP_PADDED=group_padded,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        PAGE=page,
        TILE=work.tile,
        AT_ONCE=max(1, min(64, join // (group_padded * dim_padded))),
        num_warps=warps,
        num_stages=stages,
    )
