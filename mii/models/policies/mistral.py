"""Mistral 7B: Llama with one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mii.models.policies.base import ParameterNames, Policy
from mii.models.policies.llama import llama_spec
from mii.models.spec import DecoderSpec, LayerSpec


def mistral_spec(config: Any) -> DecoderSpec:
    """Read a MistralConfig. As in transformers, `layer_types` has no say."""
    layers = (LayerSpec(rotary=0, window=config.sliding_window),) * config.num_hidden_layers
    return replace(llama_spec(config), layers=layers)


POLICY = Policy(mistral_spec, ParameterNames())
