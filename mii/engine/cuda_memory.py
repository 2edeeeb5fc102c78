"""How many blocks of KV cache a GPU has room for, found by running the largest step."""

from __future__ import annotations

from dataclasses import replace

import torch

from mii.config import EngineConfig
from mii.engine.cuda_executor import CUDAExecutor
from mii.engine.plan import PlannedSequence, StepPlan
from mii.engine.runner import CausalModel
from mii.errors import DeploymentError
from mii.models.progress import Progress

_GRAPH_BYTES = 1 << 30  # left for CUDA graphs and what the driver takes later


def with_measured_blocks(
    model: CausalModel, config: EngineConfig, progress: Progress
) -> EngineConfig:
    """Return the configuration with `num_blocks` chosen, unless it was.

    Raises:
        DeploymentError: if weights and one step leave no room for a cache.
    """
    if config.num_blocks is not None:
        return config
    assert config.block_size is not None
    block_bytes = model.cache_bytes_per_block(config.block_size)
    if config.kv_cache_bytes is not None:
        return replace(config, num_blocks=max(1, config.kv_cache_bytes // block_bytes))
    progress("measuring the memory of the largest step", None)
    free, total = torch.cuda.mem_get_info()
    elsewhere = total - free - torch.cuda.memory_reserved()  # other processes, and the context
    peak = _peak_of_largest_step(model, config)
    room = int(total * config.gpu_memory_fraction) - elsewhere - peak - _GRAPH_BYTES
    blocks = room // block_bytes
    if blocks < 1:
        raise DeploymentError(
            f"the GPU has no room for a KV cache: of {total / 1e9:.1f} GB, gpu_memory_fraction = "
            f"{config.gpu_memory_fraction} may be used; other processes hold {elsewhere / 1e9:.1f} "
            f"GB, and the weights with the largest step take {peak / 1e9:.1f} GB: raise "
            "gpu_memory_fraction, or lower max_ragged_batch_size"
        )
    return replace(config, num_blocks=blocks)


def _peak_of_largest_step(model: CausalModel, config: EngineConfig) -> int:
    """Run the step with the most tokens and the most logits; return the bytes it took at most."""
    tokens, sequences = config.max_ragged_batch_size, config.max_ragged_sequence_count
    size, limit = config.block_size, min(config.max_length or model.max_length, model.max_length)
    assert tokens is not None and sequences is not None and size is not None
    lengths = [1] * (sequences - 1)
    left = tokens - len(lengths)
    while left > 0:
        lengths.append(min(left, limit))
        left -= lengths[-1]
    planned, blocks = [], 0
    for uid, length in enumerate(lengths):
        count = -(-length // size)
        ids = (0,) * length
        table = tuple(range(blocks, blocks + count))
        planned.append(PlannedSequence(uid, uid, 0, length, ids, table, length, True, first=True))
        blocks += count
    plan = StepPlan(0, tuple(planned), num_decodes=sum(n == 1 for n in lengths))
    model.allocate_cache(blocks, size)
    executor = CUDAExecutor(
        model,
        max_slots=len(lengths),
        max_length=limit,
        num_blocks=blocks,
        block_size=size,
        max_tokens=tokens,
        max_sequences=sequences,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    torch.cuda.reset_peak_memory_stats()
    executor.forward(plan).float()
    torch.cuda.synchronize()
    cache = (blocks + 1) * model.cache_bytes_per_block(size)
    torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated() - cache
