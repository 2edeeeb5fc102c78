"""Text to ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from mii.errors import ContextLengthExceeded, InvalidArgument, ModelError

# The longest piece of text that one token may stand for, with room to spare: a tokenizer's longest
# tokens are runs of blanks or of one character.
_LEAST_LONGEST_TOKEN = 128


class TokenizerLike(Protocol):
    """What the engine asks of a tokenizer."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool

    @property
    def byte_fallback(self) -> Mapping[int, int]:
        """The byte values of tokens like <0xE4>, by id; empty if the decoder has no fallback."""
        ...

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def special_token_id(self, text: str) -> int | None: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...


class Tokenizer:
    """A tokenizer of transformers. Its fast backend, where there is one, is used directly: the
    wrapper around it takes ten times as long for a handful of ids.

    Args:
        tokenizer: a PreTrainedTokenizerBase.
        eos_token_ids: every id that ends an answer.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(tokenizer)
        self._specials = {
            str(token): token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._special_ids = frozenset(self._specials.values())
        is_bpe = self._backend is not None and type(self._backend.model).__name__ == "BPE"
        # transformers tidies blanks before punctuation up for tokenizers other than BPE.
        self._is_plain = self._backend is not None and (
            is_bpe or not tokenizer.clean_up_tokenization_spaces
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._tokenizer.chat_template is not None

    @cached_property
    def byte_fallback(self) -> Mapping[int, int]:
        """The byte values of tokens like <0xE4>, by id; empty if the decoder has no fallback."""
        found = {self._id_of(f"<0x{byte:02X}>"): byte for byte in range(256)}
        values = {token: byte for token, byte in found.items() if token is not None}
        high = next((token for token, byte in values.items() if byte >= 0x80), None)
        # Where such tokens exist but the decoder does not know them, they are text like any other.
        return values if high is not None and self.decode([high]) == "\ufffd" else {}

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]:
        """Return the ids of a text. Lone surrogates become U+FFFD.

        Args:
            text: what to encode.
            add_special_tokens: put the tokens around it that the tokenizer puts around a text.
            limit: refuse a text that has more tokens than this for certain, without encoding it.

        Raises:
            ContextLengthExceeded: see `limit`.
        """
        if limit is not None and len(text) > limit * self._longest_token:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters, more than {limit} tokens, which is the "
                "context, can hold: shorten the prompt",
                "prompt",
            )
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self._backend is not None:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some ids; ids without a token have none."""
        if self._is_plain:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        known = [i for i in ids if i < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which may be part of a character.

        A special token stands for its own name, an id without a token for nothing.
        """
        if token_id in self.byte_fallback:
            return bytes([self.byte_fallback[token_id]])
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return str(token).encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF_CHARACTER.get(c, ord("?") & 0xFF) for c in token)
        return str(token).replace("\u2581", " ").encode()

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so, or None."""
        return self._specials.get(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the text that the model was trained on.

        Encode it without special tokens: the template puts in its own.

        Raises:
            InvalidArgument: if the model has no template, or the template refuses.
        """
        if not self.has_chat_template:
            raise InvalidArgument(
                "this model has no chat template: use /v1/completions, or serve it with "
                "chat_template=",
                "messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [_flat(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template may raise anything: it is a program
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        return str(text)

    def _id_of(self, token: str) -> int | None:
        found = self._tokenizer.get_vocab().get(token) if self._backend is None else None
        if self._backend is not None:
            found = self._backend.token_to_id(token)
        return found

    @cached_property
    def _longest_token(self) -> int:
        longest = max(map(len, self._tokenizer.get_vocab()), default=0)
        return max(longest, _LEAST_LONGEST_TOKEN)

    @cached_property
    def _is_byte_level(self) -> bool:
        if self._backend is None or self._backend.decoder is None:
            return False
        return "ByteLevel" in str(json.loads(self._backend.to_str()).get("decoder"))


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's way of writing the 256 bytes as visible characters, inverted."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    others = (byte for byte in range(256) if byte not in visible)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a string: text parts joined, nothing for null."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = []
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise InvalidArgument.of("messages content", part, "text parts: {type, text}")
            parts.append(part["text"])
        content = "".join(parts)
    return {**message, "content": content if content is not None else ""}


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a folder in Hugging Face form.

    Args:
        folder: holds the tokenizer's files.
        chat_template: a template, or the path of a file that holds one, in place of the model's.

    Raises:
        ModelError: if there is no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"no tokenizer can be loaded from {folder}: {error}") from error
    if chat_template is not None:
        path = Path(chat_template)
        is_file = len(chat_template) < 4096 and "\n" not in chat_template and path.is_file()
        tokenizer.chat_template = path.read_text("utf-8") if is_file else chat_template
    return Tokenizer(tokenizer, _eos_token_ids(folder, tokenizer))


def _eos_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends an answer: generation_config.json's, config.json's, the
    tokenizer's."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text("utf-8")).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
    return frozenset(i for i in found if isinstance(i, int))
