"""The workloads that every engine is measured with: greedy, end of sequence ignored, ids only.

An engine is a function of prompts and of how many tokens each wants; it returns the tokens it made.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], int]


@dataclass(frozen=True)
class Measured:
    """One figure of one workload."""

    workload: str
    value: float
    unit: str  # "ms/step": smaller is better; "tokens/s": larger is


def _prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(100, vocab - 100) for _ in range(length)] for _ in range(count)]


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def decode(generate: Generate, vocab: int, batch: int, context: int, new: int = 128) -> Measured:
    """Time of one decode step: that of `new` tokens less that of one, by the steps between."""
    rng = random.Random(batch * 7919 + context)
    generate(_prompts(rng, batch, context, vocab), [4] * batch)  # warm-up
    prompts = _prompts(rng, batch, context, vocab)
    one = _seconds(lambda: generate(prompts, [1] * batch))
    prompts = _prompts(rng, batch, context, vocab)
    many = _seconds(lambda: generate(prompts, [new] * batch))
    step = (many - one) / (new - 1)
    return Measured(f"decode, batch {batch}, context {context}", step * 1e3, "ms/step")


def throughput(
    generate: Generate,
    vocab: int,
    requests: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    seed: int,
) -> Measured:
    """Output tokens a second of many requests, all there from the beginning."""
    rng = random.Random(seed)
    prompts = [_prompts(rng, 1, rng.randint(*inputs), vocab)[0] for _ in range(requests)]
    wanted = [rng.randint(*outputs) for _ in range(requests)]
    started = time.perf_counter()
    made = generate(prompts, wanted)
    seconds = time.perf_counter() - started
    assert made == sum(wanted), (made, sum(wanted))
    name = f"{requests} requests, {inputs[0]}-{inputs[1]} in, {outputs[0]}-{outputs[1]} out"
    return Measured(name, made / seconds, "output tokens/s")


def prefill(generate: Generate, vocab: int, batch: int, length: int) -> Measured:
    """Prompt tokens a second."""
    rng = random.Random(2)
    generate(_prompts(rng, 2, length, vocab), [1] * 2)  # warm-up
    prompts = _prompts(rng, batch, length, vocab)
    seconds = _seconds(lambda: generate(prompts, [1] * batch))
    return Measured(f"prefill, {batch} x {length}", batch * length / seconds, "tokens/s")
