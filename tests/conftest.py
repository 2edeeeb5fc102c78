"""What tests of all rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mii.models.builtin import fetch_builtin
from mii.models.checkpoint import default_cache
from mii.models.progress import silent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The built-in model's folder, in Hugging Face form; downloaded if the cache has none."""
    return fetch_builtin("smollm2", default_cache(), silent)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long forms of checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="the long form of a check: run with --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)
