"""Attention over the blocked cache on a CPU, with PyTorch's own kernels.

Nothing is padded to the longest sequence of a step. Decodes of similar length are gathered and
computed together; every longer query is computed on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as F

from mii.attention.base import AttentionLayer, KVCacheShape, Rotary
from mii.attention.batch import RaggedBatch
from mii.kernels.kv_cache import write_kv
from mii.kernels.norm import rms_norm
from mii.kernels.rotary import rotate

# Decodes are computed together while the shortest fills at least this part of the longest.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one query token each, and the cache slots that they see."""

    rows: torch.Tensor  # int64 [G], their tokens in the batch
    slots: torch.Tensor  # int64 [G * L]
    mask: torch.Tensor | None  # bool [G, 1, 1, L], which slots count; None: all


@dataclass(frozen=True)
class _Chunk:
    """One sequence with several query tokens."""

    start: int  # its first token in the batch
    end: int
    slots: torch.Tensor | None  # int64 [L] that its tokens see; None: just these tokens
    mask: torch.Tensor | None  # bool [end - start, L]; None: causal


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory the system provides page by page, when it is first written.

    torch.zeros writes all of it at once: gigabytes, and seconds, for a cache that nobody uses yet.
    """
    count = math.prod(size) * dtype.itemsize
    return torch.from_numpy(numpy.zeros(count, dtype=numpy.uint8)).view(dtype).view(size)


@dataclass(frozen=True)
class _Layout:
    """What all layers with one window share in a step."""

    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class CPUAttention:
    """An AttentionBackend with a cache of [blocks, block_size, kv_heads, head_dim] per layer."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._block_size = 0
        self._batch: RaggedBatch | None = None
        self._layouts: dict[int | None, _Layout] = {}

    def allocate(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._block_size = shape.block_size
        # Zeros, not garbage: masked slots are multiplied by 0, and 0 times NaN is NaN.
        self._keys = [_lazy_zeros(size, dtype) for _ in range(shape.num_layers)]
        self._values = [_lazy_zeros(size, dtype) for _ in range(shape.num_layers)]

    def plan(self, batch: RaggedBatch) -> None:
        self._batch = batch
        self._layouts = {}

    def attend(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotary: Rotary | None
    ) -> torch.Tensor:
        assert self._batch is not None
        query, key, value = _prepare(layer, qkv, rotary)
        keys, values = self._keys[layer.index], self._values[layer.index]
        write_kv(key, value, keys, values, self._batch.kv_slots)
        if layer.window not in self._layouts:
            self._layouts[layer.window] = self._lay_out(self._batch, layer.window)
        layout = self._layouts[layer.window]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        for group in layout.groups:
            output[group.rows] = _attend_decodes(layer, query, flat_keys, flat_values, group)
        for chunk in layout.chunks:
            own = slice(chunk.start, chunk.end)
            if chunk.slots is None:
                seen_keys, seen_values = key[own], value[own]
            else:
                seen_keys, seen_values = flat_keys[chunk.slots], flat_values[chunk.slots]
            output[own] = _attend_chunk(layer, query[own], seen_keys, seen_values, chunk.mask)
        return output

    def _lay_out(self, batch: RaggedBatch, window: int | None) -> _Layout:
        groups = [
            self._lay_out_decodes(batch, rows, window)
            for rows in _similar(batch.host_context_lengths[: batch.num_decodes], window)
        ]
        starts = batch.query_starts.tolist()
        chunks = [
            self._lay_out_chunk(batch, index, starts[index], starts[index + 1], window)
            for index in range(batch.num_decodes, batch.num_sequences)
        ]
        return _Layout(tuple(groups), tuple(chunks))

    def _lay_out_decodes(
        self, batch: RaggedBatch, rows: list[int], window: int | None
    ) -> _DecodeGroup:
        contexts = torch.tensor([batch.host_context_lengths[row] for row in rows])
        first = (contexts - window).clamp(min=0) if window else torch.zeros_like(contexts)
        counts = contexts - first
        seen = first[:, None] + torch.arange(int(counts.max()))
        is_seen = seen < contexts[:, None]
        slots = self._slots(batch, torch.tensor(rows)[:, None], seen.where(is_seen, 0))
        mask = None if bool(is_seen.all()) else is_seen[:, None, None]
        return _DecodeGroup(torch.tensor(rows), slots.flatten(), mask)

    def _lay_out_chunk(
        self, batch: RaggedBatch, index: int, start: int, end: int, window: int | None
    ) -> _Chunk:
        context = batch.host_context_lengths[index]
        computed = context - (end - start)
        if computed == 0 and (window is None or context <= window):
            return _Chunk(start, end, None, None)
        first = max(0, computed + 1 - window) if window else 0
        seen = torch.arange(first, context)
        queries = torch.arange(computed, context)[:, None]
        mask = seen <= queries
        if window:
            mask &= seen > queries - window
        return _Chunk(start, end, self._slots(batch, torch.tensor(index), seen), mask)

    def _slots(
        self, batch: RaggedBatch, sequences: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the cache slots of some positions of some sequences."""
        blocks = batch.block_tables[sequences, positions // self._block_size].long()
        return blocks * self._block_size + positions % self._block_size


def _prepare(
    layer: AttentionLayer, qkv: torch.Tensor, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v, the first two normalised and rotated."""
    heads = (layer.num_heads, layer.num_kv_heads)
    both, value = qkv.split((sum(heads), layer.num_kv_heads), dim=1)
    if layer.norms is not None:
        norms, (query, key) = layer.norms, both.split(heads, dim=1)
        query = rms_norm(query, norms.query, norms.eps, norms.offset)
        key = rms_norm(key, norms.key, norms.eps, norms.offset)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        return query, key, value
    if rotary is not None:
        both = rotate(both, *rotary)
    query, key = both.split(heads, dim=1)
    return query, key, value


def _similar(contexts: tuple[int, ...], window: int | None) -> list[list[int]]:
    """Group indices by similar context length, longest first."""
    lengths = [min(context, window) if window else context for context in contexts]
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= _LEAST_FILL * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _attend_decodes(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _DecodeGroup,
) -> torch.Tensor:
    """Return [G, heads, head_dim]. The query heads of a key/value head stand as rows of one query,
    so that keys are not repeated."""
    count, kv_heads = len(group.rows), keys.shape[1]
    shape = (count, -1, kv_heads, keys.shape[2])
    seen_keys = keys.index_select(0, group.slots).view(shape).transpose(1, 2)
    seen_values = values.index_select(0, group.slots).view(shape).transpose(1, 2)
    rows = query[group.rows].view(count, kv_heads, -1, keys.shape[2])
    return _attention(layer, rows, seen_keys, seen_values, group.mask).reshape(
        count, query.shape[1], -1
    )


def _attend_chunk(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return [tokens, heads, head_dim]; without a mask, causal."""
    repeats = query.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = (t.repeat_interleave(repeats, dim=1) for t in (keys, values))
    q, k, v = (t.transpose(0, 1)[None] for t in (query, keys, values))
    return _attention(layer, q, k, v, mask, causal=mask is None)[0].transpose(0, 1)


def _attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = False,
) -> torch.Tensor:
    """Attend with [batch, heads, tokens, head_dim] each; the mask says which keys count."""
    if layer.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=layer.scale
        )
    scores = (query @ key.transpose(-1, -2)).float() * layer.scale
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(value.dtype) @ value
