"""The engine on a GPU: builds, checks and times everything in one call, with nothing to install.

    python benchmarks/gpu.py [--only kernels,checks,decode,throughput,prefill] [--json FILE]

The model has the shape of Llama-3.1-8B and random weights in bfloat16. Each figure stands beside
its floor (bytes over bandwidth, or operations over speed) and what others reached on the same card
(docs/performance.md says where these come from).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.workloads import Measured
from mii.config import EngineConfig
from mii.engine.build import engine_over
from mii.engine.cuda_executor import CUDAExecutor
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.mixed_step import lay_out
from mii.engine.params import SamplingParams
from mii.engine.plan import PlannedSequence, StepPlan
from mii.engine.sampler import SamplingState
from mii.engine.scheduler import ScheduledRequest
from mii.layers.rotary_spec import RopeKind, RotarySpec
from mii.models.loader import RandomWeights, build_decoder
from mii.models.policies.base import ParameterNames
from mii.models.spec import Activation, DecoderSpec, LayerSpec
from mii.parallel.group import SingleRank
from mii.parallel.rank import Rank

VOCAB = 128256
LLAMA_8B = DecoderSpec(
    vocab_size=VOCAB,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=131072,
    norm_eps=1e-5,
    activation=Activation.SILU,
    layers=(LayerSpec(rotary=0, window=None),) * 32,
    rotaries=(
        RotarySpec(
            kind=RopeKind.LLAMA3,
            theta=500000.0,
            rotary_dim=128,
            max_positions=131072,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
    ),
    attention_scale=128**-0.5,
    tied_head=False,
)

# (floor, DeepSpeed-FastGen, vLLM 0.26, to reach) by workload.
RECORDED: dict[str, tuple[float | None, float, float, float]] = {
    "decode, batch 1, context 512": (3.42, 7.09, 4.91, 4.1),
    "decode, batch 8, context 1024": (3.7, 8.56, 5.20, 4.4),
    "decode, batch 32, context 1024": (4.5, 16.5, 6.27, 5.3),
    "decode, batch 64, context 1024": (5.5, 24.6, 7.63, 6.6),
    "decode, batch 128, context 1024": (7.5, 43.5, 10.60, 9.2),
    "decode, batch 256, context 1024": (11.5, 82.4, 17.72, 15.5),
    "512 requests, 64-1024 in, 64-512 out": (None, 3458, 9875, 12000),
    "1024 requests, 512-512 in, 256-256 out": (None, 3786, 10637, 13000),
    "prefill, 16 x 4096": (54000, 33715, 40078, 42000),
}


def build(max_length: int, sequences: int, tokens: int, budget: int) -> InferenceEngineV2:
    """Return the engine over the 8B shape."""
    device = torch.device("cuda", 0)
    started = time.perf_counter()
    model = build_decoder(
        LLAMA_8B,
        ParameterNames(),
        RandomWeights(device),
        dtype=torch.bfloat16,
        device=device,
        group=SingleRank(),
    )
    config = EngineConfig(
        model_path="",
        tokenizer_path="",
        model_name="llama-3.1-8b-shape",
        dtype="bfloat16",
        device="cuda",
        max_length=max_length,
        block_size=64,
        max_ragged_batch_size=tokens,
        token_budget=budget,
        max_ragged_sequence_count=sequences,
        prefix_caching=False,
    )
    torch.cuda.synchronize()
    print(f"weights after {time.perf_counter() - started:.1f} s", flush=True)
    engine = engine_over(model, config, Rank(), lambda what, fraction: None)
    torch.cuda.synchronize()
    print(
        f"engine after {time.perf_counter() - started:.1f} s, "
        f"{engine.free_blocks[0]} blocks of 64 tokens",
        flush=True,
    )
    return engine


class Driver:
    """Runs workloads through the engine's scheduler."""

    def __init__(self, engine: InferenceEngineV2) -> None:
        self.engine = engine
        self._next = 0
        self.step_seconds: list[float] = []

    def __call__(self, prompts: Sequence[Sequence[int]], wanted: Sequence[int]) -> int:
        params = SamplingParams(temperature=0.0)
        for prompt, count in zip(prompts, wanted, strict=True):
            self._next += 1
            request = ScheduledRequest(self._next, tuple(prompt), count)
            self.engine.add_request(request, SamplingState(params, seed=0))
        made = 0
        last, self.step_seconds = time.perf_counter(), []
        while self.engine.has_work:
            new = len(self.engine.step())
            now = time.perf_counter()
            if new == len(prompts):  # a step of nothing but decodes
                self.step_seconds.append(now - last)
            last, made = now, made + new
        torch.cuda.synchronize()
        if self.step_seconds:
            median = statistics.median(self.step_seconds) * 1e3
            print(f"    {len(self.step_seconds)} whole decode steps, median {median:.3f} ms")
        return made


def show(measured: Measured) -> None:
    """Print a figure beside its floor and others' figures."""
    floor, fastgen, vllm, goal = RECORDED.get(measured.workload, (None, 0.0, 0.0, 0.0))
    better = measured.value <= goal if measured.unit == "ms/step" else measured.value >= goal
    print(
        f"{measured.workload:42s} {measured.value:10.3f} {measured.unit:16s} floor {floor} "
        f"FastGen {fastgen} vLLM {vllm} goal {goal} {'REACHED' if better else ''}",
        flush=True,
    )


def parts(driver: Driver, only: set[str]) -> list[Callable[[], Measured]]:
    """Return the workloads that were asked for."""
    todo: list[Callable[[], Measured]] = []
    if "decode" in only:
        todo += [
            lambda b=b, c=c: workloads.decode(driver, VOCAB, b, c)  # type: ignore[misc]
            for b, c in ((1, 512), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024))
        ]
    if "throughput" in only:
        todo += [
            lambda: workloads.throughput(driver, VOCAB, 512, (64, 1024), (64, 512), 1),
            lambda: workloads.throughput(driver, VOCAB, 1024, (512, 512), (256, 256), 3),
        ]
    if "prefill" in only:
        todo.append(lambda: workloads.prefill(driver, VOCAB, 16, 4096))
    return todo


def step_times(driver: Driver, batch: int, context: int, kind: str) -> None:
    """Print the device's time of one graph, and where it goes.

    Args:
        kind: "decode", or "prefill" for one chunk of the whole token budget after `context` tokens.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    executor = driver.engine._executor
    assert isinstance(executor, CUDAExecutor)
    state, blocks = executor._slots, driver.engine.free_blocks[0]
    count = state.tables.shape[1]
    state.tables[:batch] = torch.randint(0, blocks, (batch, count), device="cuda").int()
    state.lengths[:batch] = context
    if kind == "decode":
        executor._active[:batch] = torch.arange(batch, device="cuda")
        executor._active_host = ()
        graph = executor._graphs[next(s for s in executor._sizes if s >= batch), True]
    else:
        size = executor._mixed_sizes[-1]
        ids = (5,) * size.tokens
        chunk = PlannedSequence(0, 0, context, size.tokens, ids, (), 8192, samples=True)
        size = next(s for s in executor._mixed_sizes if s.fits(StepPlan(0, (chunk,), 0)))
        array = lay_out(StepPlan(0, (chunk,), 0), size, executor._padding)
        executor._mixed_inputs[: size.total] = torch.from_numpy(array).cuda()
        graph = executor._graphs[size]
    times = []
    for _ in range(6):
        state.lengths[:batch] = context
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    print(f"\n{kind}, batch {batch}, context {context}: {min(times):.3f} ms on the device")
    with torch_profile(activities=[ProfilerActivity.CUDA]) as record:
        graph.replay()
        torch.cuda.synchronize()
    _show_kernels(record, 14)


def _show_kernels(record: Any, count: int) -> None:
    rows = sorted(record.key_averages(), key=lambda r: -r.self_device_time_total)
    for row in rows[:count]:
        print(f"  {row.self_device_time_total / 1e3:8.3f} ms {row.count:5d} x  {row.key[:70]}")


def host_time(driver: Driver) -> None:
    """Print where the host's time goes while many requests run, and how often the GPU waits."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    rng = random.Random(9)
    params = SamplingParams(temperature=0.0)

    def add(count: int) -> None:
        for _ in range(count):
            driver._next += 1
            prompt = tuple(rng.randrange(100, 90000) for _ in range(512))
            request = ScheduledRequest(driver._next, prompt, 256)
            driver.engine.add_request(request, SamplingState(params, seed=0))

    add(700)
    for _ in range(60):
        driver.engine.step()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as record:
        began = time.perf_counter()
        for _ in range(20):
            driver.engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    busy = sum(row.self_device_time_total for row in record.key_averages()) / 1e6
    print(f"\n20 mixed steps: {wall * 50:.1f} ms each, the GPU busy {busy / wall:.1%}")
    _show_kernels(record, 12)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(40):
        driver.engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    while driver.engine.has_work:
        driver.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="decode,throughput,prefill")
    parser.add_argument("--steps", default="", help="kind:batch:context, comma-separated")
    parser.add_argument("--host", action="store_true", help="say where the host's time goes")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step of prompts alone")
    parser.add_argument("--budget", type=int, default=1024, help="of a step that decodes, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    driver = Driver(build(8192, options.sequences, options.tokens, options.budget))
    rows = []
    for part in parts(driver, set(options.only.split(","))):
        try:
            measured = part()
        except Exception:  # one workload that fails must not cost the others
            traceback.print_exc()
            continue
        show(measured)
        rows.append({**vars(measured)})
    for what in filter(None, options.steps.split(",")):
        kind, batch, context = what.split(":")
        step_times(driver, int(batch), int(context), kind)
    if options.host:
        host_time(driver)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
