"""Reads a checkpoint's tensors by name, whichever files they are in."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mii.errors import ModelError
from mii.models.weight_index import find_weights


class WeightFiles:
    """The tensors of a folder in Hugging Face form.

    Files are opened when first read, and mapped into memory: of a tensor that is sliced, only the
    slice is read from disk.

    Args:
        folder: holds the weights; `find_weights` says which of its files count.

    Raises:
        ModelError: if there are none.
    """

    def __init__(self, folder: Path) -> None:
        index = find_weights(folder)
        self._folder = folder
        self._opened: dict[Path, _TensorFile] = {}
        self._file_of = dict(index.file_of)
        if not self._file_of:
            for path in index.files:
                self._file_of.update(dict.fromkeys(self._open(path).names(), path))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, on the CPU. It is not to be written to.

        Raises:
            ModelError: naming tensor and file, if it is not there or cannot be read.
        """
        return self._open(self._path_of(name)).tensor(name)

    def _path_of(self, name: str) -> Path:
        if name not in self._file_of:
            raise ModelError(f"the checkpoint in {self._folder} has no tensor {name}")
        return self._file_of[name]

    def _open(self, path: Path) -> _TensorFile:
        if path not in self._opened:
            is_pickle = path.suffix == ".bin"
            self._opened[path] = _PickleFile(path) if is_pickle else _SafetensorsFile(path)
        return self._opened[path]


class _TensorFile(Protocol):
    """One open file."""

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    def names(self) -> list[str]:
        return list(self._file.keys())

    def tensor(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._path} does not hold the tensor {name}: {error}") from error
        return tensor


class _PickleFile:
    """A .bin file. `weights_only` lets no pickle run code: it may hold tensors and little else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # torch before 1.6 wrote plain pickles, which cannot be mapped.
            mapped = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ModelError(
                f"{path} is refused: it is damaged, or holds more than tensors, so that loading it "
                f"could run code. Convert it to safetensors. ({_first_line(error)})"
            ) from error
        except Exception as error:  # a damaged pickle can raise anything
            raise ModelError(f"{path} cannot be read: {_first_line(error)}") from error
        if not isinstance(content, Mapping):
            raise ModelError(f"{path} holds a {type(content).__name__}, not tensors by name")
        self._tensors = content

    def names(self) -> list[str]:
        return [name for name in self._tensors if isinstance(name, str)]

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{self._path} does not hold the tensor {name}")
        return tensor


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
