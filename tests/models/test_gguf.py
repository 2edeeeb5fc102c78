"""GGUF files in Hugging Face form: the same weights, logits, and token ids; damage is named."""

from __future__ import annotations

import json
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mii.errors import ModelError, UnsupportedModel
from mii.models.gguf import Conversion, cached_gguf, convert_gguf
from mii.models.gguf_file import GGUFFile
from mii.models.progress import silent
from tests.models.gguf_writer import QUANTIZATION, byte_level_vocabulary, header, string, write_gguf
from tests.models.texts import TEXTS

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
TIED = {**SIZES, "tie_word_embeddings": True}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**TIED),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": LlamaConfig(**{**SIZES, "head_dim": 32}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**TIED),
    "gemma3": Gemma3TextConfig(
        **{**TIED, "num_hidden_layers": 7}, sliding_window=8, query_pre_attn_scalar=16
    ),
}


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def load(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return random_model(FAMILIES["llama"])


@pytest.fixture(scope="module")
def llama_file(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, llama, "llama")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_model(family: str, tmp_path: Path):
    model = random_model(FAMILIES[family])
    write_gguf(tmp_path / "m.gguf", model, family.partition("-")[0])
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    converted = load(tmp_path / "out")
    expected = model.state_dict()
    assert converted.state_dict().keys() == expected.keys()
    for name, tensor in converted.state_dict().items():
        if family == "gemma3" and name.endswith("norm.weight"):  # stored as 1 + weight, rounded
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(tensor, expected[name]), name
    ids = torch.arange(40)[None] * 7 % 320
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_become_what_gguf_makes_of_them(quantization: str, tmp_path: Path):
    kind = QUANTIZATION[quantization]
    model = random_model(FAMILIES["qwen2"])  # whose rows keep their order
    write_gguf(tmp_path / "m.gguf", model, "qwen2", quantization=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    converted = load(tmp_path / "out").state_dict()
    for name, tensor in model.state_dict().items():
        expected = tensor.numpy()
        if tensor.ndim > 1:
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        assert np.array_equal(converted[name].numpy(), expected), name


def test_large_weights_come_in_shards(llama: PreTrainedModel, llama_file: Path, tmp_path: Path):
    Conversion(llama_file).write(tmp_path, silent, shard_bytes=60_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    for name, tensor in load(tmp_path).state_dict().items():
        assert torch.equal(tensor, llama.state_dict()[name]), name


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_rope_scaling_is_kept(
    metadata: dict[str, Any], parameters: dict[str, Any], llama: PreTrainedModel, tmp_path: Path
):
    write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata)
    assert Conversion(tmp_path / "m.gguf").config["rope_parameters"] == parameters


def test_llama3s_frequency_factors_become_their_parameters(tmp_path: Path):
    config = LlamaConfig(**{**SIZES, "head_dim": 64}, rope_parameters=LLAMA3_ROPE)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    factors = {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}
    write_gguf(tmp_path / "m.gguf", random_model(config), "llama", tensors=factors)
    assert Conversion(tmp_path / "m.gguf").config["rope_parameters"] == LLAMA3_ROPE

    factors["rope_freqs.weight"][10] *= 2
    write_gguf(tmp_path / "odd.gguf", random_model(config), "llama", tensors=factors)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight are not those of Llama 3"):
        Conversion(tmp_path / "odd.gguf")


def test_numbers_stored_as_float32_come_back_as_they_were_meant(llama_file: Path):
    assert Conversion(llama_file).config["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_byte_level_ids_equal_those_of_transformers_own_reading(
    pre: str, llama: PreTrainedModel, tmp_path: Path
):
    write_gguf(tmp_path / "m.gguf", llama, "llama", pre=pre)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == expected, text
        assert ours.decode(expected) == theirs.decode(expected)
    # Where the file does not say, llama.cpp begins a text with BOS for Llama 3 alone.
    assert (ours("a").input_ids[0] == 1) == (pre == "llama-bpe")


def test_qwens_ids_equal_those_of_transformers_tokenizer_of_qwen(
    llama: PreTrainedModel, tmp_path: Path
):
    write_gguf(tmp_path / "m.gguf", llama, "llama", pre="qwen2")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens, merges = byte_level_vocabulary(312)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocabulary, [tuple(merge.split(" ")) for merge in merges])
    theirs.add_special_tokens({"additional_special_tokens": tokens[1:3]})
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text


def test_smollms_digits_stand_alone(llama: PreTrainedModel, tmp_path: Path):
    for pre in ("gpt-2", "smollm"):
        write_gguf(tmp_path / f"{pre}.gguf", llama, "llama", pre=pre)
        convert_gguf(tmp_path / f"{pre}.gguf", tmp_path / pre, silent)
    tokenizers = {pre: AutoTokenizer.from_pretrained(tmp_path / pre) for pre in ("gpt-2", "smollm")}
    assert len(tokenizers["gpt-2"].tokenize("1234567")) < 7  # the vocabulary has longer ones
    assert tokenizers["smollm"].tokenize("1234567") == list("1234567")


def test_filler_tokens_have_no_text(llama_file: Path, tmp_path: Path):
    convert_gguf(llama_file, tmp_path / "out", silent)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) < 320
    assert tokenizer.decode([319]) == ""


def write_sentencepiece(path: Path, model: PreTrainedModel, space_prefix: bool) -> None:
    """A SentencePiece vocabulary: bytes, letters, and pieces of words with scores."""
    words = ["▁the", "▁cat", "▁ca", "▁th", "▁t", "▁c", "at", "he", "▁a", "ing", "▁▁", "▁▁▁"]
    words += ["ll", "lo", "ello", "▁hello", "▁w", "or", "ld", "▁world"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz'.,!", "é", "日"]
    pieces = ["<unk>", "<s>", "</s>", "<turn>", "\n\n"]
    types = [2, 3, 3, 3, 4]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    pieces += words + letters
    types += [1] * (len(pieces) - len(types))
    scores = [0.0] * (len(pieces) - len(words) - len(letters))
    scores += [-float(rank) for rank in range(len(words) + len(letters))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": space_prefix,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.merges": None,
    }
    architecture = "llama" if space_prefix else "gemma3"
    write_gguf(path, model, architecture, metadata=metadata)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sentencepiece_ids_equal_those_of_transformers_own_reading(family: str, tmp_path: Path):
    model = random_model(FAMILIES[family])
    write_sentencepiece(tmp_path / "m.gguf", model, space_prefix=family == "llama")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    texts = [
        "the cat",
        "hello world",
        "the  cat   thing",
        "naïve 日本語 😀",
    ]
    if family == "gemma3":
        texts += ["a\n\nb", "cat<turn>cat"]
    for text in texts:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == expected, text
        assert ours(text).input_ids == [1, *expected]  # these vocabularies begin a text with BOS
        assert ours.decode(expected) == theirs.decode(expected)


def test_llama2s_text_begins_with_a_blank_also_after_an_added_token(tmp_path: Path):
    """As llama.cpp and the tokenizer.json of Llama 2 have it; transformers' reading does not."""
    write_sentencepiece(tmp_path / "m.gguf", random_model(FAMILIES["llama"]), space_prefix=True)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("cat<turn>cat") == ["▁cat", "<turn>", "▁cat"]
    assert tokenizer.decode(tokenizer("  the cat").input_ids[1:]) == "  the cat"


def test_ends_of_turns_are_known_and_the_chat_template_is_kept(
    llama: PreTrainedModel, tmp_path: Path
):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}é{% endfor %}"
    metadata = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": template}
    write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2]  # the file's <|endoftext|>, and <|im_end|>
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template


def test_a_file_is_converted_once_and_again_when_it_changes(llama: PreTrainedModel, tmp_path: Path):
    path, activities = tmp_path / "m.gguf", []

    def progress(activity: str, fraction: float | None) -> None:
        activities.append(fraction)

    write_gguf(path, llama, "llama")
    first = cached_gguf(path, tmp_path / "cache", progress)
    assert activities[-1] == 1.0
    fractions = [fraction for fraction in activities if fraction is not None]
    assert fractions == sorted(fractions)
    activities.clear()
    assert cached_gguf(path, tmp_path / "cache", progress) == first
    assert activities == []
    write_gguf(path, llama, "llama", metadata={"context_length": 64})
    second = cached_gguf(path, tmp_path / "cache", progress)
    assert second != first
    assert AutoConfig.from_pretrained(second).max_position_embeddings == 64


def test_several_that_convert_one_file_at_once_all_get_it(llama_file: Path, tmp_path: Path):
    barrier, done = threading.Barrier(4), []

    def convert() -> None:
        barrier.wait()
        convert_gguf(llama_file, tmp_path / "out", silent)
        done.append((tmp_path / "out/model.safetensors").stat().st_ino)

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 and len(set(done)) == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cannot read"),
        (b"GG", "is not a GGUF file"),
        (b"PK\3\4" + bytes(100), "is not a GGUF file"),
        (b"GGUF\3\0", "is not a whole GGUF file"),
        (header(version=1), "GGUF version 1"),
        (header(version=0x03000000), "little-endian"),
        (header(values=1), "a metadata key"),
        (header(values=1) + struct.pack("<Q", 2**60), "takes 1152921504606846976 bytes"),
        (header(values=1) + string("k") + struct.pack("<I", 99), "k has the unknown type 99"),
        (header(values=1) + string("k") + struct.pack("<IIQ", 9, 4, 2**62), "k at byte"),
        (header(values=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**40), "k at byte"),
        (header(tensors=1) + string("t") + struct.pack("<I", 9), "t has 9 dimensions"),
        (header(), "general.architecture is missing"),
    ],
)
def test_what_is_no_gguf_file_is_said_with_the_reason(content: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        convert_gguf(path, tmp_path / "out", silent)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"absent\.gguf"):
        cached_gguf(tmp_path / "absent.gguf", tmp_path, silent)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_off_anywhere_is_refused(share: float, llama_file: Path, tmp_path: Path):
    content = llama_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        convert_gguf(path, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_in_the_header_is_never_a_crash(
    data: st.DataObject, llama_file: Path, tmp_path: Path
):
    content = bytearray(llama_file.read_bytes())
    tensors = GGUFFile(llama_file).tensors.values()
    first = min(tensor.offset for tensor in tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, first - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    folder = tmp_path / "written"
    folder.mkdir(exist_ok=True)
    with suppress(ModelError):
        Conversion(path).write(folder, silent)


@pytest.mark.parametrize(
    ("metadata", "tensors", "problem"),
    [
        ({"general.architecture": "mamba"}, {}, "'mamba'; supported .* gemma3, llama, qwen2"),
        ({"split.count": 3}, {}, "llama-gguf-split"),
        ({"attention.head_count_kv": [2, 1]}, {}, "head_count_kv differs from layer to layer"),
        ({"rope.scaling.type": "odd"}, {}, "'odd'"),
        ({"tokenizer.ggml.pre": "strange"}, {}, "tokenizer.ggml.pre is 'strange'; supported"),
        ({"tokenizer.ggml.model": "t5"}, {}, "tokenizer.ggml.model is 't5'"),
        ({}, {"blk.0.ffn_gate_exps.weight": (2, 2)}, "no place for the tensor blk.0.ffn_gate_exps"),
        ({}, {"blk.0.attn_q.bias": (64,)}, "biases of attn_q"),
    ],
)
def test_what_there_is_no_code_for_is_refused_by_name(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    problem: str,
    llama: PreTrainedModel,
    tmp_path: Path,
):
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata, tensors=zeros)
    with pytest.raises(UnsupportedModel, match=problem):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"block_count": 3}, "the tensor blk.2.attn_norm.weight is missing"),
        ({"block_count": 2**31 - 1}, "the tensor blk.2.attn_norm.weight is missing"),
        ({"context_length": None}, "llama.context_length is missing"),
        ({"embedding_length": "64"}, "llama.embedding_length is '64'"),
        ({"attention.head_count": 0}, "0 attention heads"),
        ({"attention.head_count": 8}, "8 heads of 16 were expected"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "has 2 entries for 320 tokens"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "holds 'a b c'"),
        ({"tokenizer.ggml.merges": ["a qqqq"]}, "holds 'a qqqq'"),
    ],
)
def test_what_does_not_hold_together_is_refused_by_name(
    metadata: dict[str, Any], problem: str, llama: PreTrainedModel, tmp_path: Path
):
    write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata)
    with pytest.raises(ModelError, match=problem):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", silent)
