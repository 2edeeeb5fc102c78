"""Which model a name means, and whether its folder can be served: found out without torch.

`mii.serve` judges a model with this before it starts anything, so that what is knowable at once is
said at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mii.errors import ModelError, UnsupportedModel, shorten
from mii.models.builtin import BUILTIN_MODELS, fetch_builtin
from mii.models.policies import SUPPORTED_MODEL_TYPES
from mii.models.progress import Progress, silent
from mii.models.weight_index import check_weights, find_weights, read_json_object

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"),
    *("tekken.json", "vocab.txt"),
)


def default_cache() -> Path:
    """Return the user's cache folder: MII_CACHE_PATH, else ~/.cache/mii."""
    return Path(os.environ.get("MII_CACHE_PATH") or Path.home() / ".cache" / "mii").absolute()


def resolve_model(name: str, cache: Path, progress: Progress = silent) -> Path:
    """Return the absolute path of the folder, in Hugging Face form, of the model that a user means.

    Args:
        name: a folder, a .gguf file, a built-in model, or a model of the Hugging Face Hub.
        cache: the user's cache folder, for what must be fetched or converted.
        progress: told what is going on.

    Raises:
        ModelError: saying what was looked for and not found.
        UnsupportedModel: for a .gguf file that there is no code for.
    """
    if not name.strip() or "\0" in name:
        raise ModelError(f"{shorten(name)} is no model: give a folder, a .gguf file or a name")
    try:
        path = Path(name).expanduser().absolute()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long, or no such user's home
        raise ModelError(f"cannot look for the model {shorten(name)}: {error}") from error
    if name in BUILTIN_MODELS and not (path / "config.json").is_file():
        return fetch_builtin(name, cache, progress)
    if is_folder:
        return path.resolve()
    if is_file:
        return _from_file(path, cache, progress)
    if _looks_like_path(name):
        raise ModelError(f"there is no folder or file {path}")
    from mii.models.hub import fetch_from_hub  # its library is slow to import

    known = ", ".join(sorted(BUILTIN_MODELS))
    try:
        return fetch_from_hub(name, progress)
    except ModelError as error:
        raise ModelError(
            f"cannot find the model {shorten(name)}: there is no folder {path}, it is not built in "
            f"({known}), and {error}"
        ) from error


def _looks_like_path(name: str) -> bool:
    """Whether a name cannot be one on the Hub: those are `name` or `owner/name`."""
    begins = name.startswith((".", "~", os.sep))
    return begins or name.endswith((os.sep, ".gguf")) or name.count("/") > 1 or "\\" in name


def _from_file(path: Path, cache: Path, progress: Progress) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{path} is a file, and no .gguf file: give the folder that holds config.json"
        )
    from mii.models.gguf import cached_gguf  # with numpy, which the rest does without

    return cached_gguf(path, cache, progress)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        ModelError: if it is missing or no JSON object.
    """
    return read_json_object(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return generation_config.json; empty if there is none.

    Raises:
        ModelError: if it is no JSON object.
    """
    path = folder / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the ids that end an answer, by generation_config.json and config.json together.

    Raises:
        ModelError: if one of these files is damaged.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json_object(folder / name).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return frozenset(found)


def inspect(
    folder: Path,
    *,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Judge a model's folder by its names, sizes and headers; return its config.json.

    Args:
        folder: holds the model.
        tokenizer: the folder of the tokenizer; None: none is needed.

    Raises:
        ModelError: naming the file that is missing or damaged.
        UnsupportedModel: for a family or quantisation that there is no code for.
    """
    config = read_config(folder)
    path = folder / "config.json"
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModel(
            f"{path} has model_type {shorten(config.get('model_type'))}, which is not supported; "
            f"these are: {', '.join(sorted(SUPPORTED_MODEL_TYPES))}"
        )
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise UnsupportedModel(
            f"{path} says that the weights are quantised (quant_method {shorten(method)}), which "
            "is not supported: use a checkpoint in float32, bfloat16 or float16"
        )
    check_weights(find_weights(folder))
    read_eos_token_ids(folder)
    if tokenizer is not None:
        _check_tokenizer(tokenizer)
    return config


def _check_tokenizer(folder: Path) -> None:
    found = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ModelError(
            f"there is no tokenizer in {folder} (looked for {', '.join(_TOKENIZER_FILES)}): give "
            "another folder with tokenizer=, or use skip_tokenizer=True to send and get token ids"
        )
    for name in (*found, "tokenizer_config.json"):
        if name.endswith(".json") and (folder / name).is_file():
            read_json_object(folder / name)
