"""One decode step's layers as a chain, and what fusing its kernels saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import Measurements
from mii.kernels.activation_triton import gated_activation_cuda
from mii.kernels.attention_decode import DecodeWork, attention_decode, plan_decode, wanted_parts
from mii.kernels.linear_triton import OneRowSettings, one_row_linear
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


def attend(qkv: torch.Tensor, w: Weights, step: Step) -> torch.Tensor:
    query = prepare_attention(
        qkv.view(len(qkv), -1, DIM), HEADS, step.rotary, None, 0.0, 0.0, w.keys, w.values,
        step.slots,
    )  # fmt: skip
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attention_decode(query, w.keys, w.values, step.tables, step.work, output, scale=DIM**-0.5)
    return output.flatten(1)


def separate(residual: torch.Tensor, layers: list[Weights], step: Step) -> torch.Tensor:
    """Products by cuBLAS; norms, rotation and activation by kernels of their own."""
    residual = residual.clone()
    update = torch.zeros_like(residual)
    for w in layers:
        x = rms_norm_cuda(update, residual, w.norm, EPS, 0.0)
        update = F.linear(attend(F.linear(x, w.qkv), w, step), w.o)
        x = rms_norm_cuda(update, residual, w.mlp_norm, EPS, 0.0)
        gated = gated_activation_cuda(F.linear(x, w.gate_up), "silu")
        update = F.linear(gated, w.down)
    return residual + update


def fused(
    residual: torch.Tensor, layers: list[Weights], step: Step, settings: OneRowSettings
) -> torch.Tensor:
    """Our products of one row, with norm, activation and residual in the same pass."""
    multiply = partial(one_row_linear, settings=settings)
    for w in layers:
        attended = attend(multiply(residual, w.qkv, norm=(w.norm, EPS, 0.0)), w, step)
        residual = multiply(attended, w.o, residual=residual)
        gated = multiply(residual, w.gate_up, norm=(w.mlp_norm, EPS, 0.0), gated=True)
        residual = multiply(gated, w.down, residual=residual)
    return residual


def variants(batch: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Return the ways to compute the chain, by name."""
    found: dict[str, Callable[..., torch.Tensor]] = {"separate": separate}
    if batch == 1:
        for block_n, blocks in ((4, 1), (2, 1), (2, 4)):
            settings = OneRowSettings(block_n, blocks)
            found[f"fused, {block_n} x {blocks}"] = partial(fused, settings=settings)
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
