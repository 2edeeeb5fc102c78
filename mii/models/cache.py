"""Folders in the cache: made once, by one process, and either whole or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mii.errors import ModelError
from mii.models.progress import Progress


def build_folder_once(
    folder: Path, bytes_needed: int, build: Callable[[Path], None], progress: Progress
) -> None:
    """Make sure that `folder` exists, calling `build` to fill it if it does not.

    `build` fills a temporary sibling, which is renamed at the end; so an interrupted run leaves no
    half-made `folder`, and what it does leave is removed by the next run. Other processes that want
    the same folder wait.

    Args:
        folder: what is wanted.
        bytes_needed: disk space that `build` takes.
        build: fills the empty folder it is given; may raise.
        progress: told when this process has to wait for another one.

    Raises:
        ModelError: if the disk is full or the place cannot be written.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), folder, progress):
            if not folder.is_dir():
                _build(folder, bytes_needed, build)
    except OSError as error:
        raise ModelError(f"cannot prepare the model in {folder}: {error}") from error


def _build(folder: Path, bytes_needed: int, build: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}.part-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < bytes_needed:
        raise ModelError(
            f"cannot prepare the model in {folder}: it takes {bytes_needed / 1e6:.0f} MB of disk, "
            f"and {free / 1e6:.0f} MB are free"
        )
    unfinished = folder.with_name(f"{prefix}{os.getpid()}")  # the lock's holder is alone
    unfinished.mkdir()
    try:
        build(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _lock(path: Path, wanted: Path, progress: Progress) -> Iterator[None]:
    """Hold a file lock. The kernel releases it when its holder dies, however that comes about."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {wanted.name}", None)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
