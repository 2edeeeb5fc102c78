"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine. Counters only grow."""

    steps: int  # forward passes; moves while there is work
    running: int  # requests that hold blocks
    waiting: int  # requests that hold none
    total_blocks: int
    free_blocks: int  # unused, or held only by the prefix cache
    block_size: int  # tokens
    prompt_tokens: int  # of all requests accepted
    generated_tokens: int
    prefix_cache_hit_tokens: int  # prompt tokens that were not computed
    preemptions: int
    last_step_seconds: float
