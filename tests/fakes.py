"""A model and a tokenizer that are small enough to be obvious, behind the real interfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from mii.attention.batch import RaggedBatch
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.executor import HostExecutor
from mii.engine.generator import Generator
from mii.engine.prompts import ModelLimits, PromptProcessor
from mii.engine.ragged import RaggedBatchWrapper
from mii.engine.runner import ModelRunner
from mii.engine.sampler import Sampler
from mii.engine.state_manager import DSStateManager

EOS = 256
BOS = 257
VOCAB = 260


def next_token(context: Sequence[int]) -> int:
    """The fake model's greedy continuation: a pure function of all tokens before it."""
    digest = blake2b(bytes(str(list(context)), "ascii"), digest_size=4).digest()
    return 32 + int.from_bytes(digest, "little") % 95  # a printable byte, never EOS


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model answers greedily to a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeModel:
    """Keeps token ids where a real model keeps keys and values, and reads them back through the
    block tables: a wrong block, slot, position or length gives a wrong next token."""

    vocab_size = VOCAB
    static_length = None
    head_dim = 1

    def __init__(self, max_length: int = 4096) -> None:
        self.max_length = max_length
        self.batches: list[RaggedBatch] = []

    def cache_bytes_per_block(self, block_size: int) -> int:
        return 8 * block_size

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._cache = torch.full((num_blocks * block_size,), -1)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        self.batches.append(batch)
        self._cache[batch.kv_slots] = batch.token_ids
        rows = []
        for index, length in enumerate(batch.host_context_lengths):
            if int(batch.query_starts[index + 1]) - 1 not in batch.logits_rows:
                continue
            blocks = batch.block_tables[index].long() * self._block_size
            slots = (blocks[:, None] + torch.arange(self._block_size)).flatten()[:length]
            row = torch.zeros(VOCAB)
            row[next_token(self._cache[slots].tolist())] = 10.0
            rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


class ByteTokenizer:
    """One token for each byte of UTF-8, then EOS and BOS."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})
    special_ids = frozenset({EOS, BOS})
    has_chat_template = True
    tool_format = ""
    byte_fallback: Mapping[int, int] = {}

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def special_token_id(self, text: str) -> int | None:
        return {"<eos>": EOS, "<bos>": BOS}.get(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "


def fake_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    token_budget: int = 16,
    max_sequences: int = 8,
    max_length: int = 256,
    prefix_caching: bool = True,
    model: FakeModel | None = None,
) -> InferenceEngineV2:
    """The real engine over the fake model."""
    model = model or FakeModel(max_length)
    model.allocate_cache(num_blocks, block_size)
    ragged = RaggedBatchWrapper(256, max_length, block_size, torch.device("cpu"))
    return InferenceEngineV2(
        HostExecutor(ModelRunner(model, ragged), Sampler()),
        DSStateManager(num_blocks, block_size, 256, max_length, prefix_caching),
        token_budget=token_budget,
        max_sequences=max_sequences,
    )


def fake_generator(*, max_length: int = 256, max_requests: int = 256, **options: Any) -> Generator:
    """The real generator over the fake model and the byte tokenizer."""
    limits = ModelLimits(VOCAB, max_length, frozenset({EOS}), {})
    prompts = PromptProcessor(ByteTokenizer(), limits)
    return Generator(fake_engine(max_length=max_length, **options), prompts, max_requests)
