"""The decoder that every family shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mii.attention.base import AttentionBackend, KVCacheShape, Rotary, bytes_per_block
from mii.attention.batch import RaggedBatch
from mii.layers.attention import AttentionBlock
from mii.layers.linear import VocabularyHead
from mii.layers.mlp import GatedMLP
from mii.layers.norm import RMSNorm
from mii.layers.one_row import OneRowLayer, fits_one_row
from mii.layers.rotary import RotaryEmbedding
from mii.models.spec import DecoderSpec


@dataclass(frozen=True)
class DecoderLayer:
    """One layer. The post norms are Gemma's: on each block's output, before it is added."""

    rotary: int | None  # index into the decoder's rotaries
    attention_norm: RMSNorm
    attention: AttentionBlock
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP
    mlp_post_norm: RMSNorm | None

    def for_one_row(self) -> OneRowLayer | None:
        """Return what computes this layer for a single row on a GPU, if it can be had."""
        has_post_norms = self.attention_post_norm is not None or self.mlp_post_norm is not None
        if has_post_norms or not fits_one_row(self.attention, self.mlp):
            return None
        return OneRowLayer(self.attention_norm, self.attention, self.mlp_norm, self.mlp)


class Decoder:
    """One rank's share of a decoder-only transformer, with its KV cache.

    Args:
        spec: the whole model.
        embedding: [vocabulary, hidden]
        layers, final_norm, head, rotaries: the parts.
        backend: attends, and holds the cache.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: VocabularyHead,
        rotaries: Sequence[RotaryEmbedding],
        backend: AttentionBackend,
    ) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.max_length = spec.max_length
        self.head_dim = spec.head_dim
        self.static_length = spec.static_length
        self.dtype, self.device = embedding.dtype, embedding.device
        self._embedding = embedding
        # Rounded to the weights' dtype, as transformers does.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self.dtype))
        self._layers = tuple(layers)
        self._one_row_layers: tuple[OneRowLayer, ...] = ()  # none, or one for each layer
        self._final_norm = final_norm
        self._head = head
        self._rotaries = tuple(rotaries)
        self._backend = backend

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Return the bytes that one block takes on this rank, all layers together."""
        return bytes_per_block(self._cache_shape(1, block_size), self.dtype)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make room for the keys and values of `num_blocks` blocks."""
        self._backend.allocate(self._cache_shape(num_blocks, block_size), self.dtype, self.device)

    def fuse_single_rows(self) -> bool:
        """Have batches of one token computed by fused Triton kernels; False if a layer forbids it.

        One sequence's decode steps wait for nothing but the weights, and for every kernel's launch.
        """
        layers = [layer.for_one_row() for layer in self._layers]
        self._one_row_layers = tuple(layer for layer in layers if layer is not None)
        if len(self._one_row_layers) < len(layers):
            self._one_row_layers = ()
        return bool(self._one_row_layers)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Return logits [L, vocabulary] of `batch.logits_rows`; updates the cache."""
        residual = F.embedding(batch.token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        rotaries = [r(batch.positions, batch.rope_lengths, self.dtype) for r in self._rotaries]
        self._backend.plan(batch)
        if len(residual) == 1 and self._one_row_layers:
            x = self._through_one_row_layers(residual, rotaries, batch.logits_rows)
        else:
            x = self._through_layers(residual, rotaries, batch.logits_rows)
        logits = self._head(x)
        if self.spec.logit_softcap is not None:
            cap = self.spec.logit_softcap
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _through_layers(
        self, residual: torch.Tensor, rotaries: Sequence[Rotary], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the normalised hidden states of these rows after all layers."""
        update = None
        for layer in self._layers:
            if update is None:
                x = layer.attention_norm(residual)
            else:
                x, residual = layer.attention_norm.add(update, residual)
            rotary = rotaries[layer.rotary] if layer.rotary is not None else None
            update = layer.attention(x, rotary, self._backend)
            if layer.attention_post_norm is not None:
                update = layer.attention_post_norm(update)
            x, residual = layer.mlp_norm.add(update, residual)
            update = layer.mlp(x)
            if layer.mlp_post_norm is not None:
                update = layer.mlp_post_norm(update)

        assert update is not None
        if rows is not None:
            update, residual = update[rows], residual[rows]
        return self._final_norm.add(update, residual)[0]

    def _through_one_row_layers(
        self, residual: torch.Tensor, rotaries: Sequence[Rotary], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Do what `_through_layers` does, for [1, hidden]."""
        for layer, fused in zip(self._layers, self._one_row_layers, strict=True):
            rotary = rotaries[layer.rotary] if layer.rotary is not None else None
            residual = fused(residual, rotary, self._backend)
        return self._final_norm(residual if rows is None else residual[rows])

    def _cache_shape(self, num_blocks: int, block_size: int) -> KVCacheShape:
        heads = self._layers[0].attention.layer.num_kv_heads
        layers = len(self._layers)
        return KVCacheShape(layers, num_blocks, block_size, heads, self.spec.head_dim)
