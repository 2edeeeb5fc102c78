"""Every kernel against fp64 on the GPU it is to run on."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import Measurements
from mii.kernels.activation import gated_activation_reference
from mii.kernels.activation_triton import gated_activation_cuda
from mii.kernels.attention_decode import (
    attention_decode,
    attention_decode_reference,
    plan_decode,
)
from mii.kernels.attention_prefill import (
    attention_prefill,
    attention_prefill_reference,
    query_tiles,
)
from mii.kernels.linear_triton import one_row_linear
from mii.kernels.norm import rms_norm_reference
from mii.kernels.norm_triton import rms_norm_cuda
from mii.kernels.rotary import rotate
from mii.kernels.rotary_triton import prepare_attention
from mii.kernels.sampling import Draw, draw_tokens
from mii.kernels.sampling_triton import SlotSampling, draw_tokens_cuda

DTYPES = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
LIMIT = {**DTYPES, torch.float32: 1e-5}


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error, by norm; NaN anywhere makes it NaN."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def make_cache(
    lengths: list[int], kv_heads: int, page: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values, tables and lengths; where nothing is to be read there is NaN."""
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 3, device="cuda").int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    caches = poisoned(2, len(order), kv_heads, page, head_dim, dtype=dtype)
    used = 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[index, :count] = order[used : used + count]
        used += count
        for number, block in enumerate(tables[index, :count].tolist()):
            filled = min(page, length - number * page)
            caches[:, block, :, :filled] = random(2, kv_heads, filled, head_dim, dtype=dtype)
    return caches[0], caches[1], tables, torch.tensor(lengths, dtype=torch.int32, device="cuda")


SHAPES = (  # kv heads, group, head_dim, page, window, softcap
    (8, 4, 128, 64, None, None),
    (2, 7, 64, 16, None, None),
    (3, 1, 80, 32, 100, None),
    (1, 8, 256, 64, None, 30.0),
    (2, 3, 96, 64, 500, None),
)


def check_decode() -> float:
    lengths, worst = [1, 700, 0, 64, 65, 3000, 129], 0.0
    for dtype, limit in DTYPES.items():
        for kv_heads, group, dim, page, window, softcap in SHAPES:
            keys, values, tables, contexts = make_cache(lengths, kv_heads, page, dim, dtype)
            query = random(len(lengths), kv_heads * (group + 2), dim, dtype=dtype)
            query = query[:, : kv_heads * group]
            common = {"scale": dim**-0.5, "softcap": softcap}
            expected = attention_decode_reference(
                query, keys, values, tables, contexts, window=window, **common
            )
            for wanted in (1, 20):
                work = plan_decode(
                    contexts, heads=kv_heads * group, kv_heads=kv_heads, head_dim=dim,
                    window=window, wanted=wanted,
                )  # fmt: skip
                results = []
                for _ in range(20):
                    results.append(poisoned(*query.shape, dtype=dtype))
                    attention_decode(query, keys, values, tables, work, results[-1], **common)
                assert all(torch.equal(results[0], result) for result in results), "a race"
                worst = max(worst, error_of(results[0], expected) / limit)
    return worst


def check_prefill() -> float:
    queries, worst = [(1, 0), (300, 0), (130, 700), (64, 64), (5, 1000)], 0.0
    counts = [count for count, _ in queries]
    for dtype, limit in DTYPES.items():
        for kv_heads, group, dim, page, window, softcap in SHAPES:
            lengths = [count + before for count, before in queries]
            keys, values, tables, contexts = make_cache(lengths, kv_heads, page, dim, dtype)
            starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
            query = random(sum(counts), kv_heads * group, dim, dtype=dtype)
            options = {"scale": dim**-0.5, "window": window, "softcap": softcap}
            rows = 128 if dim <= 128 else 64
            tiles = [
                torch.tensor(t, dtype=torch.int32, device="cuda") for t in query_tiles(counts, rows)
            ]
            output = poisoned(*query.shape, dtype=dtype)
            attention_prefill(
                query, keys, values, tables, starts, contexts, *tiles, output, **options
            )
            expected = attention_prefill_reference(
                query, keys, values, tables, starts, contexts, **options
            )
            worst = max(worst, error_of(output, expected) / limit)
    return worst


def check_linear() -> float:
    worst = 0.0
    for dtype, limit in DTYPES.items():
        for n, k in ((1000, 576), (512, 14336)):
            x, residual, gain = (random(*shape, dtype=dtype) for shape in ((1, k), (1, n), (k,)))
            weight = (random(2 * n, k, dtype=torch.float32) * k**-0.5).to(dtype)
            bias = random(n, dtype=dtype)
            plain = one_row_linear(x, weight[:n], bias, residual=residual)
            wide = x.double() @ weight.double().t()
            expected = wide[:, :n] + bias.double() + residual.double()
            worst = max(worst, error_of(plain, expected) / limit)
            gated = one_row_linear(x, weight, norm=(gain, 1e-5, 0.0), gated=True)
            normed = F.rms_norm(x.double(), (k,), gain.double(), 1e-5)
            gate, up = (normed @ weight.double().t()).chunk(2, dim=-1)
            worst = max(worst, error_of(gated, F.silu(gate) * up) / limit)
    return worst


def check_small() -> float:
    worst = 0.0
    for dtype, limit in LIMIT.items():
        for rows, size in ((1, 576), (7, 4096), (300, 2000)):
            x, residual, gain = (
                random(*s, dtype=dtype) for s in ((rows, size), (rows, size), (size,))
            )
            expected = rms_norm_reference(residual + x, gain, 1e-5)
            actual = rms_norm_cuda(x, residual, gain, 1e-5, 0.0)
            worst = max(worst, error_of(actual, expected) / limit)
            gate_up = 3 * random(rows, 2 * size, dtype=dtype)
            actual = gated_activation_cuda(gate_up, "silu")
            expected = gated_activation_reference(gate_up.double(), "silu")
            worst = max(worst, error_of(actual, expected) / limit)
        for tokens in (3, 100):
            worst = max(worst, check_prepare(tokens, dtype) / limit)
    return worst


def check_prepare(tokens: int, dtype: torch.dtype) -> float:
    heads, kv_heads, dim, page = 6, 2, 80, 16
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    gains = random(2, dim, dtype=dtype)
    angles = torch.randn(tokens, dim // 2, device="cuda")
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
    query, key, value = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
    query = rotate(rms_norm_reference(query, gains[0], 1e-6), *rotary)
    key = rotate(rms_norm_reference(key, gains[1], 1e-6), *rotary)
    caches = poisoned(2, 8, kv_heads, page, dim, dtype=dtype)
    slots = torch.randperm(8 * page, device="cuda")[:tokens]
    norms = (gains[0], gains[1])
    actual = prepare_attention(qkv, heads, rotary, norms, 1e-6, 0.0, caches[0], caches[1], slots)
    written = caches.transpose(2, 3).flatten(1, 2)[:, slots]
    pairs = ((actual, query), (written[0], key), (written[1], value))
    return max(error_of(*pair) for pair in pairs)


def check_sampling() -> float:
    """Return the share of tokens that differ from the reference's, of which none should."""
    settings = (
        (1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 40, 0.8, 0.0),
        (2.0, 0, 1.0, 0.1), (0.0, 0, 1.0, 0.0), (1.0, 500, 0.95, 0.01), (5.0, 0, 0.9, 0.0),
    )  # fmt: skip
    rows, different = len(settings), 0
    state = SlotSampling(rows, torch.device("cuda"))
    for slot, (temperature, top_k, top_p, min_p) in enumerate(settings):
        state.temperature[slot], state.top_k[slot] = temperature, top_k
        state.top_p[slot], state.min_p[slot], state.seed[slot] = top_p, min_p, 2**40 + slot
    slots = torch.arange(rows, device="cuda")
    for position in range(20):
        logits = 3 * torch.randn(rows, 128256, device="cuda")
        tokens = draw_tokens_cuda(logits, slots, torch.full_like(slots, position), state).tolist()
        again = draw_tokens_cuda(logits, slots, torch.full_like(slots, position), state).tolist()
        assert tokens == again, "a race"
        for slot, (temperature, top_k, top_p, min_p) in enumerate(settings):
            row = logits[slot].cpu().numpy()
            expected = int(row.argmax())
            if temperature:
                draw = Draw(temperature, top_k, top_p, min_p, 2**40 + slot, 0, position)
                expected = draw_tokens([row], [draw])[0]
            different += tokens[slot] != expected
    return different / (20 * rows)


CHECKS: tuple[Callable[[], float], ...] = (
    check_decode,
    check_prefill,
    check_linear,
    check_small,
    check_sampling,
)


def checks(found: Measurements) -> None:
    """Print the worst error of each kernel as a share of what its dtype allows."""
    for check in CHECKS:
        try:
            worst = check()
        except Exception:
            print(f"{check.__name__}: FAILED")
            traceback.print_exc()
            continue
        passed = worst < (0.02 if check is check_sampling else 1.0)
        print(f"{check.__name__}: {'ok' if passed else 'WRONG'}, {worst:.3f} of what is allowed")
        found.rows.append({"kernel": check.__name__, "case": "", "settings": None, "worst": worst})
