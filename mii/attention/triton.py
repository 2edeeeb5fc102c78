"""Attention over the blocked cache on a GPU, with our Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from mii.attention.base import AttentionLayer, KVCacheShape, Rotary
from mii.attention.batch import RaggedBatch
from mii.kernels.attention_decode import (
    DecodeWork,
    attention_decode,
    plan_decode,
    wanted_parts,
)
from mii.kernels.attention_prefill import attention_prefill, prefill_rows, query_tiles
from mii.kernels.rotary_triton import prepare_attention


class TritonAttention:
    """An AttentionBackend with a cache of [blocks, kv_heads, block_size, head_dim] per layer.

    One block more than asked for is kept: the last, into which padding is written.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._batch: RaggedBatch | None = None
        self._work: dict[int | None, DecodeWork] = {}  # of this step, by window
        self._multiprocessors = 1

    def allocate(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.num_blocks + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self._keys = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)
        ]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._multiprocessors = properties.multi_processor_count

    def plan(self, batch: RaggedBatch) -> None:
        if batch.decode_lengths is None and batch.query_tiles is None:
            batch = self._with_device_facts(batch)
        self._batch = batch
        self._work = {}

    def _decode_work(self, layer: AttentionLayer, lengths: torch.Tensor) -> DecodeWork:
        """Return how this step's decodes are cut; planned by the first layer with its window."""
        work = self._work.get(layer.window)
        if work is None:
            work = plan_decode(
                lengths,
                heads=layer.num_heads,
                kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                window=layer.window,
                wanted=wanted_parts(layer.num_kv_heads, self._multiprocessors),
            )
            self._work[layer.window] = work
        return work

    def _with_device_facts(self, batch: RaggedBatch) -> RaggedBatch:
        """Add what the kernels read, for a batch that was laid out on the host."""
        rows = prefill_rows(self._keys[0].shape[-1])
        tiles = query_tiles(list(batch.query_lengths), rows, first=batch.num_decodes)
        on_device = torch.tensor(tiles, dtype=torch.int32).to(batch.token_ids.device)
        return replace(
            batch,
            decode_lengths=batch.context_lengths[: batch.num_decodes],
            query_tiles=(on_device[0], on_device[1]),
        )

    def attend(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotary: Rotary | None
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        keys, values = self._keys[layer.index], self._values[layer.index]
        norms = layer.norms
        query = prepare_attention(
            qkv,
            layer.num_heads,
            rotary,
            None if norms is None else (norms.query, norms.key),
            norms.eps if norms else 0.0,
            norms.offset if norms else 0.0,
            keys,
            values,
            batch.kv_slots,
        )
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if batch.decode_lengths is not None and len(batch.decode_lengths):
            decodes = len(batch.decode_lengths)
            attention_decode(
                query[:decodes],
                keys,
                values,
                batch.block_tables[:decodes],
                self._decode_work(layer, batch.decode_lengths),
                output[:decodes],
                scale=layer.scale,
                softcap=layer.softcap,
            )
        if batch.query_tiles is not None and len(batch.query_tiles[0]):
            attention_prefill(
                query,
                keys,
                values,
                batch.block_tables,
                batch.query_starts,
                batch.context_lengths,
                *batch.query_tiles,
                output,
                scale=layer.scale,
                window=layer.window,
                softcap=layer.softcap,
            )
        return output
