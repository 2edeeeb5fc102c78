"""Deployments with real workers, from Python: as articles write it, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mii
from mii import MIIClient
from mii.errors import (
    DeploymentError,
    DeploymentNotFoundError,
    InvalidArgument,
    MIIError,
    ModelError,
    PortInUse,
    UnknownArgument,
)
from mii.registry import Registry
from tests.system.leftovers import Belongings, no_new_children

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def served(cache: Path, tiny_model: Path) -> Iterator[MIIClient]:
    """A deployment of two ranks; its supervisor is killed at the end, and nothing is left."""
    client = mii.serve(tiny_model, tensor_parallel=2, port=0, enable_rest=True, rest_port=0)
    record = Registry(cache).get("tiny-mii-deployment")
    belongings = Belongings.of(record.supervisor.pid)
    yield client
    os.kill(record.supervisor.pid, signal.SIGKILL)
    belongings.assert_gone()
    with pytest.raises(DeploymentNotFoundError):
        mii.client("tiny")


def test_a_deployment_is_found_by_its_names_and_by_its_address(served: MIIClient) -> None:
    answers = {
        str(mii.client(name)("abc", **GREEDY))
        for name in ("tiny-mii-deployment", "tiny", served.address)
    }
    assert len(answers) == 1


def test_a_query_handle_asks_the_deployment_that_runs(served: MIIClient) -> None:
    handle = mii.mii_query_handle("tiny", tensor_parallel=1)
    expected = [str(response) for response in served(["abc", "de"], **GREEDY) or []]
    for given in ({"prompts": ["abc", "de"]}, {"request": {"query": ["abc", "de"]}}):
        request = given.pop("request", None)
        answers = handle.query(request, **given, **GREEDY) or []  # type: ignore[arg-type]
        assert [str(response) for response in answers] == expected
    for wrong in ({}, {"prompts": ["a"], "request": {"query": ["a"]}}, {"request": {"q": "a"}}):
        with pytest.raises(InvalidArgument, match="query"):
            handle.query(wrong.pop("request", None), **wrong)  # type: ignore[arg-type]


async def test_serving_and_asking_work_inside_a_running_loop(served: MIIClient) -> None:
    client = mii.client("tiny")
    assert client("abc", **GREEDY) is not None
    again = await asyncio.to_thread(client, "abc", **GREEDY)
    assert str(again) == str(client("abc", **GREEDY))


def test_a_second_deployment_of_the_name_is_refused_at_once(
    served: MIIClient, tiny_model: Path
) -> None:
    with pytest.raises(DeploymentError, match="already running"):
        mii.serve(tiny_model)


ARTICLE = """
import mii
client = mii.serve(model_name={model!r}, deployment_name="article", tensor_parallel=2, port={port})
for response in client(prompts=["abc", "de"], max_new_tokens=8):
    print("answer", len(response.token_ids))
client.terminate_server()
client.terminate_server()
"""

RUNNING_LOOP = """
import asyncio, mii
async def main():
    with mii.pipeline({model!r}, tensor_parallel=2) as pipe:
        for response in pipe(["abc", "de"], max_new_tokens=8):
            print("answer", len(response.token_ids))
asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "text"), [("file", ARTICLE), ("stdin", RUNNING_LOOP)])
def test_scripts_without_a_main_guard(
    how: str, text: str, cache: Path, tiny_model: Path, tmp_path: Path
) -> None:
    script = text.format(model=str(tiny_model), port=0)
    command = [sys.executable, "-"]
    if how == "file":
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, str(tmp_path / "script.py")]
    with no_new_children():
        finished = subprocess.run(
            command, input=script, capture_output=True, text=True, check=False, timeout=120
        )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "answer 8\nanswer 8\n"
    assert Registry(cache).find("article") is None


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be broken."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model, folder)
    return folder


def refused(kind: type[MIIError], words: str, model: object, **options: Any) -> None:
    with no_new_children(), pytest.raises(kind, match=words) as caught:
        mii.serve(model, **options)  # type: ignore[arg-type]
    assert type(caught.value) is kind


def test_what_is_known_at_once_is_said_at_once(
    cache: Path, tiny_model: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(ModelError, "no folder", tiny_model.parent / "gone")
    refused(UnknownArgument, "did you mean 'replica_num'", tiny_model, replica_nun=2)
    refused(
        InvalidArgument, "6 attention heads", tiny_model, tensor_parallel=7, deployment_name="n"
    )
    refused(
        InvalidArgument, "at most the model's 512", tiny_model, max_length=513, deployment_name="n"
    )
    monkeypatch.setenv("RANK", "1")
    refused(DeploymentError, "plain python", tiny_model)
    monkeypatch.delenv("RANK")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(ModelError, "model.safetensors", broken)
    for file in broken.glob("token*"):
        file.unlink()
    shutil.copy(tiny_model / "model.safetensors", weights)
    refused(ModelError, "no tokenizer", broken)
    assert Registry(cache).find("broken-mii-deployment") is None


def test_a_relative_path_means_the_callers_folder(
    cache: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what only a worker can find out is said in the worker's words."""
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    monkeypatch.chdir(broken.parent)
    refused(ModelError, r"model\.norm\.weight.*\[47\].*\[48\]", "broken", port=0)
    assert Registry(cache).find("broken-mii-deployment") is None


def test_a_port_in_use(cache: Path, served: MIIClient, tiny_model: Path) -> None:
    port = int(served.address.rpartition(":")[2])
    refused(PortInUse, str(port), tiny_model, port=port, deployment_name="other")
