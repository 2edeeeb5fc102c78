"""Which model a name means, and whether its folder can be served: found out without torch.

`mii.serve` judges a model with this before it starts anything, so that what is knowable at once is
said at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mii.errors import ModelError, UnsupportedModel
from mii.models.builtin import BUILTIN_MODELS, fetch_builtin
from mii.models.gguf import cached_gguf
from mii.models.policies import SUPPORTED_MODEL_TYPES
from mii.models.progress import Progress, silent

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HEADER_LIMIT = 100 << 20  # bytes; safetensors' own


def default_cache() -> Path:
    """Return the user's cache folder: MII_CACHE_PATH, else ~/.cache/mii."""
    return Path(os.environ.get("MII_CACHE_PATH") or Path.home() / ".cache" / "mii").absolute()


def resolve_model(name: str, cache: Path, progress: Progress = silent) -> Path:
    """Return the folder, in Hugging Face form, of the model that a user means.

    Args:
        name: a built-in model, a folder, a .gguf file, or a model of the Hugging Face Hub.
        cache: the user's cache folder, for what must be fetched or converted.
        progress: told what is going on.

    Raises:
        ModelError: saying what was looked for and not found.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix == ".gguf":
            return cached_gguf(path, cache, progress)
        raise ModelError(
            f"{path} is a file, and not a .gguf one: name the folder that holds config.json"
        )
    if name in BUILTIN_MODELS:
        return fetch_builtin(name, cache, progress)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf":
        raise ModelError(f"there is no folder or file {path.absolute()}")
    if name.count("/") > 1 or name.endswith("/"):
        raise ModelError(
            f"there is no folder {path.absolute()}, and {name!r} is no name on the Hugging Face Hub"
        )
    return _from_hub(name, progress)


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"fetching {name} from the Hugging Face Hub", None)
    known = ", ".join(BUILTIN_MODELS)
    not_here = (
        f"there is no folder {Path(name).absolute()} and no built-in model {name!r} ({known})"
    )
    try:
        try:
            return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
        except LocalEntryNotFoundError:
            raise
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{not_here}, and it cannot be fetched from the Hugging Face Hub: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        ModelError: if it is missing or no JSON object.
    """
    return _read_json_object(folder / "config.json")


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"there is no {path.name} in {path.parent}: is it a model's folder?"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def inspect(folder: Path, *, tokenizer: Path | None = None) -> dict[str, Any]:
    """Judge a model's folder by its names, sizes and headers; return its config.json.

    Args:
        folder: holds the model.
        tokenizer: the folder of the tokenizer; None: none is needed.

    Raises:
        ModelError: naming the file that is missing or damaged.
        UnsupportedModel: for a family or quantisation that there is no code for.
    """
    config = read_config(folder)
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModel(
            f"{folder / 'config.json'} has model_type {model_type!r}, which is not supported: "
            "known are " + ", ".join(sorted(SUPPORTED_MODEL_TYPES))
        )
    quantisation = config.get("quantization_config")
    if isinstance(quantisation, Mapping):
        raise UnsupportedModel(
            f"{folder / 'config.json'} says that the weights are quantised by "
            f"{quantisation.get('quant_method')!r}, which is not supported: use a checkpoint in "
            "float32, bfloat16 or float16"
        )
    for path in find_weights(folder).files:
        if path.suffix == ".safetensors":
            check_safetensors(path)
    if tokenizer is not None and not any((tokenizer / n).is_file() for n in _TOKENIZER_FILES):
        raise ModelError(
            f"there is no tokenizer in {tokenizer}: looked for {', '.join(_TOKENIZER_FILES)}; name "
            "another folder with tokenizer=, or use skip_tokenizer=True to send and get token ids"
        )
    return config


@dataclass(frozen=True)
class WeightIndex:
    """The weight files of a folder."""

    files: tuple[Path, ...]
    file_of: Mapping[str, Path]  # tensors by name, where an index says so; else empty


def find_weights(folder: Path) -> WeightIndex:
    """Return the files that hold the weights, as transformers chooses them.

    An index counts before a single file, and safetensors before pickles. Only files that the index
    names count, and each tensor comes from the file that it names.

    Raises:
        ModelError: if there are none, or the index names one that is not there.
    """
    for suffix, single in ((".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin")):
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed(index)
        if (folder / single).is_file():
            return WeightIndex((folder / single,), {})
        others = sorted(folder.glob(f"*{suffix}"))
        others = [path for path in others if path.name != "training_args.bin"]
        if len(others) == 1:
            return WeightIndex((others[0],), {})
        if len(others) > 1:
            names = ", ".join(path.name for path in others[:4])
            raise ModelError(
                f"{folder} holds several weight files ({names}, ...) and no {index.name} that says "
                "what is in which"
            )
    raise ModelError(f"there are no weights in {folder}: looked for *.safetensors and *.bin")


def _indexed(index: Path) -> WeightIndex:
    mapping = _read_json_object(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files")
    file_of = {name: index.parent / file for name, file in mapping.items()}
    files = tuple(dict.fromkeys(file_of.values()))
    for path in files:
        if path.parent != index.parent:
            raise ModelError(f"{index} names {path}, which is outside its folder")
        if not path.is_file():
            raise ModelError(f"{index.name} names {path.name}, which is not in {index.parent}")
    return WeightIndex(files, file_of)


def check_safetensors(path: Path) -> None:
    """Judge a safetensors file by its header and size.

    Raises:
        ModelError: if it is cut off or damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _HEADER_LIMIT):
            raise ModelError(
                f"{path} is damaged: its header should have {length} bytes, and the file has {size}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        spans = sorted(
            tuple(entry["data_offsets"]) for n, entry in header.items() if n != "__metadata__"
        )
        joined = [0, *(offset for span in spans for offset in span)]
        whole = all(joined[i] == joined[i + 1] for i in range(0, len(joined) - 1, 2))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: its header cannot be read ({error})") from error
    end = 8 + length + joined[-1]
    if not whole:
        raise ModelError(f"{path} is damaged: its tensors overlap or leave gaps")
    if end != size:
        raise ModelError(
            f"{path} is {'cut off' if size < end else 'damaged'}: it should have {end} bytes by "
            f"its header, and has {size}: fetch it again"
        )
