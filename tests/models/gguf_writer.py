"""Writes tiny GGUF files, and folders of tiny models, for tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

QUANTIZATION = gguf.GGMLQuantizationType

# How llama.cpp's converter names a layer's parts. Written down apart from mii's own table.
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GENERAL = ("general.", "tokenizer.", "split.")
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Train a small byte-level BPE; return its tokens by id and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (
        "It's 1234567 o'clock: the cats' thin things, \n\n  thinking of 12:30.   naïve café 日本語"
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return vocabulary, [" ".join(merge) for merge in merges]


def tokenizer_metadata(size: int, pre: str) -> dict[str, Any]:
    """A byte-level vocabulary of `size` tokens, as llama.cpp's converter writes it."""
    tokens, merges = byte_level_vocabulary(size - 8)
    types = [3] * 3 + [1] * (len(tokens) - 3)
    for number in range(len(tokens), size):  # the converter's filler
        tokens.append(f"[PAD{number}]")
        types.append(5)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    pre: str = "gpt-2",
    quantization: QUANTIZATION | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> None:
    """Write a model of transformers as llama.cpp's converter would.

    Args:
        path: the file.
        model: of the llama, qwen2, qwen3 or gemma3 family.
        architecture: GGUF's name of the family.
        pre: the kind of pre-tokenizer.
        quantization: of the matrices; None: float32.
        metadata: further or other values; None takes one away.
        tensors: further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": getattr(config, "head_dim", None),
    }
    if architecture == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
        values["rope.freq_base"] = config.rope_parameters["full_attention"]["rope_theta"]
    else:
        values["rope.freq_base"] = config.rope_parameters["rope_theta"]
    values = {f"{architecture}.{key}": value for key, value in values.items()}
    given = {
        key if key.startswith(_GENERAL) else f"{architecture}.{key}": value
        for key, value in (metadata or {}).items()
    }
    for key, value in {**values, **tokenizer_metadata(config.vocab_size, pre), **given}.items():
        _add(writer, key, value)
    for name, tensor in {**_gguf_tensors(model, architecture), **(tensors or {})}.items():
        quantized = quantization if tensor.ndim > 1 else None
        if quantized is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if key == "general.architecture":
        writer.kv_data[0].pop(key)
    if value is not None:
        kinds[type(value)](key, value)


def _gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    parts = {**_PARTS, **(_GEMMA_NORMS if architecture == "gemma3" else _LLAMA_NORMS)}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    for name, tensor in model.state_dict().items():
        array = tensor.detach().numpy()
        stem, _, kind = name.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if stem in top:
            target = top[stem]
        else:
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            target = f"blk.{layer}.{parts[part]}"
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
            if architecture == "llama" and target.endswith(("attn_q", "attn_k")):
                array = _interleave(array, heads[target[-1]])
        if architecture == "gemma3" and target.endswith("norm"):
            array = array + np.float32(1)
        found[f"{target}.{kind}"] = array
    return found


def _interleave(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp rotates neighbouring rows, transformers rows half a head apart."""
    size = array.shape[0] // heads
    order = [
        head * size + half * (size // 2) + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in range(2)
    ]
    return array[order]


def header(version: int = 3, tensors: int = 0, values: int = 0, magic: bytes = b"GGUF") -> bytes:
    """The beginning of a GGUF file."""
    return magic + struct.pack("<IQQ", version, tensors, values)


def string(text: str) -> bytes:
    """A string of a GGUF file."""
    return struct.pack("<Q", len(text.encode())) + text.encode()
