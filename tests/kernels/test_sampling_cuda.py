"""The GPU's sampler draws the same tokens as the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mii.kernels.sampling import Draw, draw_tokens, most_probable
from mii.kernels.sampling_triton import SlotSampling, draw_tokens_cuda
from tests.kernels.cache import DEVICE, nan_in_new_tensors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 40, 0.8, 0.0),
    (2.0, 0, 1.0, 0.1),
    (0.5, 0, 0.3, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (0.01, 0, 0.95, 0.0),
]


@pytest.mark.parametrize(
    ("vocab", "scale"),
    [(211, 3.0), (9000, 0.01), (9000, 6.0), (9000, 1.0)],
    ids=["fewer-runs-than-top-k", "too-many-to-gather", "gathered-from-blocks", "flat"],
)
def test_tokens_equal_the_reference(vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    count = len(SETTINGS)
    slots = torch.randperm(count + 4, generator=generator)[:count]
    sampling = SlotSampling(count + 4, torch.device("cpu"))
    seeds = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    for slot, seed, (temperature, top_k, top_p, min_p) in zip(
        slots.tolist(), seeds, SETTINGS, strict=True
    ):
        sampling.temperature[slot] = temperature
        sampling.top_k[slot] = top_k
        sampling.top_p[slot] = top_p
        sampling.min_p[slot] = min_p
        sampling.seed[slot] = seed
        sampling.choice[slot] = seed % 3
    for name, tensor in vars(sampling).items():
        setattr(sampling, name, tensor.to(DEVICE))
    for position in range(3):
        logits = scale * torch.randn(count, vocab, generator=generator)
        draws = [
            Draw(t, k, p, m, seed, seed % 3, position)
            for seed, (t, k, p, m) in zip(seeds, SETTINGS, strict=True)
        ]
        expected = draw_tokens(list(logits.numpy()), draws)
        positions = torch.full((count,), position, device=DEVICE)
        with nan_in_new_tensors():
            tokens = draw_tokens_cuda(logits.to(DEVICE), slots.to(DEVICE), positions, sampling)
        assert tokens.tolist() == expected


def test_greedy_takes_the_first_of_the_greatest_and_survives_nan() -> None:
    logits = torch.randn(4, 5000)
    logits[0, [17, 4500]] = 9.0
    logits[1, 3] = float("nan")
    logits[2, :] = float("nan")
    slots, positions = torch.arange(4, device=DEVICE), torch.zeros(4, dtype=torch.int64)
    sampling = SlotSampling(4, DEVICE)
    expected = [most_probable(row) for row in np.asarray(logits)]
    assert expected[0] == 17
    for greedy in (True, False):
        tokens = draw_tokens_cuda(
            logits.to(DEVICE), slots, positions.to(DEVICE), sampling, greedy=greedy
        )
        assert tokens.tolist() == expected


def test_infinite_logits_give_the_most_probable_token_whatever_the_temperature() -> None:
    logits = torch.randn(3, 300)
    logits[0, 40] = float("inf")
    logits[1, :] = float("-inf")
    logits[2, :] = float("nan")
    sampling = SlotSampling(3, DEVICE)
    sampling.temperature.fill_(1.0)
    sampling.top_p[:2] = 0.5
    slots = torch.arange(3, device=DEVICE)
    tokens = draw_tokens_cuda(logits.to(DEVICE), slots, slots, sampling)
    assert tokens.tolist() == [40, 0, 0]
