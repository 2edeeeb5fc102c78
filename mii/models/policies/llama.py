"""Llama 1 to 3, and what shares their architecture (SmolLM2 among them)."""

from __future__ import annotations

from typing import Any

from mii.models.policies.base import ParameterNames, Policy, head_dim_of, rotary_spec
from mii.models.spec import Activation, DecoderSpec, LayerSpec


def llama_spec(config: Any) -> DecoderSpec:
    """Read a LlamaConfig; other families change what differs."""
    head_dim = head_dim_of(config)
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=Activation.of(config.hidden_act),
        layers=(LayerSpec(rotary=0, window=None),) * config.num_hidden_layers,
        rotaries=(rotary_spec(config, config.rope_parameters, head_dim),),
        attention_scale=head_dim**-0.5,
        tied_head=config.tie_word_embeddings,
        qkv_bias=getattr(config, "attention_bias", False),
        output_bias=getattr(config, "attention_bias", False),
        mlp_bias=getattr(config, "mlp_bias", False),
    )


POLICY = Policy(llama_spec, ParameterNames())
