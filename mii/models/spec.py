"""What a decoder-only model is, as data: a family's policy fills this in, the decoder reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mii.errors import UnsupportedModel
from mii.layers.rotary_spec import RotarySpec


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


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rotary: int | None  # index into DecoderSpec.rotaries; None: no position embedding
    window: int | None  # a token sees itself and the window - 1 tokens before it; None: all


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. Sizes are of the whole model, before tensor parallelism."""

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
