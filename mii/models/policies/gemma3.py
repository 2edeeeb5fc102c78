"""Gemma 3, text: sliding and full layers with rotaries of their own, norms after each block too."""

from __future__ import annotations

from typing import Any

from mii.errors import UnsupportedModel
from mii.models.policies.base import ParameterNames, Policy, rotary_spec, windows_of
from mii.models.spec import Activation, DecoderSpec, LayerSpec


def gemma3_spec(config: Any) -> DecoderSpec:
    """Read a Gemma3TextConfig."""
    if config.use_bidirectional_attention:
        raise UnsupportedModel("config.json has use_bidirectional_attention: not a causal model")
    kinds = ("full_attention", "sliding_attention")
    rotaries = [rotary_spec(config, config.rope_parameters[k], config.head_dim) for k in kinds]
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=Activation.of(config.hidden_activation),
        layers=tuple(
            LayerSpec(rotary=kinds.index(kind), window=window)
            for kind, window in zip(config.layer_types, windows_of(config), strict=True)
        ),
        rotaries=tuple(rotaries),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        tied_head=config.tie_word_embeddings,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=config.hidden_size**0.5,
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
    )


POLICY = Policy(
    gemma3_spec,
    ParameterNames(
        attention_post_norm="model.layers.{}.post_attention_layernorm.weight",
        mlp_norm="model.layers.{}.pre_feedforward_layernorm.weight",
        mlp_post_norm="model.layers.{}.post_feedforward_layernorm.weight",
    ),
)
