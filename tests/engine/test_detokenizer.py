"""Streamed pieces of text, against the tokenizer's decode of all ids at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mii.engine.detokenizer import MAX_HELD_BYTES, Detokenizer

SMOLLM2 = Path.home() / ".cache/mii/models/smollm2/tokenizer.json"
TEXTS = [
    "The capital of France is Paris. It's home to 2,102,650 people!",
    "机器学习是人工智能的一个分支。深度学习使用神经网络。",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "🫠🫠🫠 👩‍👩‍👧‍👦 🇫🇷 e\u0301 ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "def f(x):\n    if x > 0:\n\t\treturn  [x] * 3  # \u2192 \r\n\n\n    pass\n",
    "   leading and trailing   ",
    "ASCII \x00 null, \ufffd replacement, ▁ lower block",
    "",
]


class Decoder:
    """What a detokenizer asks of a tokenizer, over a plain one."""

    def __init__(self, tokenizer: Tokenizer, byte_fallback: Mapping[int, int] | None = None):
        self.tokenizer = tokenizer
        self.byte_fallback = byte_fallback or {}
        self.decoded = 0  # ids decoded so far
        self.vocab_size = tokenizer.get_vocab_size()

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def byte_level() -> Decoder:
    """A GPT-2 kind of tokenizer whose tokens cut through characters and words as they like."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = [text[i : i + 9] for text in TEXTS for i in range(0, len(text), 4)]
    tokenizer.train_from_iterator([*pieces, *pieces], trainer)
    tokenizer.add_tokens([AddedToken("<tool▁call>", special=False)])
    return Decoder(tokenizer)


def sentencepiece(decoder: decoders.Decoder) -> Decoder:
    """A Llama 2 kind of tokenizer: blanks as U+2581, and tokens for bytes."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [
        "▁the",
        "▁a",
        "▁",
        "▁▁",
        "▁▁▁▁",
        "the",
        "ing",
        "s",
        ".",
        "你",
        "好",
        "é",
        "\ufffd",
        "\n",
    ]
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz'," if c not in words]
    vocab = {token: i for i, token in enumerate([*specials, *byte_tokens, *words, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(specials)
    tokenizer.decoder = decoder
    return Decoder(tokenizer, {3 + byte: byte for byte in range(256)})


def llama() -> Decoder:
    return sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def gemma() -> Decoder:
    return sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def metaspace() -> Decoder:
    """The Metaspace decoder knows no bytes: their tokens are text like any other."""
    decoder = sentencepiece(decoders.Metaspace())
    decoder.byte_fallback = {}
    return decoder


def word_piece() -> Decoder:
    words = ["[UNK]", "[CLS]", "[SEP]", "do", "not", "##n", "'", "##t", "n't", ".", ",", "'s", "w"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(words[:3])
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return Decoder(tokenizer)


def end_of_word() -> Decoder:
    """An original GPT kind: a token's end of word is a blank, except at the very end."""
    words = ["<unk>", "th", "e</w>", "a</w>", "</w>", ".</w>", "x"]
    vocab = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return Decoder(tokenizer)


def no_decoder() -> Decoder:
    vocab = {"a": 0, "bc": 1, "?": 2}
    return Decoder(Tokenizer(models.WordLevel(vocab, unk_token="?")))


KINDS = {
    make.__name__: make()
    for make in (byte_level, llama, gemma, metaspace, word_piece, end_of_word, no_decoder)
}
if SMOLLM2.exists():
    KINDS["smollm2"] = Decoder(Tokenizer.from_file(str(SMOLLM2)))


def pieces_of(decoder: Decoder, ids: Sequence[int], size: int = 1) -> list[str]:
    detokenizer = Detokenizer(decoder)
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


def ids_of(decoder: Decoder) -> st.SearchStrategy[list[int]]:
    """Ids of any kind, some beyond the vocabulary."""
    return st.lists(st.integers(0, decoder.vocab_size + 2), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_ids_join_to_the_decode_of_all(kind: str) -> None:
    decoder = KINDS[kind]

    @given(ids_of(decoder), st.integers(1, 5))
    @settings(max_examples=300, deadline=None)
    def check(ids: list[int], size: int) -> None:
        assert "".join(pieces_of(decoder, ids, size)) == decoder.decode(ids)

    check()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_runs_of_byte_tokens_join_to_the_decode_of_all(kind: str) -> None:
    """Among bytes that often make characters, words and specials in between."""
    decoder = KINDS[kind]
    characters = st.sampled_from(["é", "你", "😀", " ", "a"]).map(
        lambda c: [3 + byte for byte in c.encode()]
    )
    others = st.one_of(st.integers(0, 2), st.integers(259, decoder.vocab_size - 1)).map(
        lambda i: [i]
    )
    some_bytes = st.lists(st.integers(3, 258), max_size=2)

    @given(st.lists(st.one_of(characters, characters, others, some_bytes), max_size=9))
    @settings(max_examples=600, deadline=None)
    @example([[3 + byte for byte in b"\xe4\xbd\xa0\xe4"]])  # what came before is replaced, too
    def check(groups: list[list[int]]) -> None:
        ids = [token for group in groups for token in group]
        assert "".join(pieces_of(decoder, ids)) == decoder.decode(ids)

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("byte_level", "smollm2")])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_all_kinds_come_back(kind: str, text: str) -> None:
    decoder = KINDS[kind]
    ids = decoder.encode(text)
    pieces = pieces_of(decoder, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:  # no half characters are ever shown
        assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_text_is_held_back_for_an_incomplete_character_only() -> None:
    decoder = KINDS["byte_level"]
    ids = decoder.encode(TEXTS[1] + TEXTS[3])
    detokenizer, shown = Detokenizer(decoder), ""
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push([token])
        assert decoder.decode(ids[:count]).removesuffix("\ufffd") == shown


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("byte_level", "smollm2")])
def test_invalid_bytes_for_ever_keep_flowing_at_a_flat_cost(kind: str) -> None:
    decoder = KINDS[kind]
    lone = decoder.tokenizer.token_to_id(byte_level_name(0x80))
    detokenizer, shown, costs = Detokenizer(decoder), "", []
    for count in range(1, 500):
        before = decoder.decoded
        shown += detokenizer.push([lone])
        costs.append(decoder.decoded - before)
        assert count - 1 <= len(shown) <= count
    assert max(costs[400:]) <= max(costs[:100])
    assert shown + detokenizer.flush() == "\ufffd" * 499


@pytest.mark.parametrize("count", range(16))
def test_a_character_after_any_number_of_invalid_bytes_is_whole(count: int) -> None:
    decoder = KINDS["byte_level"]
    data = bytes([0x80] * count) + "😀".encode()
    ids = [decoder.tokenizer.token_to_id(byte_level_name(byte)) for byte in data]
    assert "".join(pieces_of(decoder, ids)) == "\ufffd" * count + "😀"


def byte_level_name(byte: int) -> str:
    """How byte-level vocabularies write a byte: visible ones as themselves, others from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return chr(byte if byte in visible else 0x100 + sum(b not in visible for b in range(byte)))


def test_tokens_that_never_end_with_a_character_stay_at_a_flat_cost() -> None:
    """Each token ends one character and begins the next."""
    text = "你" * 400
    data = text.encode()
    pieces = [data[:2], *(data[i : i + 3] for i in range(2, len(data) - 3, 3)), data[-1:]]

    class Bytes:
        byte_fallback: Mapping[int, int] = {}
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    decoder, shown = Bytes(), ""
    detokenizer = Detokenizer(decoder)
    for token in range(len(pieces)):
        before = decoder.decoded
        shown += detokenizer.push([token])
        assert decoder.decoded - before <= 20
        assert len(shown) >= token - 1
    assert shown + detokenizer.flush() == text


def test_special_tokens_for_ever_leave_nothing_behind() -> None:
    decoder = KINDS["byte_level"]
    detokenizer = Detokenizer(decoder)
    half, rest = (decoder.tokenizer.token_to_id(byte_level_name(byte)) for byte in "é".encode())
    assert detokenizer.push([half]) == ""
    for _ in range(100):
        before = decoder.decoded
        assert detokenizer.push([0]) == ""
        assert decoder.decoded - before <= 3
    assert detokenizer.push([rest]) == "é"


def test_the_first_words_blank_is_as_in_the_whole() -> None:
    decoder = KINDS["llama"]
    the = decoder.tokenizer.token_to_id("▁the")
    blank = decoder.tokenizer.token_to_id("▁")
    assert pieces_of(decoder, [the, the, the]) == ["the", " the", " the", ""]
    assert pieces_of(decoder, [blank, the, blank]) == ["", " the", " ", ""]
    assert pieces_of(KINDS["gemma"], [the, the]) == [" the", " the", ""]


def byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def test_a_run_of_byte_tokens_is_shown_when_it_ends_or_is_past_saving() -> None:
    the = KINDS["llama"].tokenizer.token_to_id("▁the")
    assert pieces_of(KINDS["llama"], [*byte_ids("é".encode()), the]) == ["", "", "é the", ""]
    spoiled = pieces_of(KINDS["llama"], byte_ids(b"A\xffAA"))
    assert spoiled == ["", "\ufffd\ufffd", "\ufffd", "\ufffd", ""]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_an_endless_run_of_byte_tokens_flows_by_characters(kind: str) -> None:
    decoder = KINDS[kind]
    text = " 😀" * 100
    ids = byte_ids(text.encode())
    pieces = pieces_of(decoder, ids)
    assert "".join(pieces) == decoder.decode(ids)
    assert not any(pieces[:MAX_HELD_BYTES])
    assert set(pieces[MAX_HELD_BYTES + 5 : -1]) == {"", " ", "😀"}


def test_a_long_run_that_turns_out_invalid_keeps_what_was_shown() -> None:
    """The one exception: the whole decode would have replaced all of it."""
    text = "你" * 20
    shown = "".join(pieces_of(KINDS["gemma"], byte_ids(text.encode() + b"\xe4\xbd")))
    assert shown == text + "\ufffd\ufffd"


def test_long_texts_cost_the_same_per_token_at_their_end() -> None:
    for kind in ("byte_level", "llama", "word_piece"):
        decoder = KINDS[kind]
        ids = [5 + (7 * i) % (decoder.vocab_size - 5) for i in range(4000)]
        detokenizer, costs = Detokenizer(decoder), []
        for token in ids:
            before = decoder.decoded
            detokenizer.push([token])
            costs.append(decoder.decoded - before)
        assert sum(costs[-400:]) <= 1.5 * sum(costs[:400])
