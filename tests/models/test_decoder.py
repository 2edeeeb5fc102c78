"""Logits equal transformers', however a sequence is cut into steps and whatever runs beside it."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from mii.engine.plan import PlannedSequence, StepPlan
from mii.engine.ragged import RaggedBatchWrapper
from mii.models.decoder import Decoder
from tests.models.tiny import CONFIGS, decoder_of, tiny_model

BLOCK = 8


class Driver:
    """Feeds sequences to a decoder in pieces, through plans and scattered blocks."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        decoder.allocate_cache(64, BLOCK)
        self.ragged = RaggedBatchWrapper(8, 256, BLOCK, decoder.device)
        self.free = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
        self.done: dict[int, int] = {}
        self.prompt: dict[int, int] = {}

    def step(self, pieces: dict[int, list[int]], rope_length: dict[int, int] | None = None):
        planned = []
        for uid, ids in sorted(pieces.items(), key=lambda item: len(item[1]) > 1):
            start = self.done.get(uid, 0)
            length = (rope_length or {}).get(uid, self.prompt.setdefault(uid, len(ids)))
            wanted = -(-(start + len(ids)) // BLOCK) - -(-start // BLOCK)
            blocks = tuple(self.free.pop() for _ in range(wanted))
            planned.append(
                PlannedSequence(
                    uid, uid, start, len(ids), tuple(ids), blocks, length, True, first=start == 0
                )
            )
            self.done[uid] = start + len(ids)
        decodes = sum(p.num_tokens == 1 for p in planned)
        plan = StepPlan(0, tuple(planned), decodes)
        with torch.inference_mode():
            logits = self.decoder.forward(self.ragged.build(plan))
        return {p.uid: row for p, row in zip(planned, logits, strict=True)}


def reference(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).norm() / expected.norm()
    assert error < 1e-4, float(error)
    assert actual.argmax() == expected.argmax()


def ids_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_prompts_side_by_side(name: str) -> None:
    model = tiny_model(name)
    prompts = {uid: ids_of(n, uid) for uid, n in enumerate((1, 7, 8, 31, 32, 33, 64))}
    rows = Driver(decoder_of(model)).step(prompts)
    for uid, ids in prompts.items():
        assert_close(rows[uid], reference(model, ids)[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_in_chunks_then_decodes_among_others(name: str) -> None:
    """What transformers computes in one go and then token by token, cut up in every way."""
    model = tiny_model(name)
    driver = Driver(decoder_of(model))
    long, short = ids_of(70, 1), ids_of(9, 2)
    lengths = {1: 50, 2: 5}
    driver.step({1: long[:13]}, lengths)
    driver.step({1: long[13:14], 2: short[:5]}, lengths)
    driver.step({1: long[14:45], 2: short[5:6]}, lengths)
    rows = driver.step({1: long[45:50], 2: short[6:7]}, lengths)
    expected = decode_reference(model, long, 50)
    assert_close(rows[1], expected[49])
    for position in range(50, 70):
        pieces = {1: [long[position]]}
        if position < 52:
            pieces[2] = [short[position - 43]]
        rows = driver.step(pieces, lengths)
        assert_close(rows[1], expected[position])
        if position < 52:
            assert_close(rows[2], decode_reference(model, short, 5)[position - 43])


def decode_reference(model: PreTrainedModel, ids: list[int], prompt: int) -> torch.Tensor:
    """Logits of transformers when the prompt is computed whole and the rest token by token."""
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        rows = [model(torch.tensor([ids[:prompt]]), cache=cache, use_cache=True).logits[0]]
        for token in ids[prompt:]:
            rows.append(model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0])
    return torch.cat(rows)


class ThreadGroup:
    """Ranks as threads, for looking at the arithmetic alone."""

    def __init__(self, rank: int, size: int, shared: list[torch.Tensor], barrier) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        parts = list(self._shared)
        self._barrier.wait()
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather_columns(self, tensor: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        parts = self._exchange(tensor)
        assert tuple(part.shape[1] for part in parts) == widths
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        return


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["llama-tied", "llama-biases", "llama-mha", "llama-mqa", "gemma3"])
def test_tensor_parallel_of_any_degree(name: str, size: int) -> None:
    model = tiny_model(name)
    ids = ids_of(40, 3)
    shared = [torch.empty(0)] * size
    barrier = threading.Barrier(size, timeout=60)
    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        driver = Driver(decoder_of(model, ThreadGroup(rank, size, shared, barrier)))
        driver.step({0: ids[:30]})
        for token in ids[30:]:
            rows = driver.step({0: [token], 1: ids[:3]} if token == ids[-1] else {0: [token]})
        results[rank] = rows[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == size
    for row in results.values():
        assert_close(row, reference(model, ids)[-1])
