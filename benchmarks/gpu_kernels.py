"""Checks every kernel on a GPU against fp64, and times it beside its floor, in one call.

    python -m benchmarks.gpu_kernels [--only checks,layer,...] [--json FILE]

Needs torch and Triton, and nothing else. Each time is that of one launch inside a CUDA graph of
many, over buffers that do not fit in the second-level cache; sizes are those of Llama-3.1-8B. The
best settings of each kernel are printed, and written to the file under "tuned". Before anything is
timed, one process for each part compiles its kernels, all at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_kernel_checks import checks
from benchmarks.gpu_layer import layer
from benchmarks.gpu_timing import Measurements
from mii.kernels.activation_triton import gated_activation_cuda
from mii.kernels.attention_decode import attention_decode, plan_decode, wanted_parts
from mii.kernels.attention_prefill import attention_prefill, query_tiles
from mii.kernels.linear_triton import OneRowSettings, one_row_linear
from mii.kernels.norm_triton import rms_norm_cuda
from mii.kernels.rotary_triton import prepare_attention
from mii.kernels.sampling_triton import SlotSampling, draw_tokens_cuda

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
HIDDEN, INNER, VOCAB = 4096, 14336, 128256
LINEARS = {  # out, in
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def time_decode(found: Measurements, lengths: list[int], case: str, copies: int) -> None:
    """Attention of one decode for each context length."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts), device="cuda").int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count]
        used += count
    caches = [random(2, len(order), KV_HEADS, PAGE, DIM) for _ in range(copies)]
    contexts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    query = random(len(lengths), HEADS, DIM)
    output = torch.empty_like(query)
    work = plan_decode(
        contexts, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, wanted=wanted_parts(8, 132)
    )
    for warps, stages, join in ((2, 2, 4096), (2, 2, 8192), (4, 2, 4096), (4, 3, 4096)):
        launches = [
            partial(
                attention_decode, query, cache[0], cache[1], tables, work, output, scale=0.088,
                warps=warps, stages=stages, join=join,
            )
            for cache in caches
        ]  # fmt: skip
        found.time(
            "decode",
            case,
            launches,
            bytes_read=sum(lengths) * KV_HEADS * DIM * 4,
            settings={"warps": warps, "stages": stages, "join": join},
        )


def decode(found: Measurements) -> None:
    """Attention of decodes: even batches, and one long sequence among short ones."""
    for context in (512, 1024, 4096):
        for batch in (1, 8, 32, 64, 128, 256):
            lengths = [context - 3 - i % 5 for i in range(batch)]
            size = batch * context * KV_HEADS * DIM * 4
            copies = max(2, min(32, int(1.5e9 // size)))
            time_decode(found, lengths, f"{batch} x {context}", copies)
    time_decode(found, [1000] * 63 + [60000], "63 x 1000 and 1 x 60000", 2)
    found.show("decode")


def prefill(found: Measurements) -> None:
    """Attention of chunks of prompts, beside torch's own where nothing is cached."""
    for chunks, before, count in ((1, 0, 2048), (1, 2048, 2048), (1, 6144, 2048), (16, 0, 4096)):
        length = before + count
        blocks = chunks * length // PAGE
        cache = random(2, blocks, KV_HEADS, PAGE, DIM)
        tables = torch.randperm(blocks, device="cuda").int().view(chunks, -1)
        contexts = torch.full((chunks,), length, dtype=torch.int32, device="cuda")
        starts = torch.arange(chunks + 1, device="cuda").int() * count
        query = random(chunks * count, HEADS, DIM)
        output = torch.empty_like(query)
        work = 4 * HEADS * DIM * chunks * count * (before + count / 2)
        case = f"{chunks} x {count} after {before}"
        for rows, tile, warps, stages in (
            (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 4, 3),
        ):  # fmt: skip
            tiles = [
                torch.tensor(t, dtype=torch.int32, device="cuda")
                for t in query_tiles([count] * chunks, rows)
            ]
            launch = partial(
                attention_prefill, query, cache[0], cache[1], tables, starts, contexts, *tiles,
                output, scale=0.088, rows=rows, tile=tile, warps=warps, stages=stages,
            )  # fmt: skip
            settings = {"rows": rows, "tile": tile, "warps": warps, "stages": stages}
            found.time("prefill", case, [launch] * 4, operations=work, settings=settings)
        if before == 0:
            q = random(chunks, HEADS, count, DIM)
            k, v = random(2, chunks, KV_HEADS, count, DIM)
            theirs = partial(
                F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True
            )
            found.time("sdpa", case, [theirs] * 4, operations=work)
    found.show("prefill", best=3)
    found.show("sdpa")


def linear(found: Measurements) -> None:
    """Products of one row, as they stand in a layer, beside cuBLAS without its surroundings."""
    tried = [OneRowSettings(n, b) for n, b in ((4, 1), (2, 1), (8, 1), (2, 4))]
    for name, (n, k) in LINEARS.items():
        copies = max(2, int(4e8 // (n * k * 2)))
        weights = [random(n, k, scale=0.02) for _ in range(copies)]
        size = n * k * 2
        x, residual = random(1, k), random(1, n)
        theirs = [partial(F.linear, x, w) for w in weights]
        found.time("cublas", name, theirs, bytes_read=size)
        if name == "head":
            continue
        around: dict[str, Any] = {"residual": residual}
        if name in ("qkv", "gate_up"):
            around = {"norm": (random(k), 1e-5, 0.0), "gated": name == "gate_up"}
        for settings in tried:
            ours = [partial(one_row_linear, x, w, settings=settings, **around) for w in weights]
            found.time("one_row", name, ours, bytes_read=size, settings=asdict(settings))
    for kernel in ("one_row", "cublas"):
        found.show(kernel)


def small(found: Measurements) -> None:
    """Norm, rotation with cache write, activation."""
    for rows in (1, 32, 256, 2048):
        copies = 4 if rows == 2048 else 16
        gain, residual = random(HIDDEN), random(rows, HIDDEN)
        xs = [random(rows, HIDDEN) for _ in range(copies)]
        norms = [partial(rms_norm_cuda, x, residual, gain, 1e-5, 0.0) for x in xs]
        found.time("norm", f"{rows} rows", norms, bytes_read=4 * xs[0].nbytes)
        wide = [random(rows, 2 * INNER) for _ in range(copies)]
        gates = [partial(gated_activation_cuda, x, "silu") for x in wide]
        found.time("activation", f"{rows} rows", gates, bytes_read=1.5 * wide[0].nbytes)
        qkvs = [random(rows, HEADS + 2 * KV_HEADS, DIM) for _ in range(copies)]
        cache, angles = random(2, 64, KV_HEADS, PAGE, DIM), random(rows, DIM // 2)
        slots = torch.arange(rows, device="cuda")
        rest = (HEADS, (angles, angles), None, 0.0, 0.0, cache[0], cache[1], slots)
        prepares = [partial(prepare_attention, qkv, *rest) for qkv in qkvs]
        found.time("prepare", f"{rows} rows", prepares, bytes_read=2 * qkvs[0].nbytes)
    for kernel in ("norm", "activation", "prepare"):
        found.show(kernel)


def sampling(found: Measurements) -> None:
    """Drawing tokens: from logits like a language model's, and from nearly equal ones."""
    for rows in (1, 32, 256):
        slots = torch.arange(rows, device="cuda")
        peaked = 2.5 * torch.randn(rows, VOCAB, device="cuda")
        peaked[:, ::997] += 12.0 * torch.rand(rows, len(range(0, VOCAB, 997)), device="cuda")
        flat = torch.randn(rows, VOCAB, device="cuda")
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("temperature", 1.0, 0, 1.0),
            ("top_p 0.9", 1.0, 0, 0.9),
            ("top_k 50, top_p 0.9", 0.8, 50, 0.9),
        ):
            state = SlotSampling(rows, torch.device("cuda"))
            state.temperature.fill_(temperature)
            state.top_k.fill_(top_k)
            state.top_p.fill_(top_p)
            for kind, logits in (("peaked", peaked.bfloat16()), ("flat", flat.bfloat16())):
                draw = partial(
                    draw_tokens_cuda, logits, slots, slots, state, greedy=temperature == 0.0
                )
                case = f"{rows} rows, {kind}, {name}"
                found.time("draw", case, [draw] * 8, bytes_read=logits.nbytes)
    found.show("draw")


PARTS: dict[str, Callable[[Measurements], None]] = {
    "checks": checks,
    "layer": layer,
    "decode": decode,
    "linear": linear,
    "prefill": prefill,
    "small": small,
    "sampling": sampling,
}


def compile_all(parts: list[str]) -> None:
    """Run each part in a process of its own, at the same time, without measuring."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--only-compile", "--only"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([*command, part], **quiet) for part in parts]
    for process in processes:
        process.wait()
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--only-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.only.split(",")
    if not options.only_compile:
        compile_all(names)
    found = Measurements(options.only_compile)
    started = time.perf_counter()
    for name in names:
        try:
            PARTS[name](found)
        except Exception:  # one part that fails must not cost the others
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"-- {name} after {time.perf_counter() - started:.0f} s", flush=True)
    if options.only_compile:
        return
    print("tuned:", json.dumps(found.tuned(), indent=1))
    file = options.json
    if file is None and "OUT" in os.environ:
        file = Path(os.environ["OUT"]) / "gpu_kernels.json"
    if file is not None:
        file.write_text(json.dumps({"rows": found.rows, "tuned": found.tuned()}, indent=1))


if __name__ == "__main__":
    main()
