"""Qwen 3: Llama with a norm on each head of q and k, and sliding windows on some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mii.models.policies.base import ParameterNames, Policy, windows_of
from mii.models.policies.llama import llama_spec
from mii.models.spec import DecoderSpec, LayerSpec


def qwen3_spec(config: Any) -> DecoderSpec:
    """Read a Qwen3Config."""
    layers = tuple(LayerSpec(rotary=0, window=window) for window in windows_of(config))
    return replace(llama_spec(config), layers=layers, qk_norm=True)


POLICY = Policy(qwen3_spec, ParameterNames())
