"""Greedy ids equal transformers', whatever runs beside a request and however it is served.

The oracle is one forward pass of transformers over prompt and answer: each token of the answer must
be the most probable one after those before it, which is what its greedy generation would have
chosen. The long form is the issue's own: 30 prompts of 1 to 2,000 tokens, 64 new tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mii.config import EngineConfig
from mii.engine.build import engine_over
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.params import SamplingParams
from mii.engine.sampler import SamplingState
from mii.engine.scheduler import ScheduledRequest
from mii.models.decoder import Decoder
from mii.models.loader import load_decoder
from mii.parallel.group import SingleRank
from mii.parallel.rank import Rank
from mii.pipeline import build_pipeline
from tests.models.texts import TEXTS

Ids = list[int]

SHORT = ([1, 2, 15, 16, 17, 60, 130, 301], 12)  # prompt lengths, new tokens
LONG = ([round(1 + 1999 * (i / 29) ** 2.5) for i in range(30)], 64)
LONG_MARKS = (pytest.mark.full, pytest.mark.timeout(7200))


def config_for(folder: Path, **options: object) -> EngineConfig:
    values = {
        "model_path": str(folder),
        "tokenizer_path": str(folder),
        "model_name": "checked",
        "dtype": "float32",
        "device": "cpu",
        "max_length": 2100,
        "block_size": 32,
        "num_blocks": 1400,
        "max_ragged_batch_size": 256,
        "max_ragged_sequence_count": 64,
        "threads": 2,
        **options,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def prompts_of(folder: Path, lengths: Sequence[int]) -> list[Ids]:
    """Pieces of real text of many kinds, cut to length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = [
        i for text in (licence, *TEXTS) for i in tokenizer.encode(text, add_special_tokens=False)
    ]
    generator = torch.Generator().manual_seed(3)
    prompts = []
    for length in lengths:
        start = int(torch.randint(0, len(ids) - length, (), generator=generator))
        prompts.append(ids[start : start + length])
    return prompts


def answers(engine: InferenceEngineV2, prompts: Sequence[Ids], count: int) -> list[Ids]:
    """Run all prompts through one engine at once."""
    found: dict[int, Ids] = {}
    for uid, prompt in enumerate(prompts):
        found[uid] = []
        state = SamplingState(SamplingParams(temperature=0.0), seed=0)
        engine.add_request(ScheduledRequest(uid, tuple(prompt), count), state)
    while engine.has_work:
        for update, _ in engine.step():
            found[update.uid].append(update.token_id)
    return list(found.values())


def assert_greedy(model: PreTrainedModel, prompt: Ids, answer: Ids) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer


class Checked:
    """A model, its prompts, and the answers that transformers has confirmed."""

    def __init__(self, folder: Path, lengths: Sequence[int], count: int) -> None:
        self.folder, self.count = folder, count
        self.prompts = prompts_of(folder, lengths)
        self.decoder: Decoder = load_decoder(
            folder, dtype=torch.float32, device=torch.device("cpu"), group=SingleRank()
        )
        self.answers = answers(self.engine(), self.prompts, count)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            assert_greedy(reference, prompt, answer)

    def engine(self, **options: object) -> InferenceEngineV2:
        return engine_over(self.decoder, config_for(self.folder, **options), Rank())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("smollm2", *SHORT), id="smollm2"),
        pytest.param(("smollm2", *LONG), id="smollm2-long", marks=LONG_MARKS),
        pytest.param(("gemma3_270m", *LONG), id="gemma3-long", marks=LONG_MARKS),
    ],
)
def checked(request: pytest.FixtureRequest) -> Checked:
    torch.set_num_threads(2)
    name, lengths, count = request.param
    return Checked(request.getfixturevalue(name), lengths, count)


def test_alone(checked: Checked) -> None:
    engine = checked.engine(prefix_caching=False)
    for prompt, answer in zip(checked.prompts, checked.answers, strict=True):
        assert answers(engine, [prompt], checked.count) == [answer]


def test_with_a_hot_prefix_cache(checked: Checked) -> None:
    engine = checked.engine()
    assert answers(engine, checked.prompts, checked.count) == checked.answers
    assert answers(engine, checked.prompts, checked.count) == checked.answers
    assert engine.stats().prefix_cache_hit_tokens > 0


def test_with_so_few_blocks_that_requests_are_preempted(checked: Checked) -> None:
    longest = max(map(len, checked.prompts)) + checked.count
    engine = checked.engine(num_blocks=-(-longest // 8) + 1, block_size=8)
    assert answers(engine, checked.prompts, checked.count) == checked.answers
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("size", [2, 3])
def test_tensor_parallel(checked: Checked, size: int) -> None:
    if size > checked.decoder.spec.num_heads:
        pytest.skip(f"the model has only {checked.decoder.spec.num_heads} heads")
    config = config_for(checked.folder, tensor_parallel=size, threads=1, skip_tokenizer=True)
    with build_pipeline(config) as pipeline:
        responses = pipeline(
            prompt_token_ids=checked.prompts,
            max_new_tokens=checked.count,
            temperature=0,
            ignore_eos=True,
        )
    assert responses is not None
    assert [response.token_ids for response in responses] == checked.answers
