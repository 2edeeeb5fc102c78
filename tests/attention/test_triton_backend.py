"""The decoder over the Triton backend gives transformers' logits, too."""

from __future__ import annotations

import pytest
import torch

from mii.attention.triton import TritonAttention
from tests.kernels.cache import DEVICE
from tests.models.test_decoder import Driver, ids_of, reference
from tests.models.tiny import decoder_of, tiny_model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3"])
def test_prompts_chunks_and_decodes_in_one_step(name: str) -> None:
    model = tiny_model(name)
    driver = Driver(decoder_of(model, device=DEVICE, backend=TritonAttention()))
    first, second, third = ids_of(45, 1), ids_of(20, 2), ids_of(9, 3)
    driver.step({1: first[:30], 2: second[:19]})
    rows = driver.step({1: first[30:], 2: second[19:], 3: third})
    for uid, ids in ((1, first), (2, second), (3, third)):
        expected = reference(model, ids)[-1]
        error = (rows[uid].cpu() - expected).norm() / expected.norm()
        assert error < 1e-4
        assert rows[uid].argmax() == expected.argmax()
    assert torch.isfinite(rows[1]).all()
