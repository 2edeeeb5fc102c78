"""Names become folders; a folder that cannot be served is refused at once, and by name."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mii.errors import ModelError, UnsupportedModel
from mii.models.checkpoint import (
    default_cache,
    inspect,
    read_config,
    read_eos_token_ids,
    resolve_model,
)
from mii.models.policies import SUPPORTED_MODEL_TYPES
from tests.models.checkpoints import Header, edit_header, edit_json, shard, tensors_of

NORM = "model.norm.weight"
INNER = "model.layers.1.input_layernorm.weight"  # not the last in its file


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MII_CACHE_PATH", "/somewhere")
    assert default_cache() == Path("/somewhere")
    monkeypatch.setenv("MII_CACHE_PATH", "")
    monkeypatch.setenv("HOME", "/home/she")
    assert default_cache() == Path("/home/she/.cache/mii")


class TestResolve:
    def test_a_folder_is_made_absolute(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("model", "./model", "model/", "~/model", str(folder)):
            assert resolve_model(name, tmp_path / "cache") == folder.resolve()

    def test_a_built_in_name_means_the_built_in_model_unless_a_model_lies_there(
        self, smollm2: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "smollm2").mkdir()  # somebody's notes
        assert resolve_model("smollm2", default_cache()) == smollm2
        shutil.copytree(folder, tmp_path / "smollm2", dirs_exist_ok=True)
        assert resolve_model("smollm2", default_cache()) == tmp_path / "smollm2"

    def test_a_gguf_file_is_converted_into_the_cache(
        self, pristine_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        shutil.copy(pristine_folder.parent / "tiny.gguf", tmp_path / "Tiny.GGUF")
        monkeypatch.chdir(tmp_path)
        found = resolve_model("Tiny.GGUF", tmp_path / "cache")
        assert found.is_relative_to(tmp_path / "cache")
        assert inspect(found, tokenizer=found)["model_type"] == "llama"

    @pytest.mark.parametrize("name", ["./absent", "absent/", "/absent", "a/b/c", "~/x", "x.gguf"])
    def test_a_missing_path_is_said_and_the_hub_not_asked(self, name: str, tmp_path: Path):
        with pytest.raises(ModelError, match="there is no folder or file /") as caught:
            resolve_model(name, tmp_path)
        assert "Hub" not in str(caught.value)

    @pytest.mark.parametrize("name", ["", " ", "a\0b", "x" * 5000, "~nobody-of-that-name/x"])
    def test_what_is_no_name_is_refused(self, name: str, tmp_path: Path):
        with pytest.raises(ModelError, match="model") as caught:
            resolve_model(name, tmp_path)
        assert len(str(caught.value)) < 6000

    def test_another_file_is_refused(self, folder: Path, tmp_path: Path):
        with pytest.raises(ModelError, match=r"config\.json is a file, and no \.gguf file"):
            resolve_model(str(folder / "config.json"), tmp_path)

    def test_no_connection_is_one_error_that_names_all_that_was_tried(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelError) as caught:
            resolve_model("nobody/nothing", tmp_path)
        for said in ("nobody/nothing", "no folder /", "smollm2", "Hugging Face Hub"):
            assert said in str(caught.value)

    def test_nothing_heavy_is_imported(self, folder: Path):
        code = f"""
import sys
from pathlib import Path
from mii.models.checkpoint import inspect, resolve_model
folder = resolve_model({str(folder)!r}, Path("/nowhere"))
inspect(folder, tokenizer=folder)
heavy = {{"torch", "transformers", "tokenizers", "numpy", "huggingface_hub", "gguf"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestConfig:
    def test_a_good_folder_passes(self, folder: Path):
        assert inspect(folder, tokenizer=folder) == read_config(folder)

    def test_what_is_not_needed_may_be_missing(self, folder: Path):
        (folder / "generation_config.json").unlink()
        (folder / "tokenizer.json").unlink()
        inspect(folder)

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": \udcff}', "[" * 100_000])
    def test_a_damaged_config_is_named(self, content: str, folder: Path):
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            path = folder / name
            before = path.read_bytes()
            path.write_text(content, "utf-8", "surrogateescape")
            with pytest.raises(ModelError, match=str(path)):
                inspect(folder, tokenizer=folder)
            path.write_bytes(before)

    def test_a_missing_config_is_named(self, folder: Path):
        (folder / "config.json").unlink()
        with pytest.raises(ModelError, match=rf"no config\.json in {folder}"):
            inspect(folder)

    def test_a_missing_tokenizer_is_named_with_the_way_out(self, folder: Path):
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=rf"no tokenizer in {folder}.*skip_tokenizer=True"):
            inspect(folder, tokenizer=folder)

    @pytest.mark.parametrize("model_type", ["mamba2", None, 7, "x" * 1000])
    def test_an_unknown_family_is_refused_with_those_that_are_known(
        self, model_type: Any, folder: Path
    ):
        edit_json(folder / "config.json", model_type=model_type)
        with pytest.raises(UnsupportedModel, match=r"config\.json has model_type") as caught:
            inspect(folder)
        assert all(known in str(caught.value) for known in SUPPORTED_MODEL_TYPES)
        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "new", None])
    def test_a_quantised_checkpoint_is_refused_by_its_method(
        self, method: str | None, folder: Path
    ):
        edit_json(folder / "config.json", quantization_config={"quant_method": method})
        with pytest.raises(UnsupportedModel, match=f"quantised .*{method!r}"):
            inspect(folder)

    @pytest.mark.parametrize("value", [None, 5, [5, 6], [5, None, True, "x"], "5", True, {}])
    def test_only_ids_count_as_ends(self, value: Any, folder: Path):
        edit_json(folder / "generation_config.json", eos_token_id=value)
        edit_json(folder / "config.json", eos_token_id=9)
        expected = {5: {5}, (5, 6): {5, 6}, (5, None, True, "x"): {5}}
        key = tuple(value) if isinstance(value, list) else value
        numbers = expected.get(key, set()) if not isinstance(key, bool | dict) else set()
        assert read_eos_token_ids(folder) == numbers | {9}


class TestWeights:
    def test_no_weights_is_said(self, folder: Path):
        (folder / "model.safetensors").unlink()
        torch.save({}, folder / "training_args.bin")
        with pytest.raises(ModelError, match=f"no weights in {folder}"):
            inspect(folder)

    def test_several_files_without_an_index_are_refused(self, folder: Path):
        for name in ("a", "b"):
            shutil.copy(folder / "model.safetensors", folder / f"{name}.safetensors")
        inspect(folder)  # the usual name counts
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"several weight files \(a\.safetensors, b\.saf"):
            inspect(folder)

    def test_a_missing_shard_is_named(self, folder: Path):
        missing = shard(folder)[NORM]
        inspect(folder)
        (folder / missing).unlink()
        with pytest.raises(ModelError, match=f"index names {missing}, which is not there"):
            inspect(folder)

    def test_a_tensor_that_the_index_promises_in_vain_is_named(self, folder: Path):
        weight_map = shard(folder)
        weight_map["model.other"] = weight_map[NORM]
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=rf"{weight_map[NORM]} does not hold.*model\.other"):
            inspect(folder)

    @pytest.mark.parametrize(
        "weight_map", [None, {}, [], {"a": 5}, {"a": "../x.safetensors"}, {"a": "x.bin"}]
    )
    def test_an_index_of_something_else_is_named(self, weight_map: Any, folder: Path):
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=str(index)):
            inspect(folder)

    @pytest.mark.parametrize("damage", ["a byte less", "half", "no bytes", "a byte more"])
    def test_a_file_of_the_wrong_size_is_named(self, damage: str, folder: Path):
        name = shard(folder)[NORM]
        content = (folder / name).read_bytes()
        spoilt = {
            "a byte less": content[:-1],
            "half": content[: len(content) // 2],
            "no bytes": b"",
            "a byte more": content + b"\0",
        }
        (folder / name).write_bytes(spoilt[damage])
        with pytest.raises(ModelError, match=str(folder / name)):
            inspect(folder)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda header: header[INNER].update(header[NORM]),  # over another, and a gap
            lambda header: header.pop(INNER),  # a gap
            lambda header: header[NORM].update(shape=[31]),
            lambda header: header[NORM].update(shape=None),
            lambda header: header[NORM].update(dtype="F31"),
            lambda header: header[NORM].update(data_offsets=["a", "b"]),
            lambda header: header[NORM].update(data_offsets=[1]),
            lambda header: header[NORM].pop("data_offsets"),
            lambda header: header.update({NORM: 5}),
        ],
    )
    def test_a_header_that_does_not_fit_its_file_is_named(
        self, edit: Callable[[Header], None], folder: Path
    ):
        path = folder / "model.safetensors"
        edit_header(path, edit)
        with pytest.raises(ModelError, match=str(path)):
            inspect(folder)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_flipped_bytes_in_a_header_are_never_a_crash(
        self, data: st.DataObject, folder: Path, pristine_folder: Path
    ):
        content = bytearray((pristine_folder / "model.safetensors").read_bytes())
        (length,) = struct.unpack_from("<Q", content)
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
        path = folder / "model.safetensors"
        path.write_bytes(content)
        try:
            inspect(folder)
        except ModelError as error:
            assert str(path) in str(error)  # noqa: PT017

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.uint8])
    def test_quantised_weights_are_refused_also_if_the_config_does_not_tell(
        self, dtype: torch.dtype, folder: Path
    ):
        tensors = tensors_of(folder)
        name = "model.layers.0.mlp.up_proj.weight"
        save_file(tensors | {name: tensors[name].to(dtype)}, folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=f"{name} is stored as"):
            inspect(folder)

    def test_other_tensors_may_be_of_any_kind(self, folder: Path):
        more = {"model.rotary.position_ids": torch.arange(4), "mask": torch.ones(4) > 0}
        save_file(tensors_of(folder) | more, folder / "model.safetensors")
        inspect(folder)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_every_float_is_fine(self, dtype: torch.dtype, folder: Path):
        tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(folder).items()}
        save_file(tensors, folder / "model.safetensors")
        inspect(folder)

    def test_a_bin_file_passes_and_is_named_when_cut_off(self, folder: Path):
        path = folder / "pytorch_model.bin"
        torch.save(tensors_of(folder), path)
        (folder / "model.safetensors").unlink()
        inspect(folder)
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(ModelError, match=str(path)):
            inspect(folder)
