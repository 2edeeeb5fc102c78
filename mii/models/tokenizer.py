"""Text to ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from mii.errors import ContextLengthExceeded, InvalidArgument, ModelError
from mii.models.chat import check_variables, flatten_messages, tool_format_of
from mii.models.checkpoint import read_eos_token_ids

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"

# A token stands for at most as many characters as its own text has, but for two exceptions: NFC
# makes one character out of up to four, and a token that swallows the blanks beside it may stand
# for any number. The floor is far above what a text of words has, a few characters a token.
_LEAST_LONGEST_TOKEN = 128
_MAX_COMPOSED = 4


class TokenizerLike(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        ...

    @property
    def tool_format(self) -> str:
        """How the model writes calls of tools, see `mii.models.chat.tool_format_of`."""
        ...

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

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        ...

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

    May be used from any thread.

    Args:
        tokenizer: a PreTrainedTokenizerBase.
        eos_token_ids: every id that ends an answer.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(tokenizer)  # ids that have a token are below it
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # A tokenizer.json may ask for these; transformers does not do them unless told to.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._specials = {
            str(token): token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.special_ids = frozenset(self._specials.values())
        is_bpe = self._backend is not None and type(self._backend.model).__name__ == "BPE"
        # transformers removes blanks before punctuation, if told to, from all but BPE's text.
        self._decodes_plainly = self._backend is not None and (
            is_bpe or not tokenizer.clean_up_tokenization_spaces
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._tokenizer.chat_template is not None

    @property
    def tool_format(self) -> str:
        """How the model writes calls of tools, see `mii.models.chat.tool_format_of`."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):  # by name
            template = template.get("tool_use") or template.get("default")
        return tool_format_of(template or "")

    @cached_property
    def byte_fallback(self) -> Mapping[int, int]:
        """The byte values of tokens like <0xE4>, by id; empty if the decoder has no fallback."""
        vocabulary = self._tokenizer.get_vocab()
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        found = {vocabulary[name]: byte for name, byte in names.items() if name in vocabulary}
        high = next((token for token, byte in found.items() if byte >= 0x80), None)
        # Where such tokens exist but the decoder does not know them, they are text like any other.
        return found if high is not None and self.decode([high]) == _REPLACEMENT else {}

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]:
        """Return the ids of a text. Lone surrogates become U+FFFD.

        Args:
            text: what to encode.
            add_special_tokens: put the tokens around it that the tokenizer puts around a text.
            limit: refuse, without encoding it, a text so long that it has more tokens than this.

        Raises:
            ContextLengthExceeded: see `limit`.
        """
        if limit is not None and len(text) > limit * self._characters_per_token:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters, which is more than the context of {limit} "
                "tokens can hold: shorten the prompt",
                "prompt",
            )
        if _LONE_SURROGATE.search(text):  # pairs of them, as from JSON's \ud83d\ude00, are joined
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some ids; ids without a token have none."""
        if self._decodes_plainly:
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
        token = None
        if 0 <= token_id < self.vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return str(token).encode()
        if self._is_byte_level:
            # As the decoder has it, a token that is not written in this alphabet is plain text.
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return str(token).encode()
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

        Args:
            messages: each with a role; a content of text parts is joined, null becomes "".
            tools: JSON Schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end within the last message, for the model to go on with it.
            template_kwargs: further variables of the template.

        Raises:
            InvalidArgument: if the model has no template, or the template refuses.
        """
        if not self.has_chat_template:
            raise InvalidArgument(
                "this model has no chat template: send a plain prompt, or serve it with "
                "chat_template=",
                "messages",
            )
        conversation = flatten_messages(messages)
        variables = dict(template_kwargs or {})
        check_variables(variables, self._tokenizer.apply_chat_template)
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        return str(text)

    @cached_property
    def _characters_per_token(self) -> int:
        longest = max(map(len, self._tokenizer.get_vocab()), default=0)
        return max(longest, _LEAST_LONGEST_TOKEN) * (_MAX_COMPOSED if self._composes else 1)

    @property
    def _composes(self) -> bool:
        if self._backend is None:
            return True  # as far as can be seen
        normalizer = self._backend.normalizer
        return normalizer is not None and b"NF" in normalizer.__getstate__()  # its JSON

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder if self._backend is not None else None
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()  # its JSON


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's way of writing the 256 bytes as visible characters, inverted."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def load_tokenizer(
    folder: Path,
    chat_template: str | None = None,
    *,
    model_folder: Path | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load the tokenizer of a folder in Hugging Face form.

    Args:
        folder: holds the tokenizer's files.
        chat_template: a Jinja template in place of the model's.
        model_folder: where the ids that end an answer are read, if it is another one.
        trust_remote_code: run a tokenizer's own code from its folder.

    Raises:
        ModelError: if there is no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    ends = read_eos_token_ids(model_folder or folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds
        said = " ".join(str(error).split())[:600] or type(error).__name__
        raise ModelError(f"no tokenizer can be loaded from {folder}: {said}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if isinstance(tokenizer.eos_token_id, int):
        ends |= {tokenizer.eos_token_id}
    return Tokenizer(tokenizer, ends)
