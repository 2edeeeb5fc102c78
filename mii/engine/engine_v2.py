"""The v2 engine: continuous batching over a blocked KV cache.

`put` computes what the caller says, as DeepSpeed-FastGen's engine does; `add_request` and `step`
let the engine's own scheduler say it. Both go the same way: state manager, plan, runner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mii.engine.executor import Executor, Pending
from mii.engine.metrics import EngineStats
from mii.engine.plan import PlannedSequence, StepPlan, TokenLogprobs
from mii.engine.runner import CausalModel
from mii.engine.sampler import SamplingState
from mii.engine.scheduler import ScheduledRequest, Scheduler, TokenUpdate
from mii.engine.state_manager import (
    DSStateManager,
    SchedulingError,
    SchedulingResult,
    SequenceState,
)
from mii.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way."""

    plan: StepPlan
    pending: Pending
    began: float


class InferenceEngineV2:
    """One replica's engine, driven from one thread. Ids in, ids out.

    Args:
        executor: computes steps.
        state: tracks sequences and blocks.
        token_budget: tokens of a step in which sequences decode, at most.
        max_sequences: sequences of one step at most (FastGen's max_ragged_sequence_count).
        max_tokens: tokens of any step at most (max_ragged_batch_size); None: as token_budget.
    """

    def __init__(
        self,
        executor: Executor,
        state: DSStateManager,
        *,
        token_budget: int,
        max_sequences: int,
        max_tokens: int | None = None,
    ) -> None:
        self._executor = executor
        self._state = state
        self._scheduler = Scheduler(state, token_budget, max_sequences, max_tokens)
        self._sampling: dict[int, SamplingState] = {}
        self._host_sampled = 0  # requests whose tokens only the host can draw
        self._launched: deque[_Launched] = deque()
        self._on_destroy: Callable[[], None] = lambda: None
        # Called before a step is launched, with the plans of all steps that are then under way.
        self.on_launch: Callable[[Sequence[StepPlan]], None] = lambda plans: None
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._last_step_seconds = 0.0

    # The serving path.

    def add_request(self, request: ScheduledRequest, sampling: SamplingState) -> None:
        """Queue a request; its tokens come out of `step`, those after its `answer_ids`.

        Raises:
            InvalidArgument: if the engine could never hold it.
        """
        self._scheduler.add(request)
        sampling.replay(request.answer_ids)
        self._sampling[request.uid] = sampling
        self._host_sampled += sampling.needs_host
        self._prompt_tokens += len(request.prompt_ids)

    def remove_request(self, uid: int) -> None:
        """Forget a request and free its blocks at once. Unknown uids are ignored."""
        self._scheduler.remove(uid)
        self._forget(uid)

    def step(self) -> list[tuple[TokenUpdate, TokenLogprobs | None]]:
        """Compose and launch one step, and return the new tokens of one that has ended.

        Requests that end are forgotten. Where the executor allows it, a step is composed while the
        one before it is still computed: then its tokens come out one call later.
        """
        # Where only the host can draw a token, each must be known before the next is drawn.
        finished = self._finish(0) if self._host_sampled else []
        plan = self._scheduler.schedule()
        if plan is not None:
            uids = (planned.uid for planned in plan.sequences if planned.samples)
            states = [self._sampling[uid] for uid in uids]
            self.on_launch([*(launched.plan for launched in self._launched), plan])
            self._launched.append(
                _Launched(plan, self._executor.launch(plan, states), time.perf_counter())
            )
            self._steps += 1
        depth = 0 if plan is None or self._host_sampled else self._executor.depth
        return finished + self._finish(depth)

    def _finish(self, depth: int) -> list[tuple[TokenUpdate, TokenLogprobs | None]]:
        """Take in the results of launched steps, all but the latest `depth` of them."""
        tokens = []
        while len(self._launched) > depth:
            launched = self._launched.popleft()
            result = launched.pending()
            updates = self._scheduler.update(launched.plan, result)
            for update in updates:
                if update.finish_reason is not None:
                    self._forget(update.uid)
            self._generated_tokens += len(updates)
            self._last_step_seconds = time.perf_counter() - launched.began
            tokens += [(update, result.logprobs.get(update.uid)) for update in updates]
        return tokens

    def _forget(self, uid: int) -> None:
        state = self._sampling.pop(uid, None)
        if state is not None and state.needs_host:
            self._host_sampled -= 1

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        requests = self._scheduler.num_running + self._scheduler.num_waiting
        return requests + len(self._launched) > 0

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters. May be called from any thread."""
        return EngineStats(
            steps=self._steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            total_blocks=self._state.pool.num_blocks,
            free_blocks=self._state.free_blocks,
            block_size=self._state.block_size,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_cache_hit_tokens=self._scheduler.num_cached_tokens,
            preemptions=self._scheduler.num_preemptions,
            last_step_seconds=self._last_step_seconds,
        )

    # DeepSpeed-FastGen's surface.

    def put(
        self,
        batch_uids: Sequence[int],
        batch_tokens: Sequence[Sequence[int] | torch.Tensor],
        do_checks: bool = True,
    ) -> torch.Tensor:
        """Compute further tokens of each sequence.

        Args:
            batch_uids: one id per sequence; an id not seen before begins a sequence.
            batch_tokens: for each, a list or 1-D integer tensor of token ids.
            do_checks: hold to the limits of one step, too; those of the cache always hold.

        Returns:
            fp32 logits [sequences, vocabulary] after the last token of each, in the order given.

        Raises:
            InvalidArgument: for empty or foreign token ids, or an id given twice.
            SchedulingError: if `can_schedule` refuses.
        """
        tokens = [self._as_ids(ids) for ids in batch_tokens]
        if len(tokens) != len(batch_uids) or len(set(batch_uids)) != len(batch_uids):
            raise InvalidArgument.of(
                "batch_uids", batch_uids, "one distinct id for each item of batch_tokens"
            )
        check = self.can_schedule if do_checks else self._state.can_schedule
        result = check(batch_uids, [len(ids) for ids in tokens])
        if result is not SchedulingResult.Success:
            raise SchedulingError(result)
        planned = [self._put_one(uid, ids) for uid, ids in zip(batch_uids, tokens, strict=True)]
        order = sorted(range(len(planned)), key=lambda i: planned[i].num_tokens > 1)
        decodes = sum(item.num_tokens == 1 for item in planned)
        plan = StepPlan(self._steps, tuple(planned[i] for i in order), num_decodes=decodes)
        logits = self._executor.forward(plan)
        self._steps += 1
        for uid in batch_uids:
            self._state.name_full_blocks(self._state.get_or_create_sequence(uid))
        return logits[torch.tensor(order).argsort().to(logits.device)].float()

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: int) -> tuple[int, int]:
        """Return how many tokens of a sequence could be put next, and the blocks they would take.

        Args:
            uid: the sequence; it need not exist yet.
            max_request_tokens: tokens wanted.
            max_request_blocks: blocks that may be spent on them.
        """
        sequence = self._state.get_sequence(uid)
        if sequence is None:
            if self._state.n_tracked_sequences >= self._state.max_tracked_sequences:
                return 0, 0
            sequence = SequenceState(uid=uid, slot=0)
        size = self._state.block_size
        capacity = (len(sequence.blocks) + max_request_blocks) * size - sequence.num_computed
        room = self._state.max_length - sequence.num_computed
        tokens = max(0, min(max_request_tokens, capacity, room))
        return tokens, self._state.blocks_wanted(sequence, tokens)

    def can_schedule(self, uids: Sequence[int], lengths: Sequence[int]) -> SchedulingResult:
        """Say whether one `put` of so many tokens for these sequences would go through."""
        if len(uids) > self._scheduler.max_sequences:
            return SchedulingResult.BatchSequenceLimitExceeded
        if sum(lengths) > self._scheduler.max_tokens:
            return SchedulingResult.BatchTokenLimitExceeded
        return self._state.can_schedule(uids, lengths)

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Return the tokens that the sequence's last block already holds.

        0 at a block boundary, where the next token takes a new block, and for an unknown uid; the
        name and the answer are FastGen's.
        """
        sequence = self._state.get_sequence(uid)
        return sequence.num_computed % self._state.block_size if sequence is not None else 0

    def flush(self, uid: int) -> None:
        """Forget a sequence that `put` began and free its blocks. Unknown uids are ignored."""
        self._state.flush_sequence(uid)

    @property
    def free_blocks(self) -> list[int]:
        """Blocks that can be had at once, one number per cache group (there is one)."""
        return [self._state.free_blocks]

    @property
    def n_kv_cache_groups(self) -> int:
        """Groups of layers with a cache of their own."""
        return self._state.n_kv_cache_groups

    @property
    def state_manager(self) -> DSStateManager:
        """The sequences and blocks of this engine."""
        return self._state

    def model(self) -> CausalModel:
        """Return this rank's model."""
        return self._executor.model()

    def on_destroy(self, action: Callable[[], None]) -> None:
        """Have `destroy` do this, too, after all else."""
        self._on_destroy = action

    def destroy(self) -> None:
        """Let the other ranks end. The engine cannot be used afterwards."""
        self._executor.close()
        action, self._on_destroy = self._on_destroy, lambda: None
        action()

    def _put_one(self, uid: int, ids: list[int]) -> PlannedSequence:
        sequence = self._state.get_or_create_sequence(uid)
        result = self._state.extend(sequence, len(ids))
        assert result is SchedulingResult.Success, result
        sequence.token_ids.extend(ids)
        sequence.prompt_length = sequence.prompt_length or len(ids)
        planned = PlannedSequence(
            uid=uid,
            slot=sequence.slot,
            start=sequence.num_computed,
            num_tokens=len(ids),
            token_ids=tuple(ids),
            new_blocks=tuple(sequence.blocks[sequence.num_announced :]),
            rope_length=sequence.prompt_length,
            samples=True,
            first=sequence.num_announced == 0,
        )
        sequence.num_announced = len(sequence.blocks)
        sequence.num_computed += len(ids)
        return planned

    def _as_ids(self, tokens: Sequence[int] | torch.Tensor) -> list[int]:
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        vocab = self.model().vocab_size
        if not ids or not all(type(i) is int and 0 <= i < vocab for i in ids):
            raise InvalidArgument.of(
                "batch_tokens", ids, f"one or more token ids from 0 to {vocab - 1} per sequence"
            )
        return ids
