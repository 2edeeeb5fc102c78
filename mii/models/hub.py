"""Fetches models from the Hugging Face Hub into its library's own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from mii.errors import ModelError
from mii.models.progress import Progress
from mii.models.weight_index import choose_weights

_SMALL_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def fetch_from_hub(name: str, progress: Progress, **options: Any) -> Path:
    """Return the local folder of a model of the Hub: configuration, tokenizer, and weights.

    Of the weights, only the files that will be read are fetched. Without a connection, a model that
    was fetched before is taken from the library's cache.

    Args:
        name: `owner/name` or `name`.
        progress: told what is going on.
        options: for huggingface_hub.snapshot_download.

    Raises:
        ModelError: saying why the model cannot be had.
    """
    progress(f"looking for {name} on the Hugging Face Hub", None)
    try:
        try:
            listing = snapshot_download(name, dry_run=True, **options)
        except DryRunError as error:  # the Hub cannot be reached, or refuses
            return _cached(name, error.__cause__ or error, options)
        return _download(name, [file.filename for file in listing], progress, options)
    except ModelError:
        raise
    except Exception as error:  # the library, its HTTP client and the disk raise many kinds
        raise ModelError(_reason(name, error)) from error


def _cached(name: str, reason: BaseException, options: dict[str, Any]) -> Path:
    try:
        return Path(snapshot_download(name, local_files_only=True, **options))
    except IncompleteSnapshotError as error:
        raise ModelError(
            f"{_reason(name, reason)}; and what was fetched of it before is incomplete"
        ) from error
    except LocalEntryNotFoundError:
        raise ModelError(_reason(name, reason)) from reason


def _download(name: str, files: list[str], progress: Progress, options: dict[str, Any]) -> Path:
    top = [file for file in files if "/" not in file]  # folders hold other formats
    small = [file for file in top if file.endswith(_SMALL_SUFFIXES)]
    bars = _bars(name, progress)
    folder = Path(snapshot_download(name, allow_patterns=small, tqdm_class=bars, **options))
    weights = [path.name for path in choose_weights(folder, top).files]
    if missing := [file for file in weights if file not in top]:
        raise ModelError(f"{name} on the Hugging Face Hub is incomplete: it lacks {missing[0]}")
    snapshot_download(name, allow_patterns=[*small, *weights], tqdm_class=bars, **options)
    return folder


def _bars(name: str, progress: Progress) -> type[Any]:
    """Return what the library takes for a progress bar, made to report to `progress`."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> Any:
            moved = super().update(n)
            if self._counts_bytes and self.total:
                progress(f"fetching {name}", min(1.0, self.n / self.total))
            return moved

    return Bar


class _Nowhere:
    """A file that swallows what is written."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, GatedRepoError):
        return (
            "it is gated on the Hugging Face Hub: accept its conditions at "
            f"https://huggingface.co/{name}, then run `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "the Hugging Face Hub has none of that name (if it is private: `hf auth login`)"
    if isinstance(error, HFValidationError):
        return "it is no name that the Hugging Face Hub could have"
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else type(error).__name__
    return f"it cannot be fetched from the Hugging Face Hub: {said}"
