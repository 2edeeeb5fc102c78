"""Puts an engine together out of a configuration: model, cache, and what drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mii.config import EngineConfig
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.executor import Executor, HostExecutor
from mii.engine.generator import Generator
from mii.engine.params import model_defaults
from mii.engine.plan import StepPlan
from mii.engine.prompts import ModelLimits, PromptProcessor
from mii.engine.ragged import RaggedBatchWrapper
from mii.engine.runner import CausalModel, ModelRunner
from mii.engine.sampler import Sampler
from mii.engine.state_manager import DSStateManager
from mii.errors import InvalidArgument
from mii.models.checkpoint import read_eos_token_ids, read_generation_config
from mii.models.loader import load_decoder
from mii.models.progress import Progress, silent
from mii.models.tokenizer import load_tokenizer
from mii.parallel.links import PlanReceiver, PlanSender
from mii.parallel.rank import Rank, join_group

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class _Sizes:
    """The sizes of an EngineConfig, all of which have been chosen by now."""

    block_size: int
    num_blocks: int
    max_length: int
    max_tokens: int
    token_budget: int
    max_sequences: int


def build_engine(
    config: EngineConfig, rank: Rank | None = None, progress: Progress = silent
) -> InferenceEngineV2:
    """Load rank 0's share of the model and build its engine.

    Args:
        config: with everything chosen (see mii.strategy).
        rank: the links to the replica's other ranks; None: there are none.
        progress: told what is going on.

    Raises:
        ModelError: if the model cannot be loaded.
    """
    rank = rank or Rank()
    return engine_over(_load_model(config, rank, progress), config, rank, progress)


def engine_over(
    model: CausalModel, config: EngineConfig, rank: Rank, progress: Progress = silent
) -> InferenceEngineV2:
    """Build the engine around a model that is loaded."""
    if config.device == "cuda":
        from mii.engine.cuda_memory import with_measured_blocks  # needs Triton

        config = with_measured_blocks(model, config, progress)
    sizes = _sizes(config, model)
    progress("allocating the KV cache", None)
    model.allocate_cache(sizes.num_blocks, sizes.block_size)
    state = DSStateManager(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_tracked_sequences=config.max_tracked_sequences,
        max_length=sizes.max_length,
        prefix_caching=config.prefix_caching,
        static_length=model.static_length,
    )
    return InferenceEngineV2(
        _executor(model, config, sizes, rank, progress),
        state,
        token_budget=sizes.token_budget,
        max_sequences=sizes.max_sequences,
        max_tokens=sizes.max_tokens,
    )


def _executor(
    model: CausalModel, config: EngineConfig, sizes: _Sizes, rank: Rank, progress: Progress
) -> Executor:
    if config.device == "cuda":
        from mii.engine.cuda_executor import CUDAExecutor

        executor = CUDAExecutor(
            model,
            max_slots=config.max_tracked_sequences,
            max_length=sizes.max_length,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_tokens=sizes.max_tokens,
            max_sequences=sizes.max_sequences,
            device=torch.device("cuda", rank.rank),
        )
        executor.capture(progress)
        return executor
    assert rank.plans is None or isinstance(rank.plans, PlanSender)
    runner = ModelRunner(model, _ragged(config, sizes), rank.plans)
    return HostExecutor(runner, Sampler(model.vocab_size))


def build_generator(
    config: EngineConfig, rank: Rank | None = None, progress: Progress = silent
) -> Generator:
    """Build rank 0's engine with its text side. See `build_engine`."""
    model_folder = Path(config.model_path)
    tokenizer = None
    if not config.skip_tokenizer:
        progress("loading the tokenizer", None)
        tokenizer = load_tokenizer(
            Path(config.tokenizer_path),
            config.chat_template,
            model_folder=model_folder,
            trust_remote_code=config.trust_remote_code,
        )
    engine = build_engine(config, rank, progress)
    state = engine.state_manager
    # The last token of a sequence is never computed, so it needs no place in the cache.
    capacity = state.pool.num_blocks * state.block_size + 1
    limits = ModelLimits(
        vocab_size=engine.model().vocab_size,
        max_length=min(state.max_length, capacity),
        eos_ids=tokenizer.eos_token_ids if tokenizer else read_eos_token_ids(model_folder),
        generation_defaults=model_defaults(read_generation_config(model_folder)),
    )
    return Generator(engine, PromptProcessor(tokenizer, limits), config.max_tracked_sequences)


@dataclass
class FollowerStats:
    """What a rank other than 0 counts."""

    steps: int = 0


def run_follower(
    config: EngineConfig,
    rank: Rank,
    progress: Progress,
    on_ready: Callable[[FollowerStats], None],
) -> None:
    """Run a rank other than 0: compute every plan that rank 0 sends, until it closes its link.

    Args:
        config: with everything chosen, the same as rank 0's.
        rank: this rank.
        progress: told what is going on while the model loads.
        on_ready: called once, when the rank is ready, with the counters that will move.
    """
    plans = rank.plans
    assert isinstance(plans, PlanReceiver)
    model = _load_model(config, rank, progress)
    sizes = _sizes(config, model)
    model.allocate_cache(sizes.num_blocks, sizes.block_size)
    runner = ModelRunner(model, _ragged(config, sizes))
    stats = FollowerStats()
    on_ready(stats)
    while (plan := plans.receive()) is not None:
        runner.forward(StepPlan.from_bytes(plan))
        stats.steps += 1


def _load_model(config: EngineConfig, rank: Rank, progress: Progress) -> CausalModel:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch.device("cuda", rank.rank) if config.device == "cuda" else torch.device("cpu")
    if config.dtype not in DTYPES:
        raise InvalidArgument.of("dtype", config.dtype, "one of " + ", ".join(DTYPES))
    progress("joining the other ranks" if rank.size > 1 else "loading weights", None)
    group = join_group(rank, device.type)
    return load_decoder(
        Path(config.model_path),
        dtype=DTYPES[config.dtype],
        device=device,
        group=group,
        progress=progress,
    )


def _sizes(config: EngineConfig, model: CausalModel) -> _Sizes:
    chosen = (config.block_size, config.num_blocks, config.max_ragged_batch_size)
    block_size, num_blocks, tokens = chosen
    sequences = config.max_ragged_sequence_count
    assert block_size is not None and num_blocks is not None, chosen
    assert tokens is not None and sequences is not None, chosen
    budget = min(config.token_budget or tokens, tokens)
    max_length = min(config.max_length or model.max_length, model.max_length)
    return _Sizes(block_size, num_blocks, max_length, tokens, budget, sequences)


def _ragged(config: EngineConfig, sizes: _Sizes) -> RaggedBatchWrapper:
    device = torch.device(config.device)
    return RaggedBatchWrapper(
        config.max_tracked_sequences, sizes.max_length, sizes.block_size, device
    )
