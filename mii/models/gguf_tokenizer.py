"""Builds a Hugging Face tokenizer from the vocabulary inside a GGUF file.

GGUF keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. Two kinds occur in
the families that are served: byte-level BPE with merges ("gpt2"), and SentencePiece BPE with a
score for each piece ("llama"), whose merges are found again from the scores.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mii.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_PADDING_NAME = re.compile(r"\[PAD\d+\]")  # llama.cpp's filler up to the embedding's rows

# How text is cut before BPE, by tokenizer.ggml.pre. The patterns are those of the models' own
# tokenizers, as transformers states them too.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3, _QWEN2 = ("llama-bpe", "llama3", "llama-v3"), ("qwen2", "deepseek-r1-qwen")
_DIGITS, _GPT2 = ("smollm", "starcoder", "refact"), ("gpt-2",)


def build_tokenizer(metadata: dict[str, Any], path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and the content of its tokenizer_config.json.

    Args:
        metadata: of the GGUF file.
        path: of the GGUF file, for messages.

    Raises:
        ModelError: if the vocabulary is missing or does not hold together.
        UnsupportedModel: for a kind of tokenizer that there is no code for.
    """
    from tokenizers import processors

    vocabulary = _Vocabulary(metadata, path)
    if vocabulary.kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise UnsupportedModel(
            f"{path}: tokenizer.ggml.model is {vocabulary.kind!r}; 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece) can be read"
        )
    vocabulary.add_tokens(tokenizer)
    before = [vocabulary.special["bos"]] if vocabulary.adds("bos") else []
    after = [vocabulary.special["eos"]] if vocabulary.adds("eos") else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(before),
        "add_eos_token": bool(after),
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token for role, token in vocabulary.special.items()},
    }
    return tokenizer, config


class _Vocabulary:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, metadata: dict[str, Any], path: Path) -> None:
        self.path = path
        self.kind: str = metadata.get("tokenizer.ggml.model", "none")
        self.pre: str = metadata.get("tokenizer.ggml.pre", "default")
        self.tokens: list[str] = self._list(metadata, "tokens", str)
        self.types: list[int] = [_NORMAL] * len(self.tokens)
        if "tokenizer.ggml.token_type" in metadata:
            self.types = self._list(metadata, "token_type", int, len(self.tokens))
        self.metadata = metadata
        self.ids = {
            token: index
            for index, token in enumerate(self.tokens)
            if not (self.types[index] == _UNUSED and _PADDING_NAME.fullmatch(token))
        }
        self.special: dict[str, str] = {}
        for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
            index = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(index, int) and 0 <= index < len(self.tokens):
                self.special[role] = self.tokens[index]

    def _list(
        self, metadata: dict[str, Any], key: str, kind: type, length: int | None = None
    ) -> list[Any]:
        values = metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not values or not isinstance(values[0], kind):
            raise ModelError(f"{self.path} holds no tokenizer: tokenizer.ggml.{key} is missing")
        if length is not None and len(values) != length:
            raise ModelError(
                f"{self.path}: tokenizer.ggml.{key} has {len(values)} entries for {length} tokens"
            )
        return values

    def adds(self, role: str) -> bool:
        """Whether text is encoded with this token at its start ("bos") or end ("eos")."""
        by_default = role == "bos" and (self.kind == "llama" or self.pre in _LLAMA3)
        wanted = self.metadata.get(f"tokenizer.ggml.add_{role}_token", by_default)
        return bool(wanted) and role in self.special

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges that the file lists."""
        merges = [tuple(merge.split(" ")) for merge in self._list(self.metadata, "merges", str)]
        for merge in merges:
            if len(merge) != 2 or not {*merge, "".join(merge)} <= self.ids.keys():
                raise ModelError(
                    f"{self.path}: tokenizer.ggml.merges holds {' '.join(merge)!r}, whose parts "
                    "are not two tokens that join to a third"
                )
        return merges

    def merges_by_score(self) -> list[tuple[str, str]]:
        """Find the merges of a SentencePiece vocabulary: the best piece's first."""
        scores = self._list(self.metadata, "scores", float, len(self.tokens))
        found = []
        for piece, index in self.ids.items():
            if self.types[index] != _NORMAL:  # others are never reached by merging
                continue
            splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            pairs = [pair for pair in splits if pair[0] in self.ids and pair[1] in self.ids]
            pairs.sort(key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))
            found += [(scores[index], pair) for pair in pairs]
        found.sort(key=lambda entry: -entry[0])
        return [pair for _, pair in found]

    def add_tokens(self, tokenizer: Tokenizer) -> None:
        """Register the tokens that are matched whole in the text, before anything else."""
        from tokenizers import AddedToken

        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            tokens = [
                AddedToken(token, special=special, normalized=False)
                for token, index in self.ids.items()
                if self.types[index] == kind
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE, as of GPT-2, with the model's own way to cut text into words."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = vocabulary.pre
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges(),
            ignore_merges=pre in _LLAMA3,
        )
    )
    if pre in _LLAMA3 or pre in _QWEN2:
        pattern = _LLAMA3_PATTERN if pre in _LLAMA3 else _QWEN2_PATTERN
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        known = ", ".join((*_LLAMA3, *_QWEN2, *_DIGITS, *_GPT2))
        raise UnsupportedModel(
            f"{vocabulary.path}: tokenizer.ggml.pre is {pre!r}; supported are {known}"
        )
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as of Llama 2 and Gemma."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    listed = "tokenizer.ggml.merges" in vocabulary.metadata
    merges = vocabulary.merges() if listed else vocabulary.merges_by_score()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=vocabulary.special.get("unk"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
