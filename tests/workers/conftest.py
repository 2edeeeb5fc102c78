"""Workers over the fake model, and a tiny real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.serving import ServedWorker
from tests.system.conftest import tiny_model

__all__ = ["start_worker", "tiny_model", "worker"]

StartWorker = Callable[..., ServedWorker]


@pytest.fixture(scope="module")
def worker() -> Iterator[ServedWorker]:
    """A worker whose engine computes as fast as it can."""
    worker = ServedWorker()
    yield worker
    worker.close()


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Starts workers of a test's own."""
    workers: list[ServedWorker] = []

    def start(**options: object) -> ServedWorker:
        workers.append(ServedWorker(**options))  # type: ignore[arg-type]
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()
