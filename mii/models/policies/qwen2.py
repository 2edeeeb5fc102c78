"""Qwen 2 and 2.5: Llama with biases on q, k and v, and sliding windows on some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mii.models.policies.base import ParameterNames, Policy, windows_of
from mii.models.policies.llama import llama_spec
from mii.models.spec import DecoderSpec, LayerSpec


def qwen2_spec(config: Any) -> DecoderSpec:
    """Read a Qwen2Config."""
    layers = tuple(LayerSpec(rotary=0, window=window) for window in windows_of(config))
    return replace(llama_spec(config), layers=layers, qkv_bias=True, output_bias=False)


POLICY = Policy(qwen2_spec, ParameterNames())
