"""Which files of a folder hold its weights, and whether they are whole: found out without torch."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mii.errors import ModelError, UnsupportedModel, shorten

_KINDS = ((".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin"))
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin"}
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors library's own

# Bytes of an element, by the names in the headers of safetensors.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ELEMENT_BYTES = _FLOATS | {
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BOOL": 1, "U8": 1, "I8": 1},
    **{"U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8},
}


@dataclass(frozen=True)
class WeightIndex:
    """The weight files of a folder."""

    files: tuple[Path, ...]
    file_of: Mapping[str, Path]  # tensors by name, where an index says so; else empty


def find_weights(folder: Path) -> WeightIndex:
    """Return the files that hold the weights of a folder, as transformers chooses them.

    Raises:
        ModelError: if there are none, or the index names one that is not there.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ModelError(f"cannot read the folder {folder}: {error}") from error
    index = choose_weights(folder, names)
    for path in index.files:
        if not path.is_file():
            raise ModelError(
                f"{folder} is incomplete: its index names {path.name}, which is not there"
            )
    return index


def choose_weights(folder: Path, names: Collection[str]) -> WeightIndex:
    """Choose the files that hold the weights.

    Safetensors come before pickles, and an index before a single file. Only files that the index
    names count, and each tensor comes from the file that the index names for it.

    Args:
        folder: where an index can be read.
        names: of the files there are, in `folder` or where it is filled from.

    Raises:
        ModelError: if there are none, or they cannot be told apart, or an index is unreadable.
    """
    for suffix, single in _KINDS:
        index = f"{single}.index.json"
        if index in names:
            return _read_index(folder / index, suffix)
        found = sorted(n for n in names if n.endswith(suffix) and n not in _NO_WEIGHTS)
        if single in found or len(found) == 1:
            return WeightIndex((folder / (single if single in found else found[0]),), {})
        if found:
            raise ModelError(
                f"{folder} holds several weight files ({', '.join(found[:4])}, ...) and no "
                f"{index} that says what is in which"
            )
    raise ModelError(f"there are no weights in {folder}: looked for *.safetensors and *.bin")


def _read_index(path: Path, suffix: str) -> WeightIndex:
    mapping = read_json_object(path).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelError(f"{path} has no weight_map from tensors to files")
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            raise ModelError(
                f"{path} says that {name} is in {shorten(file)}: a {suffix} file in the same "
                "folder was expected"
            )
    file_of = {name: path.parent / file for name, file in mapping.items()}
    return WeightIndex(tuple(dict.fromkeys(file_of.values())), file_of)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises:
        ModelError: if it is missing or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"there is no {path.name} in {path.parent}: is it a model's folder in Hugging Face "
            "form?"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def check_weights(index: WeightIndex) -> None:
    """Judge weight files by their headers and sizes.

    Raises:
        ModelError: if a file is cut off or damaged, or lacks what the index says is in it.
        UnsupportedModel: if the weights are quantised.
    """
    for path in index.files:
        try:
            if path.suffix == ".safetensors":
                present = _check_safetensors(path)
                wanted = {name for name, file in index.file_of.items() if file == path}
                if missing := sorted(wanted - present):
                    raise ModelError(
                        f"{path} does not hold the tensor {missing[0]}, which the index says it "
                        "does"
                    )
            else:
                _check_pickle(path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error}") from error


def _check_safetensors(path: Path) -> set[str]:
    """Check a file against its header, and return the names of its tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ModelError(
                f"{path} is no whole safetensors file: a header of {length} bytes cannot be, in a "
                f"file of {size} bytes (is the download complete?)"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = sorted(_span(path, name, entry) for name, entry in header.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: its header cannot be understood: {error}") from error
    end = 0
    for begin, finish in spans:
        if begin != end:
            raise ModelError(f"{path} is damaged: its tensors overlap or leave gaps")
        end = finish
    expected = 8 + length + end
    if size != expected:
        raise ModelError(
            f"{path} is {'cut off' if size < expected else 'damaged'}: by its header it has "
            f"{expected} bytes, and there are {size} (is the download complete?)"
        )
    return set(header)


def _span(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end."""
    begin, end = entry["data_offsets"]
    kind, shape = entry["dtype"], entry["shape"]
    if kind not in _FLOATS and name.endswith(".weight"):
        raise UnsupportedModel(
            f"{path}: the tensor {name} is stored as {kind}: the weights are quantised, and only "
            "float32, bfloat16 and float16 can be served"
        )
    if end - begin != math.prod(shape) * _ELEMENT_BYTES[kind]:
        raise ValueError(f"{name} has {end - begin} bytes for {kind} of shape {shape}")
    return int(begin), int(end)


def _check_pickle(path: Path) -> None:
    """Check that torch's zip archive ends as it should: its directory is at the end."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"  # older ones are plain pickles
    if is_archive and not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is cut off or damaged (is the download complete?)")
