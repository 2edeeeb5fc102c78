"""Tensors by name, from the files that transformers would read; nothing else is trusted."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mii.errors import ModelError
from mii.models.weights import WeightFiles
from tests.models.checkpoints import shard, tensors_of

NORM = "model.norm.weight"


def assert_same(weights: WeightFiles, expected: dict[str, torch.Tensor]) -> None:
    assert weights.names() == expected.keys()
    for name, tensor in expected.items():
        assert name in weights
        assert torch.equal(weights.tensor(name), tensor), name


def test_a_single_file_is_read(folder: Path):
    weights = WeightFiles(folder)
    assert_same(weights, tensors_of(folder))
    assert "model.nothing" not in weights


def test_the_tensors_are_those_that_transformers_loads(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(WeightFiles(folder), model.state_dict())


def test_a_file_of_another_name_is_read(folder: Path):
    expected = tensors_of(folder)
    (folder / "model.safetensors").rename(folder / "llama-tiny.safetensors")
    assert_same(WeightFiles(folder), expected)


def test_shards_are_read_and_stray_files_are_not(folder: Path):
    expected = tensors_of(folder)
    shard(folder)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for stray in ("model.safetensors", "consolidated.safetensors"):
        save_file(zeros, folder / stray)
    torch.save(zeros, folder / "pytorch_model.bin")
    assert_same(WeightFiles(folder), expected)


def test_the_index_says_which_shard_a_tensor_comes_from(folder: Path):
    expected = tensors_of(folder)
    for name in (NORM, "model.embed_tokens.weight"):  # in different shards
        save_file(expected, folder / "model.safetensors")
        shard(folder, stale=name)
        assert torch.equal(WeightFiles(folder).tensor(name), expected[name])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_bin_file_is_read(legacy: bool, folder: Path):
    expected = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save(expected, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    torch.save({}, folder / "training_args.bin")
    assert_same(WeightFiles(folder), expected)


def test_bin_shards_are_read(folder: Path):
    expected = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(expected)
    for number in (0, 1):
        content = {name: expected[name] for name in names[number::2]}
        torch.save(content, folder / f"pytorch_model-{number}.bin")
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(WeightFiles(folder), expected)


class _Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["archive", "pickle"])
def test_a_malicious_pickle_is_refused_and_not_run(kind: str, folder: Path, tmp_path: Path):
    (folder / "model.safetensors").unlink()
    path, trace = folder / "pytorch_model.bin", tmp_path / "ran"
    if kind == "archive":
        torch.save({NORM: torch.ones(2), "x": _Exploit(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"x": _Exploit(trace)}, protocol=2))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is refused.*safetensors"):
        WeightFiles(folder)
    assert not trace.exists()


def test_a_slice_of_a_tensor_reads_only_the_slice(tmp_path: Path):
    rows = torch.arange(64 << 10, dtype=torch.float32)[:, None].expand(-1, 1 << 9).contiguous()
    save_file({"large": rows}, tmp_path / "model.safetensors")
    torch.save({"large": rows}, tmp_path / "pytorch_model.bin")
    del rows
    for unwanted in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / unwanted).rename(tmp_path / f"{unwanted}.away")
        before = _resident_bytes()
        tensor = WeightFiles(tmp_path).tensor("large")
        assert tensor[5000:5010].sum() == sum(range(5000, 5010)) << 9
        assert _resident_bytes() - before < 32 << 20  # of 128 MiB
        (tmp_path / f"{unwanted}.away").rename(tmp_path / unwanted)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_tensor_that_is_not_there_is_named(folder: Path):
    weights = WeightFiles(folder)
    with pytest.raises(ModelError, match=rf"{folder} has no tensor model\.other"):
        weights.tensor("model.other")


def test_a_tensor_that_the_index_promises_in_vain_is_named(folder: Path):
    weight_map = shard(folder)
    promised = weight_map[NORM]
    weight_map["model.other"] = promised
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    weights = WeightFiles(folder)
    with pytest.raises(ModelError, match=rf"{promised} does not hold the tensor model\.other"):
        weights.tensor("model.other")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 5, 0.5, -1])
def test_a_cut_off_file_is_named(name: str, kept: float, folder: Path):
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    path = folder / name
    if name.endswith("bin"):
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    content = path.read_bytes()
    end = int(len(content) * kept) if isinstance(kept, float) else kept
    path.write_bytes(content[:end])
    with pytest.raises(ModelError, match=name):
        WeightFiles(folder).tensor(NORM)


@pytest.mark.parametrize("content", [[1, 2], {"model": {NORM: torch.ones(2)}}, {NORM: 5}])
def test_a_bin_file_of_something_else_is_named(content: object, folder: Path):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="model"):
        WeightFiles(folder).tensor(NORM)


def test_an_archive_of_something_else_is_named(folder: Path):
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        WeightFiles(folder)
