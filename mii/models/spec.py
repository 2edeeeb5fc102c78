"""What a decoder-only model is, as data: a family's policy fills this in, the decoder reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mii.errors import UnsupportedModel


class Activation(Enum):
    """Activation of the gated MLP, by transformers' name."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"

    @staticmethod
    def of(name: str) -> Activation:
        """Return the activation of this name.

        Raises:
            UnsupportedModel: for a name that there is no code for.
        """
        try:
            return Activation(name)
        except ValueError:
            known = ", ".join(activation.value for activation in Activation)
            raise UnsupportedModel(
                f"config.json asks for the activation {name!r}, which is not supported: known "
                f"are {known}"
            ) from None


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


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rotary: int | None  # index into DecoderSpec.rotaries; None: no position embedding
    window: int | None  # a token sees itself and the window - 1 tokens before it; None: all


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. Sizes are of the whole model, before tensor parallelism."""

    family: str  # transformers' model_type, for messages only
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int  # prompt + new tokens at most
    norm_eps: float
    activation: Activation
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[RotarySpec, ...]
    attention_scale: float  # factor on q . k
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotary embedding
    norm_offset: float = 0.0  # RMSNorm multiplies by (offset + weight); 1 in Gemma
    post_norms: bool = False  # a further RMSNorm on the attention's and the MLP's output (Gemma)
    embedding_scale: float = 1.0  # rounded to the model's dtype before use
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    @property
    def static_length(self) -> int | None:
        """Length up to which cached keys depend on nothing but the tokens before them."""
        limits = [r.static_length for r in self.rotaries if r.static_length is not None]
        return min(limits) if limits else None
