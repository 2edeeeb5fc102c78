"""A folder of a tiny model, for tests to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mii.models.gguf import convert_gguf
from mii.models.progress import silent
from tests.models.gguf_writer import write_gguf


@pytest.fixture(scope="session")
def pristine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "tiny.gguf", AutoModelForCausalLM.from_config(config), "llama")
    convert_gguf(folder / "tiny.gguf", folder / "model", silent)
    return folder / "model"


@pytest.fixture
def folder(pristine_folder: Path, tmp_path: Path) -> Path:
    """A random tiny llama with its tokenizer, in Hugging Face form."""
    return Path(shutil.copytree(pristine_folder, tmp_path / "model"))
