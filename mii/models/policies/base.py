"""What a family's policy says: the shape of the model, and what its parameters are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mii.errors import UnsupportedModel
from mii.layers.rotary_spec import RopeKind, RotarySpec
from mii.models.spec import DecoderSpec


@dataclass(frozen=True)
class ParameterNames:
    """Names in the checkpoint. `{}` stands for the layer's index."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attention_norm: str = "model.layers.{}.input_layernorm.weight"
    query: str = "model.layers.{}.self_attn.q_proj"  # with .weight and, if there is one, .bias
    key: str = "model.layers.{}.self_attn.k_proj"
    value: str = "model.layers.{}.self_attn.v_proj"
    output: str = "model.layers.{}.self_attn.o_proj"
    query_norm: str = "model.layers.{}.self_attn.q_norm.weight"
    key_norm: str = "model.layers.{}.self_attn.k_norm.weight"
    attention_post_norm: str = ""
    mlp_norm: str = "model.layers.{}.post_attention_layernorm.weight"
    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    down: str = "model.layers.{}.mlp.down_proj"
    mlp_post_norm: str = ""


@dataclass(frozen=True)
class Policy:
    """One family."""

    spec: Callable[[Any], DecoderSpec]  # from transformers' configuration object
    names: ParameterNames


def rotary_spec(config: Any, parameters: Mapping[str, Any], rotary_dim: int) -> RotarySpec:
    """Read one entry of transformers' `rope_parameters`.

    Raises:
        UnsupportedModel: for a kind of scaling that there is no code for.
    """
    name = parameters.get("rope_type", "default")
    try:
        kind = RopeKind(name)
    except ValueError:
        known = ", ".join(k.value for k in RopeKind)
        raise UnsupportedModel(
            f"config.json asks for rope_type {name!r}, which is not supported: known are {known}"
        ) from None
    original = parameters.get("original_max_position_embeddings")
    factor = parameters.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / original if original else 1.0
    return RotarySpec(
        kind=kind,
        theta=float(parameters["rope_theta"]),
        rotary_dim=rotary_dim,
        max_positions=config.max_position_embeddings,
        factor=float(factor),
        original_max_positions=original,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        attention_factor=parameters.get("attention_factor"),
        truncate=bool(parameters.get("truncate", True)),
        short_factor=tuple(parameters.get("short_factor") or ()),
        long_factor=tuple(parameters.get("long_factor") or ()),
    )


def head_dim_of(config: Any) -> int:
    """Return the size of one attention head."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window, where `layer_types` says which layers slide."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"config.json has layer_types {sorted(unknown)}: not supported")
    return tuple(config.sliding_window if t == "sliding_attention" else None for t in types)
