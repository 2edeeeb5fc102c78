"""Reads GGUF files: metadata and tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here, with
every length checked against the file, because the gguf package's reader takes minutes for a large
vocabulary and trusts what it reads; the tensors are dequantised by the gguf package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mii.errors import ModelError, UnsupportedModel, shorten

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
        **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
    }.items()
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in numpy
    type_number: int  # GGMLQuantizationType
    offset: int  # from the start of the file


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path} is not a whole GGUF file: {problem}")

    def need(self, size: int, what: str) -> None:
        left = len(self.data) - self.position
        if size > left:
            raise self.fail(
                f"{what} at byte {self.position} takes {size} bytes, and {left} are left "
                "(is the download complete?)"
            )

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def string(self, what: str) -> str:
        size = self.scalar(_U64, what)
        self.need(size, what)
        raw = self.data[self.position : self.position + size]
        self.position += size
        return raw.decode("utf-8", "replace")

    def value(self, type_number: int, what: str, depth: int = 0) -> Any:
        if type_number == _STRING:
            return self.string(what)
        if type_number == _ARRAY and depth < _MAX_NESTING:
            return self._array(what, depth)
        if type_number not in _SCALARS:
            raise self.fail(f"{what} has the unknown type {type_number}")
        return self.scalar(_SCALARS[type_number], what)

    def _array(self, what: str, depth: int) -> list[Any]:
        item_type = self.scalar(_U32, what)
        count = self.scalar(_U64, what)
        if item_type not in _SCALARS:
            self.need(count, what)  # every item takes bytes: a wild count ends here
            return [self.value(item_type, what, depth + 1) for _ in range(count)]
        layout = _SCALARS[item_type]
        self.need(count * layout.size, what)
        start, self.position = self.position, self.position + count * layout.size
        return [value for (value,) in layout.iter_unpack(self.data[start : self.position])]


class GGUFFile:
    """An open GGUF file.

    Raises:
        ModelError: if the file cannot be read, is cut off, or is no GGUF file.
        UnsupportedModel: for a version or quantisation that there is no code for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"cannot read {path}: {error}") from error
        cursor = _Cursor(path, self._data)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        tensor_count, value_count = self._read_counts(cursor)
        for _ in range(value_count):
            key = cursor.string("a metadata key")
            self.metadata[key] = cursor.value(cursor.scalar(_U32, key), key)
        self._read_tensor_infos(cursor, tensor_count)

    def _read_counts(self, cursor: _Cursor) -> tuple[int, int]:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        cursor.position = 4
        version = cursor.scalar(_U32, "the version")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self.path} has GGUF version {version}; versions 2 and 3 (little-endian) are read"
            )
        return cursor.scalar(_U64, "the tensor count"), cursor.scalar(_U64, "the metadata count")

    def _read_tensor_infos(self, cursor: _Cursor, count: int) -> None:
        infos = []
        for _ in range(count):
            name = cursor.string("a tensor's name")
            dimensions = cursor.scalar(_U32, name)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise cursor.fail(f"tensor {name} has {dimensions} dimensions")
            shape = tuple(cursor.scalar(_U64, name) for _ in range(dimensions))
            if 0 in shape:
                raise cursor.fail(f"tensor {name} has the shape {shape[::-1]}")
            type_number = cursor.scalar(_U32, name)
            infos.append((name, shape[::-1], type_number, cursor.scalar(_U64, name)))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.fail(f"general.alignment is {alignment}")
        start = -(-cursor.position // alignment) * alignment
        for name, shape, type_number, offset in infos:
            if name in self.tensors:
                raise cursor.fail(f"tensor {name} is there twice")
            self.tensors[name] = TensorInfo(name, shape, type_number, start + offset)

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a metadata value.

        Raises:
            ModelError: if it is missing and there is no default, or has another type than `kind`.
        """
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int):
            return float(value)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {shorten(value)}"
            raise ModelError(f"{self.path}: the metadata value {key} {found}")
        return value

    def read_tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a tensor, dequantised: float32, of the shape in `tensors`.

        Raises:
            ModelError: if the file ends before the tensor does.
            UnsupportedModel: if there is no code for its quantisation.
        """
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.type_number)
        except ValueError:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} has the unknown type {info.type_number}"
            ) from None
        block_items, block_bytes = GGML_QUANT_SIZES[kind]
        row = info.shape[-1]
        if row % block_items:
            raise ModelError(
                f"{self.path}: rows of tensor {name} have {row} values; {kind.name} stores "
                f"blocks of {block_items}"
            )
        row_bytes = row // block_items * block_bytes
        rows = math.prod(info.shape[:-1])
        if info.offset + rows * row_bytes > len(self._data):
            raise ModelError(
                f"{self.path} is cut off: tensor {name} ends at byte "
                f"{info.offset + rows * row_bytes}, and the file has {len(self._data)} bytes "
                "(is the download complete?)"
            )
        raw = np.frombuffer(self._data, np.uint8, rows * row_bytes, info.offset)
        try:
            values = dequantize(raw.reshape(rows, row_bytes), kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} has the type {kind.name}, which cannot be dequantised"
            ) from None
        return np.asarray(values, np.float32).reshape(info.shape)
