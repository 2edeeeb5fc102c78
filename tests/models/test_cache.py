"""Folders in the cache are made once, and are whole or absent."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mii.errors import ModelError
from mii.models.cache import build_folder_once
from mii.models.progress import silent

_KILLED_WHILE_BUILDING = """
import sys
from pathlib import Path
from mii.models.cache import build_folder_once

def build(folder):
    (folder / "half").write_text("half")
    print("building", flush=True)
    sys.stdin.read()

build_folder_once(Path(sys.argv[1]), 0, build, lambda activity, fraction: None)
"""


def write_whole(folder: Path) -> None:
    (folder / "whole").write_text("whole")


def test_of_many_that_want_a_folder_one_builds_it_and_all_get_it(tmp_path: Path):
    folder, calls, seen = tmp_path / "sub" / "model", [], []
    barrier = threading.Barrier(6)

    def build(unfinished: Path) -> None:
        calls.append(unfinished)
        assert not folder.exists()
        write_whole(unfinished)

    def want() -> None:
        barrier.wait()
        build_folder_once(folder, 0, build, silent)
        seen.append((folder / "whole").read_text())

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["whole"] * 6
    assert len(calls) == 1
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["model"]


def test_who_waits_is_told_so(tmp_path: Path):
    folder, building, told = tmp_path / "model", threading.Event(), threading.Event()

    def build_slowly(unfinished: Path) -> None:
        building.set()
        assert told.wait(30)

    first = threading.Thread(target=build_folder_once, args=(folder, 0, build_slowly, silent))
    first.start()
    assert building.wait(30)
    activities = []

    def progress(activity: str, fraction: float | None) -> None:
        activities.append(activity)
        told.set()

    build_folder_once(folder, 0, write_whole, progress)
    first.join()
    assert activities == ["waiting for another process that prepares model"]


def test_a_killed_builder_leaves_nothing_that_matters(tmp_path: Path):
    folder = tmp_path / "model"
    command = [sys.executable, "-c", _KILLED_WHILE_BUILDING, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"building\n"
        child.send_signal(signal.SIGKILL)
    assert not folder.exists()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    build_folder_once(folder, 0, write_whole, silent)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path):
    folder = tmp_path / "model"

    def fail(unfinished: Path) -> None:
        write_whole(unfinished)
        raise ModelError("no")

    with pytest.raises(ModelError, match="^no$"):
        build_folder_once(folder, 0, fail, silent)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    build_folder_once(folder, 0, write_whole, silent)
    assert folder.is_dir()


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ModelError, match=r"takes 1000000000000 MB of disk, and \d+ MB are free"):
        build_folder_once(tmp_path / "model", 10**18, write_whole, silent)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file/model"):
        build_folder_once(tmp_path / "file" / "model", 0, write_whole, silent)
