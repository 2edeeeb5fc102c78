"""Tiny random models of transformers, of every family, and their weights as mii sees them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from mii.attention.base import AttentionBackend
from mii.models.decoder import Decoder
from mii.models.loader import CheckpointWeights, build_decoder
from mii.models.policies import policy_for
from mii.parallel.group import ParallelGroup, SingleRank

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-small": LlamaConfig(
        **{
            **SIZES,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    ),
    "llama-tied": LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-mha": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama-mqa": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama-linear": LlamaConfig(**SIZES, **rope("linear", factor=4.0)),
    "llama-dynamic": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 40}, **rope("dynamic", factor=2.0)
    ),
    "llama-yarn": LlamaConfig(
        **SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-yarn-mscale": LlamaConfig(
        **SIZES,
        **rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=0.9,
            beta_fast=16.0,
            truncate=False,
        ),
    ),
    "llama-longrope": LlamaConfig(
        **SIZES, **rope("longrope", factor=4.0, original_max_position_embeddings=32, **_FACTORS)
    ),
    "llama-llama3": LlamaConfig(
        **SIZES,
        **rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-gelu": LlamaConfig(**SIZES, hidden_act="gelu"),
    "mistral": MistralConfig(**SIZES, sliding_window=32),
    "mistral-full": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-tied": Qwen3Config(**{**SIZES, "tie_word_embeddings": True}),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 6},
        sliding_window=24,
        query_pre_attn_scalar=20,
        final_logit_softcapping=15.0,
    ),
}


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model of transformers, fp32, with biases and norms that are not trivial."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        scale = 0.1 if parameter_name.endswith(("bias", "norm.weight", "layernorm.weight")) else 0.2
        parameter.data += scale * torch.randn_like(parameter)
    return model


class ModelTensors:
    """A model's parameters as a checkpoint would hold them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = dict(model.state_dict())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def decoder_of(
    model: PreTrainedModel,
    group: ParallelGroup | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    backend: AttentionBackend | None = None,
) -> Decoder:
    """Return mii's decoder with the weights of a model of transformers."""
    policy = policy_for(model.config.model_type)
    return build_decoder(
        policy.spec(model.config),
        policy.names,
        CheckpointWeights(ModelTensors(model)),
        dtype=dtype,
        device=device or torch.device("cpu"),
        group=group or SingleRank(),
        backend=backend,
    )
