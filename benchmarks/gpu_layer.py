"""One decode step's layers as a chain: what launches cost, and what fusing them saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import Measurements
from mii.kernels.activation_triton import gated_activation_cuda
from mii.kernels.attention_decode import DecodeWork, attention_decode, plan_decode, wanted_parts
from mii.kernels.linear_triton import FewRowsSettings, OneRowSettings, skinny_linear
from mii.kernels.norm_triton import rms_norm_cuda
from mii.kernels.rotary_triton import prepare_attention

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
HIDDEN, INNER = 4096, 14336
LAYERS = 6
EPS = 1e-5


@dataclass(frozen=True)
class Weights:
    """Of one layer, and its share of the cache."""

    norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Step:
    """What all layers of a step share."""

    tables: torch.Tensor
    slots: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    work: DecodeWork


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def make_weights(blocks: int) -> Weights:
    cache = random(2, blocks, KV_HEADS, PAGE, DIM)
    return Weights(
        norm=random(HIDDEN, scale=0.1) + 1,
        qkv=random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, scale=0.02),
        o=random(HIDDEN, HIDDEN, scale=0.02),
        mlp_norm=random(HIDDEN, scale=0.1) + 1,
        gate_up=random(2 * INNER, HIDDEN, scale=0.02),
        down=random(HIDDEN, INNER, scale=0.02),
        keys=cache[0],
        values=cache[1],
    )


def make_step(batch: int, context: int) -> Step:
    blocks = -(-context // PAGE)
    tables = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    contexts = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    last = tables[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
    angles = torch.rand(batch, DIM // 2, device="cuda") * 6
    work = plan_decode(
        contexts, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, wanted=wanted_parts(KV_HEADS, 132)
    )
    return Step(tables, last, (angles.cos().bfloat16(), angles.sin().bfloat16()), work)


def attend(qkv: torch.Tensor, w: Weights, step: Step, early: bool) -> torch.Tensor:
    query = prepare_attention(
        qkv.view(len(qkv), -1, DIM), HEADS, step.rotary, None, 0.0, 0.0, w.keys, w.values,
        step.slots, early=early,
    )  # fmt: skip
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attention_decode(
        query, w.keys, w.values, step.tables, step.work, output, scale=DIM**-0.5, early=early
    )
    return output.flatten(1)


def separate(
    residual: torch.Tensor, layers: list[Weights], step: Step, early: bool
) -> torch.Tensor:
    """Products by cuBLAS; norms, rotation and activation by kernels of their own."""
    residual = residual.clone()
    update = torch.zeros_like(residual)
    for w in layers:
        x = rms_norm_cuda(update, residual, w.norm, EPS, 0.0, early=early)
        update = F.linear(attend(F.linear(x, w.qkv), w, step, early), w.o)
        x = rms_norm_cuda(update, residual, w.mlp_norm, EPS, 0.0, early=early)
        gated = gated_activation_cuda(F.linear(x, w.gate_up), "silu", early=early)
        update = F.linear(gated, w.down)
    return residual + update


def fused(
    residual: torch.Tensor,
    layers: list[Weights],
    step: Step,
    early: bool,
    norms_apart: bool = False,
    few_rows: FewRowsSettings | None = None,
    one_row: OneRowSettings | None = None,
) -> torch.Tensor:
    """Our products, with norm, activation and residual in the same pass.

    Args:
        norms_apart: norms by kernels of their own.
        few_rows, one_row: launch settings.
    """
    multiply = partial(skinny_linear, early=early, few_rows=few_rows, one_row=one_row)

    def normed(weight: torch.Tensor, norm: torch.Tensor, gated: bool = False) -> torch.Tensor:
        if norms_apart:
            x = rms_norm_cuda(residual, None, norm, EPS, 0.0, early=early)
            return multiply(x, weight, gated=gated)
        return multiply(residual, weight, norm=(norm, EPS, 0.0), gated=gated)

    for w in layers:
        attended = attend(normed(w.qkv, w.norm), w, step, early)
        residual = multiply(attended, w.o, residual=residual)
        residual = multiply(normed(w.gate_up, w.mlp_norm, True), w.down, residual=residual)
    return residual


def variants(batch: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Return the ways to compute the chain, by name."""
    found: dict[str, Callable[..., torch.Tensor]] = {
        "separate": partial(separate, early=False),
        "separate, early": partial(separate, early=True),
    }
    if batch == 1:
        found["fused"] = partial(fused, early=False)
        for block_n, blocks in ((4, 1), (2, 1), (2, 4)):
            settings = OneRowSettings(block_n, blocks)
            found[f"fused, early, {block_n} x {blocks}"] = partial(
                fused, early=True, one_row=settings
            )
        found["fused but norms, early"] = partial(fused, early=True, norms_apart=True)
    elif batch <= 16:
        found["fused"] = partial(fused, early=False)
        for block_n, warps, prefetch in (
            (16, 4, 1024),
            (16, 2, 1024),
            (16, 4, 4096),
            (32, 4, 1024),
        ):
            settings = FewRowsSettings(block_n, 256, warps, 4 if block_n == 16 else 3, prefetch)
            for apart in (False, True):
                name = f"fused{' but norms' if apart else ''}, early, {block_n}/{warps}/{prefetch}"
                found[name] = partial(fused, early=True, norms_apart=apart, few_rows=settings)
    return found


def check_same(results: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> None:
    """All variants agree up to rounding, and each with itself exactly: else something races."""
    expected = results["separate"].double()
    for name, result in results.items():
        error = float((result.double() - expected).norm() / expected.norm())
        if not error < 2e-2:
            print(f"layer: {name} DIFFERS by {error:.4f}")
        if not torch.equal(result, again[name]):
            print(f"layer: {name} is NOT THE SAME when computed again: a race")


def layer(found: Measurements) -> None:
    """Whole layers of a decode step at context 1024, by batch."""
    weights = [make_weights(256 * 1024 // PAGE) for _ in range(LAYERS)]
    size = sum(t.nbytes for t in (weights[0].qkv, weights[0].o, weights[0].gate_up))
    size += weights[0].down.nbytes
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        context = 1024
        step = make_step(batch, context)
        x = random(batch, HIDDEN)
        chains = {name: partial(run, x, weights, step) for name, run in variants(batch).items()}
        if not found.only_compile:
            try:
                first = {name: run() for name, run in chains.items()}
                check_same(first, {name: run() for name, run in chains.items()})
            except Exception as error:
                print(f"layer, batch {batch}: FAILED", type(error).__name__, error)
        read = LAYERS * (size + batch * context * KV_HEADS * DIM * 4)
        for name, run in chains.items():
            found.time(
                "layer", f"{LAYERS} layers, batch {batch}", [run], bytes_read=read, settings=name
            )
    found.show("layer", best=12)
