"""GGUF architectures and what they are called in Hugging Face form: config.json, tensor names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mii.errors import ModelError, UnsupportedModel
from mii.models.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's frequency factors; config.json states them instead

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_ATTENTION = _QKV | {"attn_output"}
_MLP = frozenset({"ffn_gate", "ffn_up", "ffn_down"})


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture is spelled in Hugging Face form."""

    model_type: str
    class_name: str
    layer_names: dict[str, str]  # a layer's parts; each has a weight
    biases: tuple[frozenset[str], ...] = (frozenset(),)  # the sets of parts that may have a bias
    interleaved: bool = False  # rows of q and k are reordered for llama.cpp's rotary embedding
    norm_offset: float = 0.0  # what llama.cpp has added to the norms' weights


_ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        _LAYER,
        biases=(frozenset(), _ATTENTION, _MLP, _ATTENTION | _MLP),
        interleaved=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER, biases=(_QKV,)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORMS),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LAYER
        | _QK_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
}


def find_architecture(file: GGUFFile) -> Architecture:
    """Return the file's architecture.

    Raises:
        UnsupportedModel: if there is no code for it, or the file is a part of a model.
    """
    name = file.value("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} holds the architecture {name!r}; supported GGUF architectures are "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    if file.value("split.count", int, 1) > 1:
        raise UnsupportedModel(
            f"{file.path} is one part of a split model: join the parts with "
            "`llama-gguf-split --merge` first"
        )
    return _ARCHITECTURES[name]


def tensor_targets(file: GGUFFile, architecture: Architecture) -> dict[str, str]:
    """Map each GGUF tensor that is to be converted to its name in Hugging Face form.

    Raises:
        ModelError: if a tensor is missing.
        UnsupportedModel: if there is one that this architecture has no place for.
    """
    biased = frozenset(
        name.split(".")[2] for name in file.tensors if name.startswith("blk.0.") and ".bias" in name
    )
    if biased not in architecture.biases:
        raise UnsupportedModel(
            f"{file.path}: biases of {', '.join(sorted(biased)) or 'nothing'} are not what "
            f"a {architecture.model_type} model has"
        )
    targets = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _TOP.items()}
    # No more layers than there are tensors: a damaged count may be in the billions.
    for layer in range(min(hyperparameter(file, "block_count", int), len(file.tensors))):
        for ours, theirs in architecture.layer_names.items():
            targets[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
            if ours in biased:
                targets[f"blk.{layer}.{ours}.bias"] = f"model.layers.{layer}.{theirs}.bias"
    if "output.weight" not in file.tensors:  # tied to the embedding
        del targets["output.weight"]
    missing = [name for name in targets if name not in file.tensors]
    if missing:
        raise ModelError(f"{file.path}: the tensor {missing[0]} is missing")
    unknown = [name for name in file.tensors if name not in targets and name != ROPE_FACTORS]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: a {architecture.model_type} model has no place for the tensor "
            f"{unknown[0]}"
        )
    return targets


def hyperparameter(file: GGUFFile, key: str, kind: type, default: Any = None) -> Any:
    """Return `<architecture>.<key>`; a list by layer must say the same throughout.

    Raises:
        ModelError: if it is missing or has another type.
        UnsupportedModel: if it differs from layer to layer.
    """
    key = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(key)
    if not isinstance(value, list):
        return file.value(key, kind, default)
    if len(set(value)) != 1 or not isinstance(value[0], kind):
        raise UnsupportedModel(f"{file.path}: {key} differs from layer to layer")
    return value[0]


def build_config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        ModelError, UnsupportedModel: if the file says too little, or something unheard of.
    """
    heads, hidden, head_dim = head_sizes(file)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": hyperparameter(file, "feed_forward_length", int),
        "num_hidden_layers": hyperparameter(file, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": hyperparameter(file, "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(hyperparameter(file, "attention.layer_norm_rms_epsilon", float)),
        "max_position_embeddings": hyperparameter(file, "context_length", int),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int):
            config[f"{role}_token_id"] = index
    family = _gemma3 if architecture.model_type == "gemma3_text" else _llama_like
    return config | family(file)


def head_sizes(file: GGUFFile) -> tuple[int, int, int]:
    """Return the number of attention heads, the hidden size, and the size of a head.

    Raises:
        ModelError: if they are missing or cannot be.
    """
    heads = hyperparameter(file, "attention.head_count", int)
    hidden = hyperparameter(file, "embedding_length", int)
    if not 0 < heads <= hidden:
        raise ModelError(f"{file.path}: {heads} attention heads in a hidden size of {hidden}")
    return heads, hidden, hyperparameter(file, "attention.key_length", int, hidden // heads)


def _llama_like(file: GGUFFile) -> dict[str, Any]:
    config: dict[str, Any] = {"hidden_act": "silu", "rope_parameters": _rope(file)}
    if file.metadata["general.architecture"] != "qwen2":  # whose biases need no mention
        config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return config


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    heads, hidden, head_dim = head_sizes(file)
    layers = hyperparameter(file, "block_count", int)
    period = hyperparameter(file, "attention.sliding_window_pattern", int, 6)
    local_theta = hyperparameter(file, "rope.freq_base_swa", float, 10_000.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": hyperparameter(file, "attention.sliding_window", int),
        # Gemma 3 27B, the one of 62 layers, scales by hidden / heads; GGUF does not say so.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        "layer_types": [
            "sliding_attention" if (layer + 1) % period else "full_attention"
            for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": _rope(file),
            "sliding_attention": {"rope_type": "default", "rope_theta": _decimal(local_theta)},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _rope(file: GGUFFile) -> dict[str, Any]:
    """Return transformers' rope_parameters."""
    theta = _decimal(hyperparameter(file, "rope.freq_base", float, 10_000.0))
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta)
    kind = hyperparameter(file, "rope.scaling.type", str, "none")
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path}: rope scaling of type {kind!r} is not known")
    parameters |= {
        "rope_type": kind,
        "factor": _decimal(hyperparameter(file, "rope.scaling.factor", float)),
    }
    if kind == "yarn":
        original = hyperparameter(file, "rope.scaling.original_context_length", int)
        parameters["original_max_position_embeddings"] = original
    return parameters


def _llama3_rope(file: GGUFFile, theta: float) -> dict[str, Any]:
    """Find the parameters behind Llama 3's stored frequency factors, which name none."""
    factors = file.read_tensor(ROPE_FACTORS)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = [2 * math.pi * theta ** (index / len(factors)) for index in range(len(factors))]
    expected = [_llama3_factor(wavelength, parameters) for wavelength in wavelengths]
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModel(
            f"{file.path}: the frequency factors in {ROPE_FACTORS} are not those of Llama 3"
        )
    return parameters


def _llama3_factor(wavelength: float, parameters: dict[str, Any]) -> float:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] / wavelength
    blend = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(1 / ((1 - blend) / parameters["factor"] + blend))


def _decimal(value: float) -> float:
    """Return the short decimal that a float32 stands for: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")
