"""How long running decodes wait while long prompts are prefilled (Dynamic SplitFuse).

    python benchmarks/gaps.py [--prompts 4] [--length 6000] [--decodes 4]

Some requests decode; then long prompts arrive. Prints how the gaps between the decodes' tokens are
distributed before and during the prefill, beside the time of one step with the whole token budget.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from mii.api import configure_engine
from mii.engine.build import build_generator
from mii.engine.generator import Generator
from mii.engine.params import check_params
from mii.models.progress import silent

VOCAB = 49152


def add(generator: Generator, rng: random.Random, length: int, count: int) -> None:
    """Queue a request for `count` greedy tokens after a random prompt."""
    prompt = [rng.randrange(100, VOCAB - 100) for _ in range(length)]
    params = check_params({"max_new_tokens": count, "temperature": 0, "ignore_eos": True})
    for request in generator.prompts.prepare(prompt, params, request_id="gaps"):
        generator.add(request)


def describe(name: str, gaps: Sequence[float]) -> None:
    """Print how gaps are distributed, in milliseconds."""
    values = sorted(1e3 * gap for gap in gaps)

    def at(part: float) -> float:
        return values[min(len(values) - 1, int(part * len(values)))]

    marks = "  ".join(f"p{round(100 * part)} {at(part):6.1f}" for part in (0.5, 0.9, 0.99))
    print(f"{name:34s} {len(values):4d} steps  {marks}  max {values[-1]:6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=6000)
    parser.add_argument("--decodes", type=int, default=4)
    options = parser.parse_args()
    values = {"model_name_or_path": "smollm2", "prefix_caching": False}
    config = configure_engine(values, "gaps", silent)
    generator = build_generator(config)
    rng = random.Random(0)
    for _ in range(options.decodes):
        add(generator, rng, 32, 1000)
    for _ in range(8):
        generator.step()

    calm = []
    for _ in range(20):
        started = time.perf_counter()
        generator.step()
        calm.append(time.perf_counter() - started)

    for _ in range(options.prompts):
        add(generator, rng, options.length, 1)
    gaps, waiting = [], options.prompts
    last = time.perf_counter()
    while waiting:
        deltas = generator.step()
        now = time.perf_counter()
        waiting -= sum(delta.finish_reason is not None for delta in deltas)
        assert len(deltas) >= options.decodes, "a running decode was left out of a step"
        gaps.append(now - last)
        last = now
    describe("decodes alone", calm)
    describe(f"while {options.prompts} x {options.length} tokens prefill", gaps)
    print(
        f"token budget {config.token_budget}: every step had all {options.decodes} "
        "decodes, so no gap is longer than one step of that many tokens"
    )


if __name__ == "__main__":
    main()
