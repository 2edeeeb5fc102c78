"""Which rotary position embedding a model has, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    """How a rotary embedding's frequencies are scaled, by transformers' `rope_type`."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LONGROPE = "longrope"
    LLAMA3 = "llama3"


@dataclass(frozen=True)
class RotarySpec:
    """One rotary position embedding (Su et al., RoFormer; scaling as in transformers)."""

    kind: RopeKind
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    max_positions: int  # max_position_embeddings of the config
    # Fields of transformers' rope_parameters; each is read by the kinds that have it.
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def static_length(self) -> int | None:
        """Sequence length up to which the frequencies do not depend on it; None: they never do."""
        if self.kind is RopeKind.DYNAMIC:
            return self.max_positions
        if self.kind is RopeKind.LONGROPE:
            return self.original_max_positions or self.max_positions
        return None
