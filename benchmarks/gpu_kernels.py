"""Times single kernels on a GPU over launch settings, each beside its floor.

    python -m benchmarks.gpu_kernels [--only decode,prepare,prefill,skinny]

Each time is that of one launch inside a CUDA graph of many, over buffers that do not fit in L2.
"""

from __future__ import annotations

import argparse
import itertools
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mii.kernels.attention_decode import attention_decode
from mii.kernels.attention_prefill import attention_prefill, query_tiles
from mii.kernels.linear_triton import SkinnySettings, skinny_linear
from mii.kernels.rotary_triton import prepare_attention

READ = 4.39e12  # bytes a second that this card reads
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64


def time_graph(launches: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Return microseconds of one launch, the best of several replays."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return min(times)


def decode() -> None:
    """Attention of decodes."""
    for batch, context, parts_tried in (
        (256, 1024, (1, 2)),
        (64, 1024, (1, 2, 4)),
        (8, 1024, (4, 8, 16)),
        (1, 512, (8, 16, 32)),
        (512, 512, (1,)),
    ):
        bytes_read = batch * context * KV_HEADS * DIM * 2 * 2
        layers = max(2, min(32, int(2e9 // bytes_read)))
        blocks = batch * context // PAGE
        caches = [
            torch.randn(2, blocks, KV_HEADS, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        tables = torch.randperm(blocks, device="cuda").int().view(batch, -1)
        contexts = torch.full((batch,), context - 3, dtype=torch.int32, device="cuda")
        query = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        output = torch.empty_like(query)
        floor = bytes_read / READ * 1e6
        rows = []
        for tile, warps, stages, parts in itertools.product(
            (32, 64, 128), (2, 4, 8), (2, 3, 4), parts_tried
        ):
            if parts != parts_tried[0] and (tile, warps) not in ((64, 4), (64, 2), (128, 4)):
                continue
            options = {"tile": tile, "warps": warps, "stages": stages, "parts": parts}

            launches = [
                partial(
                    attention_decode,
                    query,
                    cache[0],
                    cache[1],
                    tables,
                    contexts,
                    output,
                    scale=0.088,
                    **options,  # type: ignore[arg-type]
                )
                for cache in caches
            ]
            try:
                rows.append((time_graph(launches), options))
            except Exception as error:
                print("  ", options, type(error).__name__, str(error)[:80])
        rows.sort(key=lambda row: row[0])
        print(f"decode attention, batch {batch}, context {context}: floor {floor:.1f} us")
        for microseconds, options in rows[:6]:
            print(f"  {microseconds:8.1f} us  {floor / microseconds:5.0%}  {options}", flush=True)


def prefill() -> None:
    """Attention of one chunk of 2048 tokens."""
    for before in (0, 2048):
        length, count = before + 2048, 2048
        blocks = length // PAGE
        cache = torch.randn(2, blocks, KV_HEADS, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
        tables = torch.randperm(blocks, device="cuda").int().view(1, -1)
        contexts = torch.tensor([length], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        query = torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        output = torch.empty_like(query)
        work = 4 * HEADS * DIM * count * (before + count / 2)
        results = []
        for rows, tile, warps, stages in itertools.product(
            (64, 128), (32, 64, 128), (4, 8), (2, 3)
        ):
            tiles = [
                torch.tensor(t, dtype=torch.int32, device="cuda")
                for t in query_tiles([count], rows)
            ]
            launch = partial(
                attention_prefill,
                query,
                cache[0],
                cache[1],
                tables,
                starts,
                contexts,
                *tiles,
                output,
                scale=0.088,
                rows=rows,
                tile=tile,
                warps=warps,
                stages=stages,
            )
            try:
                results.append((time_graph([launch] * 4), (rows, tile, warps, stages)))
            except Exception as error:
                print("  ", rows, tile, warps, stages, type(error).__name__, str(error)[:80])
        print(f"prefill attention, 2048 tokens after {before}; (rows, tile, warps, stages)")
        for microseconds, settings in sorted(results)[:5]:
            print(f"  {microseconds:8.1f} us  {work / microseconds / 1e6:5.0f} TFLOP/s  {settings}")


def skinny() -> None:
    """Products of few rows, beside cuBLAS."""
    for name, n, k, gated in (
        ("qkv", 6144, 4096, False),
        ("o", 4096, 4096, False),
        ("gate_up", 14336, 4096, True),
        ("down", 4096, 14336, False),
    ):
        out = 2 * n if gated else n
        copies = max(2, int(4e8 // (out * k * 2)))
        weights = [
            torch.randn(out, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)
        ]
        floor = out * k * 2 / READ * 1e6
        for rows in (1, 8, 16):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            theirs = time_graph([partial(F.linear, x, w) for w in weights])
            results = []
            for block_n, block_k, warps, stages in itertools.product(
                (16, 32), (128, 256), (4, 8), (3, 5)
            ):
                if block_n * block_k * 2 * stages * (2 if gated else 1) > 160_000:
                    continue
                settings = SkinnySettings(block_n, block_k, warps, stages)
                launches = [
                    partial(skinny_linear, x, w, gated=gated, settings=settings) for w in weights
                ]
                try:
                    results.append((time_graph(launches), settings))
                except Exception as error:
                    print("  ", settings, type(error).__name__, str(error)[:60])
            results.sort(key=lambda row: row[0])
            print(f"{name}, {rows} rows: floor {floor:.1f} us, cuBLAS {theirs:.1f} us")
            for microseconds, settings in results[:3]:
                print(
                    f"  {microseconds:8.1f} us  {floor / microseconds:5.0%}  {settings}", flush=True
                )


def prepare() -> None:
    """Rotation and cache write."""
    for tokens in (1, 32, 256, 2048):
        qkvs = [
            torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(8)
        ]
        cache = torch.zeros(2, 64, KV_HEADS, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
        angles = torch.randn(tokens, DIM // 2, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(tokens, device="cuda")

        rest = (HEADS, (angles, angles), None, 0.0, 0.0, cache[0], cache[1], slots)
        microseconds = time_graph([partial(prepare_attention, qkv, *rest) for qkv in qkvs])
        floor = 2 * qkvs[0].numel() * 2 / READ * 1e6
        print(f"prepare attention, {tokens} tokens: {microseconds:.1f} us, floor {floor:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="decode,prepare,prefill,skinny")
    for name in parser.parse_args().only.split(","):
        try:
            {"decode": decode, "prepare": prepare, "prefill": prefill, "skinny": skinny}[name]()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
