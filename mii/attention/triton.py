"""Attention over the blocked cache on a GPU, with our Triton kernels."""

from __future__ import annotations

import torch

from mii.attention.base import AttentionLayer, KVCacheShape, Rotary
from mii.attention.batch import RaggedBatch
from mii.kernels.attention_decode import attention_decode, num_parts
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
        self._tiles: tuple[torch.Tensor, torch.Tensor] | None = None
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
        self._batch = batch
        self._tiles = None
        if batch.num_sequences > batch.num_decodes:
            lengths = list(batch.query_lengths[batch.num_decodes :])
            rows = prefill_rows(self._keys[0].shape[-1])
            tiles = torch.tensor(query_tiles(lengths, rows), dtype=torch.int32)
            device = batch.token_ids.device
            if device.type == "cuda":
                tiles = tiles.pin_memory().to(device, non_blocking=True)
            self._tiles = (tiles[0], tiles[1])

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
        decodes = batch.num_decodes
        options = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap}
        if decodes:
            longest = batch.block_tables.shape[1] * keys.shape[2]
            attention_decode(
                query[:decodes],
                keys,
                values,
                batch.block_tables[:decodes],
                batch.context_lengths[:decodes],
                output[:decodes],
                parts=num_parts(decodes, keys.shape[1], longest, self._multiprocessors),
                **options,
            )
        if self._tiles is not None:
            attention_prefill(
                query,
                keys,
                values,
                batch.block_tables[decodes:],
                batch.query_starts[decodes:],
                batch.context_lengths[decodes:],
                *self._tiles,
                output,
                **options,
            )
        return output
