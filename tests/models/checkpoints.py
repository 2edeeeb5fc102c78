"""Folders of tiny models, and ways to spoil them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Header = dict[str, Any]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def shard(folder: Path, *, stale: str | None = None) -> dict[str, str]:
    """Split model.safetensors in two; with `stale`, the wrong shard holds zeros of that name too.

    Returns:
        The index's weight_map.
    """
    tensors = tensors_of(folder)
    names = sorted(tensors)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: files[index % 2] for index, name in enumerate(names)}
    for file in files:
        content = {name: tensors[name] for name in names if weight_map[name] == file}
        if stale and weight_map[stale] != file:
            content[stale] = torch.zeros_like(tensors[stale])
        save_file(content, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def edit_header(path: Path, edit: Callable[[Header], None]) -> None:
    """Change the header of a safetensors file, and leave its data."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    edit(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
