"""Reads a checkpoint's tensors by name, whichever files they are in."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mii.errors import ModelError
from mii.models.checkpoint import WeightIndex, find_weights


class WeightFiles:
    """The tensors of a folder in Hugging Face form. Files are opened when first read, and mapped
    into memory, so that a slice of a tensor costs only what it holds.

    Args:
        folder: holds the weights; `find_weights` says which files count.

    Raises:
        ModelError: if there are none.
    """

    def __init__(self, folder: Path) -> None:
        self._index: WeightIndex = find_weights(folder)
        self._open: dict[Path, Any] = {}
        self._file_of = dict(self._index.file_of)
        for path in self._index.files:
            if path not in self._file_of.values():
                self._file_of.update(dict.fromkeys(self._names_in(path), path))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored.

        Raises:
            ModelError: naming the file, if it cannot be read.
        """
        path = self._file_of[name]
        try:
            file = self._opened(path)
            if isinstance(file, dict):
                tensor: torch.Tensor = file[name]
            else:
                tensor = file.get_tensor(name)
        except (KeyError, SafetensorError) as error:
            raise ModelError(f"{path} does not hold the tensor {name!r}: {error}") from error
        return tensor

    def _names_in(self, path: Path) -> list[str]:
        return list(self._opened(path).keys())

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]


def _open(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} holds more than tensors, and loading it could run code: it is refused; "
            f"convert it to safetensors ({str(error).splitlines()[0]})"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not tensors by name")
    return content
