"""Frequencies of rotary position embeddings, with every scaling that transformers knows.

The formulas are those of transformers' `modeling_rope_utils`: linear (position interpolation, Chen
et al. 2023), dynamic NTK, YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.
"""

from __future__ import annotations

import math

import torch

from mii.layers.rotary_spec import RopeKind, RotarySpec


class RotaryEmbedding:
    """Gives the cosines and sines of a step's tokens.

    Args:
        spec: kind and parameters.
        device: where the tables live.
    """

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self._spec = spec
        self.scaling = attention_scaling(spec)
        self._frequencies = frequencies(spec).to(device)
        self._long_frequencies = None
        if spec.kind is RopeKind.LONGROPE:
            self._long_frequencies = frequencies(spec, long=True).to(device)

    def __call__(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [tokens, rotary_dim / 2] each, in `dtype`.

        Args:
            positions: int64 [tokens]
            lengths: int64 [tokens], the sequence length that length-dependent kinds assume
        """
        angles = positions[:, None].float() * self._frequencies_for(lengths)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)

    def _frequencies_for(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return [rotary_dim / 2] or [tokens, rotary_dim / 2]."""
        spec = self._spec
        if self._long_frequencies is not None:
            is_long = (lengths > (spec.original_max_positions or spec.max_positions))[:, None]
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        if spec.kind is RopeKind.DYNAMIC:
            longer = lengths.clamp(min=spec.max_positions).double() / spec.max_positions
            growth = spec.factor * longer - (spec.factor - 1)
            base = spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))
            return (1.0 / base[:, None] ** _exponents(spec).double().to(base.device)).float()
        return self._frequencies


def attention_scaling(spec: RotarySpec) -> float:
    """Return the factor on cosines and sines."""
    if spec.attention_factor is not None and spec.kind in (RopeKind.YARN, RopeKind.LONGROPE):
        return spec.attention_factor
    if spec.kind is RopeKind.YARN:
        if spec.mscale and spec.mscale_all_dim:
            return _yarn_scale(spec.factor, spec.mscale) / _yarn_scale(
                spec.factor, spec.mscale_all_dim
            )
        return _yarn_scale(spec.factor, 1.0)
    if spec.kind is RopeKind.LONGROPE and spec.factor > 1.0:
        original = spec.original_max_positions or spec.max_positions
        return math.sqrt(1 + math.log(spec.factor) / math.log(original))
    return 1.0


def frequencies(spec: RotarySpec, *, long: bool = False) -> torch.Tensor:
    """Return fp32 [rotary_dim / 2], in radians per position.

    Args:
        spec: kind and parameters.
        long: of LongRoPE, the frequencies for sequences beyond the original length.
    """
    plain = 1.0 / spec.theta ** _exponents(spec)
    if spec.kind is RopeKind.LINEAR:
        return plain / spec.factor
    if spec.kind is RopeKind.LONGROPE:
        factors = torch.tensor(spec.long_factor if long else spec.short_factor)
        return 1.0 / (factors * spec.theta ** _exponents(spec))
    if spec.kind is RopeKind.LLAMA3:
        return _llama3(spec, plain)
    if spec.kind is RopeKind.YARN:
        return _yarn(spec, plain)
    return plain


def _exponents(spec: RotarySpec) -> torch.Tensor:
    return torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim


def _llama3(spec: RotarySpec, plain: torch.Tensor) -> torch.Tensor:
    original = spec.original_max_positions or spec.max_positions
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > original / spec.low_freq_factor, plain / spec.factor, plain)
    span = spec.high_freq_factor - spec.low_freq_factor
    smooth = (original / wavelengths - spec.low_freq_factor) / span
    between = (1 - smooth) * slowed / spec.factor + smooth * slowed
    is_between = (wavelengths >= original / spec.high_freq_factor) & (
        wavelengths <= original / spec.low_freq_factor
    )
    return torch.where(is_between, between, slowed)


def _yarn(spec: RotarySpec, plain: torch.Tensor) -> torch.Tensor:
    original = spec.original_max_positions or spec.max_positions

    def dimension_of(rotations: float) -> float:
        span = original / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(span) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    positions = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    interpolated = ((positions - low) / (high - low)).clamp(0, 1)
    return plain / spec.factor * interpolated + plain * (1 - interpolated)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
