"""mii's engine beside transformers' `generate` on a CPU, in one run.

    python benchmarks/cpu.py [--threads 2] [--rounds 3] [--skip-mixed] [--json FILE]

Contenders take turns, so that a machine whose speed drifts does not favour either; a figure is the
median over rounds. The model is the built-in SmolLM2-135M in fp32, greedy, end of sequence ignored.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mii.config import EngineConfig
from mii.engine.build import build_generator
from mii.engine.generator import Generator
from mii.engine.params import check_params
from mii.machine import Machine
from mii.models.builtin import fetch_builtin
from mii.models.checkpoint import default_cache
from mii.models.progress import silent
from mii.strategy import inspect_model, plan_engine

VOCAB = 49152


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random ordinary tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCAB - 100) for _ in range(length)] for _ in range(count)]


class Ours:
    """The engine with its scheduler, driven step by step."""

    name = "mii"

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> None:
        for prompt, count in zip(prompts, new_tokens, strict=True):
            self.add(prompt, count)
        while self._generator.has_work:
            self._generator.step()

    def add(self, prompt: Sequence[int], count: int) -> None:
        params = check_params({"max_new_tokens": count, "temperature": 0, "ignore_eos": True})
        for request in self._generator.prompts.prepare(prompt, params, request_id="bench"):
            self._generator.add(request)

    def serve(self, arrivals: Sequence[tuple[float, list[int], int]]) -> float:
        """Run requests that arrive over time; return seconds until the last has ended."""
        started, waiting = time.perf_counter(), list(arrivals)
        while waiting or self._generator.has_work:
            now = time.perf_counter() - started
            while waiting and waiting[0][0] <= now:
                _, prompt, count = waiting.pop(0)
                self.add(prompt, count)
            if self._generator.has_work:
                self._generator.step()
            else:
                time.sleep(0.001)
        return time.perf_counter() - started


class Transformers:
    """transformers' own generate, a static batch at a time."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        count = max(new_tokens)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )

    def serve(self, arrivals: Sequence[tuple[float, list[int], int]], batch: int = 8) -> float:
        """Run batches of 8 in order of arrival, each as soon as its requests are there."""
        started = time.perf_counter()
        for first in range(0, len(arrivals), batch):
            part = arrivals[first : first + batch]
            time.sleep(max(0.0, part[-1][0] - (time.perf_counter() - started)))
            self.generate([p for _, p, _ in part], [n for _, _, n in part])
        return time.perf_counter() - started


Contender = Ours | Transformers


@dataclass(frozen=True)
class Figure:
    """One measured thing; larger is better."""

    what: str
    unit: str
    ours: float
    theirs: float
    wanted: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def decode_rate(contender: Contender, batch: int, context: int, new: int, seed: int) -> float:
    """Tokens per second of decoding alone: the time for 1 token is taken off.

    Prompts are short beside the answers, so that the noise of that subtraction stays small.
    """
    one = random_prompts(batch, context, seed)
    many = random_prompts(batch, context, seed + 1)
    first = seconds(lambda: contender.generate(one, [1] * batch))
    whole = seconds(lambda: contender.generate(many, [new + 1] * batch))
    return batch * new / (whole - first)


def prefill_rate(contender: Contender, length: int, seed: int) -> float:
    """Prompt tokens per second."""
    prompts = random_prompts(1, length, seed)
    return length / seconds(lambda: contender.generate(prompts, [1]))


def mixed_arrivals(seed: int = 0) -> list[tuple[float, list[int], int]]:
    """64 requests, 16 to 512 tokens in, 16 to 128 out, arriving over 10 seconds."""
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 10) for _ in range(64))
    return [
        (at, random_prompts(1, rng.randint(16, 512), seed + 100 + i)[0], rng.randint(16, 128))
        for i, at in enumerate(times)
    ]


def compare(
    what: str,
    unit: str,
    wanted: float,
    rounds: int,
    measure: Callable[[Contender, int], float],
    contenders: tuple[Ours, Transformers],
) -> Figure:
    rates: dict[str, list[float]] = {c.name: [] for c in contenders}
    for round_index in range(rounds):
        for contender in contenders:
            rates[contender.name].append(measure(contender, 1000 * round_index))
    ours, theirs = (statistics.median(rates[c.name]) for c in contenders)
    figure = Figure(what, unit, ours, theirs, wanted)
    print(
        f"{what:28s} mii {ours:8.1f}  transformers {theirs:8.1f} {unit:9s} "
        f"ratio {figure.ratio:5.2f}  (wanted {wanted:.2f})",
        flush=True,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of each contender")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--skip-mixed", action="store_true", help="leave out the long mixed load")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    folder = fetch_builtin("smollm2", default_cache(), silent)
    torch.set_num_threads(options.threads)
    config = EngineConfig(
        model_path=str(folder),
        tokenizer_path=str(folder),
        model_name="smollm2",
        dtype="float32",
        device="cpu",
        max_length=2048,
        threads=options.threads,
        prefix_caching=False,
    )
    plan = plan_engine(config, inspect_model(config), Machine.here())
    contenders = Ours(build_generator(plan.engine)), Transformers(folder)
    for contender in contenders:
        contender.generate(random_prompts(2, 64, 5), [4, 4])

    figures = [
        compare(
            f"decode, batch {batch}",
            "tokens/s",
            0.95,
            options.rounds,
            lambda c, seed, b=batch, n=new: decode_rate(c, b, 64, n, seed),
            contenders,
        )
        for batch, new in ((1, 64), (8, 64), (32, 64))
    ]
    figures.append(
        compare(
            "prefill, 512 tokens",
            "tokens/s",
            0.95,
            options.rounds,
            lambda c, seed: prefill_rate(c, 512, seed),
            contenders,
        )
    )
    if not options.skip_mixed:
        figures.append(
            compare(
                "64 mixed requests",
                "runs/h",
                1.5,
                1,
                lambda c, seed: 3600 / c.serve(mixed_arrivals()),
                contenders,
            )
        )
    if options.json:
        rows = [{**vars(figure), "ratio": figure.ratio} for figure in figures]
        options.json.write_text(json.dumps(rows, indent=2))
    if any(figure.ratio < figure.wanted for figure in figures):
        raise SystemExit("a figure is below what is wanted")


if __name__ == "__main__":
    main()
