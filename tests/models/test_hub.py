"""Models of the Hub: only what is read is fetched; refusals are told apart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mii.errors import ModelError
from mii.models.checkpoint import inspect
from mii.models.hub import fetch_from_hub
from mii.models.progress import silent
from tests.models.checkpoints import shard, tensors_of
from tests.models.fake_hub import FakeHub, serve_hub


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with serve_hub(folder) as hub:
        yield hub


@pytest.fixture
def options(hub: FakeHub, tmp_path: Path) -> dict[str, Any]:
    return {"endpoint": hub.endpoint, "cache_dir": tmp_path / "cache", "token": False}


def test_a_model_is_fetched_with_what_it_needs_and_nothing_else(
    hub: FakeHub, options: dict[str, Any]
):
    (hub.folder / "onnx").mkdir()
    for name in ("onnx/config.json", "pytorch_model.bin", "logo.png", "consolidated.safetensors"):
        (hub.folder / name).write_text(f"the unwanted {name}")
    progress = []
    fetched = fetch_from_hub("owner/tiny", lambda *told: progress.append(told), **options)
    assert sorted(hub.fetched) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    inspect(fetched, tokenizer=fetched)
    assert progress[0] == ("looking for owner/tiny on the Hugging Face Hub", None)
    assert progress[-1][0] == "fetching owner/tiny"


def test_of_shards_those_are_fetched_that_the_index_names(hub: FakeHub, options: dict[str, Any]):
    names = set(shard(hub.folder).values())
    shutil.copy(hub.folder / next(iter(names)), hub.folder / "model.safetensors")
    fetched = fetch_from_hub("owner/tiny", silent, **options)
    assert {name for name in hub.fetched if name.endswith(".safetensors")} == names
    inspect(fetched)


def test_pickles_are_fetched_where_there_is_nothing_else(hub: FakeHub, options: dict[str, Any]):
    torch.save(tensors_of(hub.folder), hub.folder / "pytorch_model.bin")
    (hub.folder / "model.safetensors").unlink()
    fetched = fetch_from_hub("owner/tiny", silent, **options)
    assert (fetched / "pytorch_model.bin").is_file()


def test_what_was_fetched_before_needs_no_hub(hub: FakeHub, options: dict[str, Any]):
    fetched = fetch_from_hub("owner/tiny", silent, **options)
    hub.refusal = (503, "")
    assert fetch_from_hub("owner/tiny", silent, **options) == fetched
    inspect(fetched, tokenizer=fetched)


@pytest.mark.parametrize(
    ("refusal", "problem"),
    [
        ((404, "RepoNotFound"), "has none of that name"),
        ((403, "GatedRepo"), "gated.*https://huggingface.co/owner/tiny.*hf auth login"),
        ((503, ""), "cannot be fetched from the Hugging Face Hub"),
    ],
)
def test_a_refusal_is_told_for_what_it_is(
    refusal: tuple[int, str], problem: str, hub: FakeHub, options: dict[str, Any]
):
    hub.refusal = refusal
    with pytest.raises(ModelError, match=problem):
        fetch_from_hub("owner/tiny", silent, **options)


def test_a_model_without_weights_is_refused(hub: FakeHub, options: dict[str, Any]):
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        fetch_from_hub("owner/tiny", silent, **options)


def test_a_model_that_lacks_a_shard_is_refused(hub: FakeHub, options: dict[str, Any]):
    missing = shard(hub.folder)["model.norm.weight"]
    (hub.folder / missing).unlink()
    with pytest.raises(ModelError, match=f"incomplete: it lacks {missing}"):
        fetch_from_hub("owner/tiny", silent, **options)
