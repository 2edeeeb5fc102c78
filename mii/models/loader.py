"""Builds one rank's decoder out of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mii.attention.base import AttentionBackend, AttentionLayer, HeadNorms
from mii.attention.cpu import CPUAttention
from mii.errors import ModelError
from mii.layers.attention import AttentionBlock
from mii.layers.linear import ColumnLinear, RowLinear, VocabularyHead
from mii.layers.mlp import GatedMLP
from mii.layers.norm import RMSNorm
from mii.layers.rotary import RotaryEmbedding
from mii.models.decoder import Decoder, DecoderLayer
from mii.models.policies import policy_for
from mii.models.policies.base import ParameterNames
from mii.models.progress import Progress, silent
from mii.models.spec import DecoderSpec
from mii.models.weights import WeightFiles
from mii.parallel.group import ParallelGroup
from mii.parallel.sharding import HeadShard, shard_heads, split, widths


class WeightSource(Protocol):
    """Where a decoder's parameters come from."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a whole parameter, on any device and in any dtype.

        Raises:
            ModelError: if it is not there or has another shape.
        """
        ...


class TensorStore(Protocol):
    """What holds a checkpoint's tensors by name: WeightFiles, or a plain dict around tensors."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class CheckpointWeights:
    """Parameters of a checkpoint."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._store:
            # A checkpoint of the bare decoder, saved without its head, has no such prefix.
            bare = name.removeprefix("model.")
            if bare not in self._store:
                raise ModelError(f"the checkpoint has no tensor {name!r}")
            name = bare
        tensor = self._store.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name!r} has shape {list(tensor.shape)}, but config.json means "
                f"{list(shape)}"
            )
        return tensor


class RandomWeights:
    """Parameters drawn from normal(0, 0.02), norms of ones: a model to measure, not to read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, device=self._device)
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02)


@dataclass(frozen=True)
class _Loader:
    """Reads the parts of a decoder that one rank holds."""

    spec: DecoderSpec
    names: ParameterNames
    source: WeightSource
    group: ParallelGroup
    dtype: torch.dtype
    device: torch.device

    def whole(self, name: str, *shape: int) -> torch.Tensor:
        """Return a parameter as it is stored."""
        return self.source.read(name, shape)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the model's dtype on its device."""
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()

    def norm(self, name: str, size: int) -> RMSNorm:
        weight = self.placed(self.whole(name, size))
        return RMSNorm(weight, self.spec.norm_eps, self.spec.norm_offset)

    def optional_norm(self, name: str, size: int, wanted: bool) -> RMSNorm | None:
        return self.norm(name, size) if wanted else None

    def decoder(self, backend: AttentionBackend, progress: Progress) -> Decoder:
        spec = self.spec
        embedding = self.placed(self.whole(self.names.embedding, spec.vocab_size, spec.hidden_size))
        layers = []
        for index in range(len(spec.layers)):
            progress("loading weights", index / len(spec.layers))
            layers.append(self.layer(index))
        rotaries = [RotaryEmbedding(rotary, self.device) for rotary in spec.rotaries]
        final_norm = self.norm(self.names.final_norm, spec.hidden_size)
        progress("loading weights", 1.0)
        head = self.head(embedding)
        decoder = Decoder(spec, embedding, layers, final_norm, head, rotaries, backend)
        if self.device.type == "cuda":
            decoder.fuse_single_rows()
        return decoder

    def head(self, embedding: torch.Tensor) -> VocabularyHead:
        spec = self.spec
        start, end = split(spec.vocab_size, self.group.rank, self.group.size)
        if spec.tied_head:
            weight = embedding[start:end]
        else:
            whole = self.whole(self.names.head, spec.vocab_size, spec.hidden_size)
            weight = self.placed(whole[start:end])
        return VocabularyHead(weight, widths(spec.vocab_size, self.group.size), self.group)

    def layer(self, index: int) -> DecoderLayer:
        spec, names, hidden = self.spec, self.names, self.spec.hidden_size
        post = spec.post_norms
        return DecoderLayer(
            rotary=spec.layers[index].rotary,
            attention_norm=self.norm(names.attention_norm.format(index), hidden),
            attention=self.attention(index),
            attention_post_norm=self.optional_norm(
                names.attention_post_norm.format(index), hidden, post
            ),
            mlp_norm=self.norm(names.mlp_norm.format(index), hidden),
            mlp=self.mlp(index),
            mlp_post_norm=self.optional_norm(names.mlp_post_norm.format(index), hidden, post),
        )

    def attention(self, index: int) -> AttentionBlock:
        spec, names = self.spec, self.names
        shard = shard_heads(spec.num_heads, spec.num_kv_heads, self.group.rank, self.group.size)
        rows = _HeadRows(shard, spec.head_dim)
        hidden, dim = spec.hidden_size, spec.head_dim
        parts = [
            (names.query.format(index), spec.num_heads * dim, rows.query),
            (names.key.format(index), spec.num_kv_heads * dim, rows.kv),
            (names.value.format(index), spec.num_kv_heads * dim, rows.kv),
        ]
        weights = [
            self.placed(take(self.whole(f"{n}.weight", out, hidden))) for n, out, take in parts
        ]
        biases = []
        if spec.qkv_bias:
            biases = [self.placed(take(self.whole(f"{n}.bias", out))) for n, out, take in parts]
        name = names.output.format(index)
        stored = self.whole(f"{name}.weight", hidden, spec.num_heads * dim)
        weight = rows.query(stored.t()).t()
        bias = self.whole(f"{name}.bias", hidden) if spec.output_bias else None
        layer = AttentionLayer(
            index=index,
            num_heads=len(shard.query_heads),
            num_kv_heads=len(shard.kv_heads),
            head_dim=dim,
            scale=spec.attention_scale,
            window=spec.layers[index].window,
            softcap=spec.attention_softcap,
            norms=self.head_norms(index) if spec.qk_norm else None,
        )
        output = RowLinear(
            self.placed(weight), None if bias is None else self.placed(bias), self.group
        )
        return AttentionBlock(layer, ColumnLinear(weights, biases), output)

    def head_norms(self, index: int) -> HeadNorms:
        query, key = (
            self.placed(self.whole(name.format(index), self.spec.head_dim))
            for name in (self.names.query_norm, self.names.key_norm)
        )
        return HeadNorms(query, key, self.spec.norm_eps, self.spec.norm_offset)

    def mlp(self, index: int) -> GatedMLP:
        spec, hidden, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        start, end = split(inner, self.group.rank, self.group.size)
        gate, up = self.names.gate.format(index), self.names.up.format(index)
        down = self.names.down.format(index)
        weights = [
            self.placed(self.whole(f"{name}.weight", inner, hidden)[start:end])
            for name in (gate, up)
        ]
        biases, bias = [], None
        if spec.mlp_bias:
            biases = [
                self.placed(self.whole(f"{name}.bias", inner)[start:end]) for name in (gate, up)
            ]
            bias = self.placed(self.whole(f"{down}.bias", hidden))
        weight = self.placed(self.whole(f"{down}.weight", hidden, inner)[:, start:end])
        return GatedMLP(
            ColumnLinear(weights, biases),
            RowLinear(weight, bias, self.group),
            spec.activation.value,
        )


@dataclass(frozen=True)
class _HeadRows:
    """Picks a rank's heads out of the leading dimension of a tensor."""

    shard: HeadShard
    head_dim: int

    def query(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the query heads' rows; zeros where the shard has a gap."""
        return self._take(tensor, self.shard.query_heads)

    def kv(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the key/value heads' rows."""
        return self._take(tensor, self.shard.kv_heads)

    def _take(self, tensor: torch.Tensor, heads: tuple[int | None, ...]) -> torch.Tensor:
        by_head = tensor.unflatten(0, (-1, self.head_dim))
        gap = torch.zeros_like(by_head[0])
        return torch.stack([gap if h is None else by_head[h] for h in heads]).flatten(0, 1)


def attention_backend(device: torch.device) -> AttentionBackend:
    """Return the backend for a device."""
    if device.type == "cuda":
        from mii.attention.triton import TritonAttention  # Triton is not on every machine

        backend: AttentionBackend = TritonAttention()
        return backend
    return CPUAttention()


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: ParallelGroup,
    progress: Progress = silent,
) -> Decoder:
    """Load this rank's share of the model in a folder in Hugging Face form.

    Raises:
        ModelError: naming the file or tensor that is missing or wrong.
        UnsupportedModel: for a family or variant that there is no code for.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    policy = policy_for(config.model_type)
    spec = policy.spec(config)
    weights = CheckpointWeights(WeightFiles(folder))
    loader = _Loader(spec, policy.names, weights, group, dtype, device)
    return loader.decoder(attention_backend(device), progress)


def build_decoder(
    spec: DecoderSpec,
    names: ParameterNames,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: ParallelGroup,
    backend: AttentionBackend | None = None,
) -> Decoder:
    """Build a decoder out of parameters that come from elsewhere than a folder."""
    loader = _Loader(spec, names, source, group, dtype, device)
    return loader.decoder(backend or attention_backend(device), silent)
