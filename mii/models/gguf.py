"""Converts a GGUF file into a folder in Hugging Face form.

What llama.cpp's converter changes is changed back: q and k rows of llama are interleaved for its
rotary embedding, and Gemma's norms are stored as 1 + weight. Weights become float32, which holds
the dequantised values exactly. No model is instantiated and torch is not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mii.errors import ModelError
from mii.models.cache import build_folder_once
from mii.models.gguf_architectures import (
    Architecture,
    build_config,
    find_architecture,
    head_sizes,
    hyperparameter,
    tensor_targets,
)
from mii.models.gguf_file import GGUFFile
from mii.models.gguf_tokenizer import build_tokenizer
from mii.models.progress import Progress

Weights = np.ndarray[Any, np.dtype[np.float32]]

SHARD_BYTES = 2 * 1024**3  # what conversion holds in memory at most, beside one tensor
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>")


def cached_gguf(path: Path, cache: Path, progress: Progress) -> Path:
    """Return the cache's folder for a GGUF file, converting it on first use.

    The folder belongs to this path, size and modification time: a changed file is converted anew.

    Raises:
        ModelError: as `convert_gguf`.
    """
    path = path.resolve()
    try:
        state = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    identity = f"{path}\0{state.st_size}\0{state.st_mtime_ns}"
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = cache / "models" / "gguf" / f"{path.stem}-{key}"
    convert_gguf(path, folder, progress)
    return folder


def convert_gguf(path: Path, out: Path, progress: Progress) -> None:
    """Convert a GGUF file into the folder `out`, which is whole or absent whatever happens.

    Does nothing if `out` is there. Several processes may do this at once: one does the work.

    Raises:
        ModelError: if the file is cut off, damaged or no GGUF file, or the disk is full.
        UnsupportedModel: for an architecture, tokenizer or quantisation there is no code for.
    """
    if out.is_dir():
        return
    conversion = Conversion(path)
    build_folder_once(
        out,
        conversion.bytes_needed,
        lambda folder: conversion.write(folder, progress),
        progress,
    )


class Conversion:
    """A GGUF file that has been judged fit for conversion, from its header alone.

    Raises:
        ModelError, UnsupportedModel: as `convert_gguf`.
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.architecture: Architecture = find_architecture(self.file)
        self.targets = tensor_targets(self.file, self.architecture)
        self.config = build_config(self.file, self.architecture)

    @property
    def bytes_needed(self) -> int:
        """Size of the weights as they are written."""
        return sum(4 * math.prod(self.file.tensors[name].shape) for name in self.targets)

    def write(self, folder: Path, progress: Progress, shard_bytes: int = SHARD_BYTES) -> None:
        """Fill an empty folder, the weights in files of `shard_bytes` unless one tensor is larger.

        Raises:
            ModelError, UnsupportedModel: as `convert_gguf`.
        """
        progress(f"converting the tokenizer of {self.file.path.name}", None)
        tokenizer, tokenizer_config = build_tokenizer(self.file.metadata, self.file.path)
        tokenizer_config["model_max_length"] = self.config["max_position_embeddings"]
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config)
        _write_json(folder / "config.json", self.config)
        _write_json(folder / "generation_config.json", self._generation_config(tokenizer))
        template = self.file.metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write_weights(folder, self._tensors(progress), shard_bytes)

    def _generation_config(self, tokenizer: Any) -> dict[str, Any]:
        """A chat turn ends with a token of its own, which base models' files do not mention."""
        ends = [self.config.get("eos_token_id")]
        ends.append(self.file.metadata.get("tokenizer.ggml.eot_token_id"))
        ends += [tokenizer.token_to_id(text) for text in _TURN_ENDS]
        ids = list(dict.fromkeys(index for index in ends if isinstance(index, int)))
        config = {"bos_token_id": self.config.get("bos_token_id"), "eos_token_id": ids or None}
        config["pad_token_id"] = self.config.get("pad_token_id")
        return {key: value for key, value in config.items() if value is not None}

    def _tensors(self, progress: Progress) -> Iterator[tuple[str, Weights]]:
        done = 0
        for name, target in self.targets.items():
            weights = self._restore(name, self.file.read_tensor(name))
            yield target, np.ascontiguousarray(weights)
            done += weights.nbytes
            progress(f"converting {self.file.path.name}", done / self.bytes_needed)

    def _restore(self, name: str, weights: Weights) -> Weights:
        """Undo what llama.cpp's converter did to a tensor."""
        part = name.split(".")[-2]
        if self.architecture.norm_offset and part.endswith("norm"):
            return weights - np.float32(self.architecture.norm_offset)
        if self.architecture.interleaved and part in ("attn_q", "attn_k"):
            heads, _, head_dim = head_sizes(self.file)
            if part == "attn_k":
                heads = hyperparameter(self.file, "attention.head_count_kv", int, heads)
            if weights.shape[0] != heads * head_dim or head_dim % 2:
                raise ModelError(
                    f"{self.file.path}: tensor {name} has {weights.shape[0]} rows; {heads} heads "
                    f"of {head_dim} were expected"
                )
            pairs = weights.reshape(heads, head_dim // 2, 2, *weights.shape[1:])
            return pairs.swapaxes(1, 2).reshape(weights.shape)
        return weights


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Weights]], shard_bytes: int) -> None:
    """Write model.safetensors, or several files and their index where that would be too large."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    shard: dict[str, Weights] = {}
    total = 0

    def flush() -> None:
        path = folder / f"model-{len(shards)}.safetensors"
        save_file(shard, path, {"format": "pt"})
        shutil.copymode(folder / "config.json", path)  # save_file's is for the owner alone
        shards.append(list(shard))
        shard.clear()

    for name, weights in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + weights.nbytes > shard_bytes:
            flush()
        shard[name] = weights
        total += weights.nbytes
    flush()
    if len(shards) == 1:
        (folder / "model-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"model-{number}.safetensors").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
