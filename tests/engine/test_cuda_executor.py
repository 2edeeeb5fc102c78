"""The GPU's way to compute steps gives the tokens of the plain one (on a CPU, interpreted)."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from mii.attention.triton import TritonAttention
from mii.engine.cuda_executor import CUDAExecutor, graph_sizes
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.executor import HostExecutor
from mii.engine.params import check_params, resolve_params
from mii.engine.ragged import RaggedBatchWrapper
from mii.engine.runner import ModelRunner
from mii.engine.sampler import Sampler, SamplingState
from mii.engine.scheduler import ScheduledRequest
from mii.engine.state_manager import DSStateManager
from mii.kernels import linear_triton
from mii.models.decoder import Decoder
from tests.kernels.cache import DEVICE
from tests.models.tiny import decoder_of, tiny_model

BLOCK, SLOTS, LENGTH = 16, 8, 128


def engine_over(decoder: Decoder, blocks: int, on_gpu: bool) -> InferenceEngineV2:
    decoder.allocate_cache(blocks, BLOCK)
    executor = HostExecutor(
        ModelRunner(decoder, RaggedBatchWrapper(SLOTS, LENGTH, BLOCK, decoder.device)),
        Sampler(decoder.vocab_size),
    )
    if on_gpu:
        executor = CUDAExecutor(
            decoder,
            max_slots=SLOTS,
            max_length=LENGTH,
            num_blocks=blocks,
            block_size=BLOCK,
            max_tokens=24,
            max_sequences=6,
            device=decoder.device,
        )
        if DEVICE.type == "cuda":
            executor.capture(lambda what, fraction: None)
    state = DSStateManager(blocks, BLOCK, SLOTS, LENGTH)
    return InferenceEngineV2(executor, state, token_budget=24, max_sequences=6)


def answers(engine: InferenceEngineV2, settings: list[dict[str, object]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    generator = torch.Generator().manual_seed(5)
    for uid, values in enumerate(settings):
        length = int(torch.randint(1, 40, (), generator=generator))
        prompt = torch.randint(0, 211, (length,), generator=generator).tolist()
        params = resolve_params(check_params(values))
        count = params.max_new_tokens or 1
        engine.add_request(
            ScheduledRequest(uid, tuple(prompt), count),
            SamplingState(params, seed=uid, prompt_ids=prompt, stop_ids=[3]),
        )
        found[uid] = []
    while engine.has_work:
        for update, _ in engine.step():
            found[update.uid].append(update.token_id)
    assert engine.free_blocks == [engine.state_manager.pool.num_blocks]
    return found


GREEDY = [{"temperature": 0, "max_new_tokens": n} for n in (8, 3, 14, 1, 9)]
DRAWN = [
    {"temperature": 1.0, "max_new_tokens": 6},
    {"temperature": 0.8, "top_k": 20, "max_new_tokens": 9},
    {"temperature": 0, "max_new_tokens": 7},
    {"top_p": 0.7, "max_new_tokens": 8},
]
ON_HOST = [*DRAWN, {"repetition_penalty": 1.3, "min_new_tokens": 4, "max_new_tokens": 6}]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("blocks", [64, 6], ids=["roomy", "preempting"])
@pytest.mark.parametrize("settings", [GREEDY, DRAWN, ON_HOST], ids=["greedy", "drawn", "on-host"])
def test_tokens_equal_the_host_executors(settings: list[dict[str, object]], blocks: int) -> None:
    model = tiny_model("llama-small")
    plain = engine_over(decoder_of(model), 64, on_gpu=False)
    decoder = decoder_of(model, device=DEVICE, backend=TritonAttention())
    fast = engine_over(decoder, blocks, on_gpu=True)
    assert answers(fast, settings) == answers(plain, settings)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("name", ["llama-small", "qwen2"])
def test_fused_steps_of_one_row_give_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    settings = [{"temperature": 0, "max_new_tokens": 4}]  # one request: steps of one row
    expected = answers(engine_over(decoder_of(model), 64, on_gpu=False), settings)
    monkeypatch.setattr("mii.kernels.linear._onednn_packs", lambda: False)
    decoder = decoder_of(model, device=DEVICE, backend=TritonAttention())
    assert decoder.fuse_single_rows()
    kernel = Mock(wraps=linear_triton.one_row_linear)
    monkeypatch.setattr(linear_triton, "one_row_linear", kernel)
    assert answers(engine_over(decoder, 64, on_gpu=True), settings) == expected
    assert kernel.call_count


@pytest.mark.parametrize("name", ["gemma3", "llama-gelu", "llama-biases"])
def test_what_the_products_cannot_do_is_not_fused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mii.kernels.linear._onednn_packs", lambda: False)
    assert not decoder_of(tiny_model(name)).fuse_single_rows()


def test_graph_sizes_rise_to_the_largest_batch_and_pad_little() -> None:
    assert graph_sizes(6) == [1, 2, 3, 4, 5, 6]
    sizes = graph_sizes(512)
    assert sizes[-1] == 512
    assert all(b - a <= max(1, b // 3) for a, b in zip(sizes, sizes[1:], strict=False))
