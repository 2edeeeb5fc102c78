"""Ids and texts equal transformers', of every kind of tokenizer; conversations; bad text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from mii.errors import ContextLengthExceeded, InvalidArgument, ModelError
from mii.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.gguf_writer import byte_level_vocabulary
from tests.models.texts import TEXTS

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role, please') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def byte_level_backend() -> Backend:
    tokens, merges = byte_level_vocabulary(320)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:3])
    backend.add_tokens([AddedToken("<tool▁call>", special=False)])
    return backend


def sentencepiece_backend(*, strip: bool = True) -> Backend:
    """As of Llama 2: blanks are ▁, unknown characters are bytes, BOS comes first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "é"]
    backend = Backend(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(tokens[:3])
    return backend


def word_backend() -> Backend:
    """As of BERT: not BPE, and its text is tidied by transformers."""
    words = ["[UNK]", "[CLS]", "hello", "world", ",", ".", "##s", "it", "'", "n", "t"]
    backend = Backend(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    return backend


def save(backend: Backend, folder: Path, **options: Any) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["smollm2", "bytes", "sentencepiece", "words"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """A tokenizer of ours, and transformers' of the same folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "smollm2":
        folder = request.getfixturevalue("smollm2")
    elif request.param == "bytes":
        save(byte_level_backend(), folder, eos_token="<|im_end|>")
    elif request.param == "sentencepiece":
        save(sentencepiece_backend(), folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    else:
        save(word_backend(), folder, clean_up_tokenization_spaces=True, unk_token="[UNK]")
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save(byte_level_backend(), tmp_path_factory.mktemp("bytes"), eos_token="<|im_end|>")
    return load_tokenizer(folder, TEMPLATE)


class TestEncode:
    def test_ids_equal_transformers(self, pair: tuple[Tokenizer, Any]):
        ours, theirs = pair
        for text in TEXTS:
            assert ours.encode(text) == theirs(text).input_ids, text
            plain = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode(text, add_special_tokens=False) == plain, text

    def test_lone_surrogates_are_replaced_and_pairs_joined(self, pair: tuple[Tokenizer, Any]):
        ours, _ = pair
        for given_, meant in {
            "a\ud83d b": "a\ufffd b",
            "\udbc0": "\ufffd",
            "\ude00\ud83d": "\ufffd\ufffd",
            "\ufeff\ud83d\ude00": "\ufeff😀",
        }.items():
            assert ours.encode(given_) == ours.encode(meant)

    def test_a_text_that_cannot_fit_is_refused_unread(self, smollm2: Path):
        tokenizer = load_tokenizer(smollm2)
        with pytest.raises(ContextLengthExceeded, match="100000000 characters.*8192 tokens"):
            tokenizer.encode("x" * 100_000_000, limit=8192)

    def test_the_longest_tokens_count(self, tmp_path: Path):
        backend = byte_level_backend()
        backend.add_tokens([AddedToken("=" * 1000)])
        tokenizer = load_tokenizer(save(backend, tmp_path))
        assert len(tokenizer.encode("=" * 3000, limit=3)) == 3

    def test_characters_that_the_tokenizer_composes_count_as_one(self, tmp_path: Path):
        backend = byte_level_backend()
        backend.add_tokens([AddedToken("é" * 200, normalized=True)])
        tokenizer = load_tokenizer(save(backend, tmp_path))
        assert len(tokenizer.encode("e\u0301" * 200, limit=1)) == 1

    def test_what_tokenizer_json_says_of_truncation_and_padding_does_not_count(
        self, tmp_path: Path
    ):
        backend = byte_level_backend()
        expected = backend.encode("The cat's thing").ids
        backend.enable_truncation(2)
        backend.enable_padding(length=40)
        assert load_tokenizer(save(backend, tmp_path)).encode("The cat's thing") == expected


class TestDecode:
    def test_text_equals_transformers(self, pair: tuple[Tokenizer, Any]):
        ours, theirs = pair
        for text in TEXTS:
            ids = theirs(text).input_ids
            for start in range(min(4, len(ids))):
                for skip in (True, False):
                    expected = theirs.decode(ids[start:], skip_special_tokens=skip)
                    assert ours.decode(ids[start:], skip) == expected

    def test_any_ids_decode_as_transformers_has_it(self, pair: tuple[Tokenizer, Any]):
        ours, theirs = pair

        @given(ids=st.lists(st.integers(0, len(theirs) - 1), max_size=12))
        def check(ids: list[int]) -> None:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

        check()

    def test_ids_without_a_token_have_no_text(self, pair: tuple[Tokenizer, Any]):
        ours, _ = pair
        ids = ours.encode("hello world")
        beyond = [ours.vocab_size, ours.vocab_size + 1000, 2**31]
        assert ours.decode([beyond[0], *ids, *beyond[1:]]) == ours.decode(ids)
        assert ours.token_bytes(beyond[0]) == ours.token_bytes(-1) == b""


class LetterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, without a fast backend."""

    vocab_size = 26

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + i): i for i in range(26)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) - 97

    def _convert_id_to_token(self, index: int) -> str:
        return chr(97 + index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_tokenizer_without_a_fast_backend_works_too():
    tokenizer = Tokenizer(LetterTokenizer(eos_token="</s>"), frozenset({26}))
    assert tokenizer.encode("abc</s>") == [0, 1, 2, 26]
    assert tokenizer.decode([0, 26, 1, 27, 5000]) == "ab"
    assert [tokenizer.token_bytes(i) for i in (2, 26, 27)] == [b"c", b"</s>", b""]
    assert tokenizer.byte_fallback == {}


class TestTokenBytes:
    def test_a_byte_level_texts_tokens_join_to_its_bytes(self, byte_level: Tokenizer):
        for text in (*TEXTS, "a<tool▁call>b"):
            ids = byte_level.encode(text.replace("\u0301", ""))
            joined = b"".join(map(byte_level.token_bytes, ids))
            assert joined == text.replace("\u0301", "").encode()

    def test_a_sentencepiece_texts_tokens_join_to_its_bytes(self, tmp_path: Path):
        tokenizer = load_tokenizer(save(sentencepiece_backend(), tmp_path, unk_token="<unk>"))
        for text in ("the cat é 😀 日本", "thé\n"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + text.encode()
        assert tokenizer.token_bytes(1) == b"<s>"

    def test_byte_fallback_is_what_the_decoder_falls_back_to(self, tmp_path: Path, smollm2: Path):
        tokenizer = load_tokenizer(save(sentencepiece_backend(), tmp_path, unk_token="<unk>"))
        assert tokenizer.byte_fallback == {3 + byte: byte for byte in range(256)}
        assert load_tokenizer(smollm2).byte_fallback == {}

    def test_tokens_written_like_bytes_are_text_to_a_decoder_without_fallback(self, tmp_path: Path):
        backend = sentencepiece_backend()
        backend.decoder = decoders.Fuse()
        tokenizer = load_tokenizer(save(backend, tmp_path, unk_token="<unk>"))
        assert tokenizer.byte_fallback == {}
        assert tokenizer.token_bytes(3 + 0x41) == b"<0x41>"


class TestSpecialTokens:
    def test_special_tokens_are_found_by_their_text(self, byte_level: Tokenizer):
        assert byte_level.special_token_id("<|im_end|>") == 2
        for text in ("<tool▁call>", "the", "", "<|nothing|>"):
            assert byte_level.special_token_id(text) is None

    @pytest.mark.parametrize(
        ("generation", "config", "tokenizer_eos", "expected"),
        [
            ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, "<|im_end|>", {7, 8, 9, 2}),
            ({"eos_token_id": 0}, {}, None, {0}),
            ({}, {"eos_token_id": None}, None, set()),
            (None, None, "<|im_end|>", {2}),
            (None, {"eos_token_id": [3, None, True]}, None, {3}),
        ],
    )
    def test_all_places_that_name_an_end_count(
        self,
        generation: dict[str, Any] | None,
        config: dict[str, Any] | None,
        tokenizer_eos: str | None,
        expected: set[int],
        tmp_path: Path,
    ):
        save(byte_level_backend(), tmp_path, eos_token=tokenizer_eos)
        for name, content in (("generation_config", generation), ("config", config)):
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        assert load_tokenizer(tmp_path).eos_token_ids == expected

    def test_ends_are_read_from_the_model_if_the_tokenizer_is_elsewhere(self, tmp_path: Path):
        save(byte_level_backend(), tmp_path / "tokenizer", eos_token="<|im_end|>")
        (tmp_path / "config.json").write_text('{"eos_token_id": 77}')
        tokenizer = load_tokenizer(tmp_path / "tokenizer", model_folder=tmp_path)
        assert tokenizer.eos_token_ids == {2, 77}


class TestChat:
    def test_smollm2s_text_and_ids_equal_transformers(self, smollm2: Path):
        ours, theirs = load_tokenizer(smollm2), AutoTokenizer.from_pretrained(smollm2)
        messages = [*USER, {"role": "assistant", "content": "ho"}, *USER]
        text = ours.render_chat(messages)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert ours.encode(text, add_special_tokens=False) == expected.input_ids

    def test_bos_comes_once(self, tmp_path: Path):
        folder = save(sentencepiece_backend(), tmp_path, bos_token="<s>", eos_token="</s>")
        tokenizer = load_tokenizer(folder, TEMPLATE)
        ids = tokenizer.encode(tokenizer.render_chat(USER), add_special_tokens=False)
        assert ids.count(1) == 1
        assert tokenizer.encode("hi").count(1) == 1

    def test_content_may_come_in_parts_or_not_at_all(self, byte_level: Tokenizer):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None},
            {"role": "assistant"},
        ]
        end = "<|im_end|>"
        expected = f"[user]ab{end}[assistant]{end}[assistant]{end}[assistant]"
        assert byte_level.render_chat(messages) == expected

    def test_the_template_gets_tools_and_further_variables(self, byte_level: Tokenizer):
        tools = [{"type": "function", "function": {"name": "f"}}]
        text = byte_level.render_chat(USER, tools=tools, template_kwargs={"shout": True})
        assert text == f"[user]hi<|im_end|>{json.dumps(tools)}![assistant]"

    def test_the_last_message_can_be_continued(self, byte_level: Tokenizer):
        messages = [*USER, {"role": "assistant", "content": "Well"}]
        text = byte_level.render_chat(messages, continue_final_message=True)
        assert text == "[user]hi<|im_end|>[assistant]Well"
        assert byte_level.render_chat(USER, add_generation_prompt=False) == "[user]hi<|im_end|>"

    def test_the_templates_own_words_reach_the_user(self, byte_level: Tokenizer):
        with pytest.raises(InvalidArgument, match="no system role, please") as caught:
            byte_level.render_chat([{"role": "system", "content": "x"}])
        assert caught.value.field == "messages"

    def test_a_template_with_a_fault_is_the_requests_error(self, tmp_path: Path):
        save(byte_level_backend(), tmp_path)
        for template in ("{{ messages | nothing }}", "{% for %}", "{{ 1 / 0 }}"):
            with pytest.raises(InvalidArgument, match="chat template"):
                load_tokenizer(tmp_path, template).render_chat(USER)

    def test_a_model_without_a_template_says_so(self, tmp_path: Path):
        tokenizer = load_tokenizer(save(byte_level_backend(), tmp_path))
        assert not tokenizer.has_chat_template
        with pytest.raises(InvalidArgument, match="has no chat template"):
            tokenizer.render_chat(USER)

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([], "messages"),
            (["hi"], r"messages\[0\]"),
            ([{"content": "hi"}], r"messages\[0\].role"),
            ([*USER, {"role": 7, "content": "hi"}], r"messages\[1\].role"),
            ([{"role": "user", "content": 7}], r"messages\[0\].content"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content"),
            (
                [{"role": "user", "content": [{"type": "text", "text": 1}]}],
                r"messages\[0\].content",
            ),
        ],
    )
    def test_what_is_no_conversation_is_refused_by_field(
        self, messages: Any, field: str, byte_level: Tokenizer
    ):
        with pytest.raises(InvalidArgument, match=f"^{field} "):
            byte_level.render_chat(messages)

    @pytest.mark.parametrize("name", ["tokenize", "chat_template", "conversation", "truncation"])
    def test_template_variables_cannot_steer_the_rendering(self, name: str, byte_level: Tokenizer):
        with pytest.raises(InvalidArgument, match=name):
            byte_level.render_chat(USER, template_kwargs={name: "x"})

    def test_a_template_can_be_given(self, smollm2: Path):
        tokenizer = load_tokenizer(smollm2, "<{{ messages[0].content }}>")
        assert tokenizer.render_chat(USER) == "<hi>"


class TestLoad:
    def test_a_folder_without_a_tokenizer_is_named(self, tmp_path: Path):
        with pytest.raises(ModelError, match=str(tmp_path)):
            load_tokenizer(tmp_path)

    def test_a_damaged_tokenizer_is_named(self, smollm2: Path, tmp_path: Path):
        for name in ("config.json", "tokenizer_config.json"):
            shutil.copy(smollm2 / name, tmp_path)
        content = (smollm2 / "tokenizer.json").read_bytes()
        for damaged in (b"", b"{}", content[:1000]):
            (tmp_path / "tokenizer.json").write_bytes(damaged)
            with pytest.raises(ModelError, match=str(tmp_path)):
                load_tokenizer(tmp_path)

    def test_code_beside_a_tokenizer_is_not_run(self, tmp_path: Path):
        save(byte_level_backend(), tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["tokenizer_class"] = "Own"
        config["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
        with pytest.raises(ModelError, match="trust_remote_code"):
            load_tokenizer(tmp_path)
        assert not (tmp_path / "ran").exists()
