"""Dynamic SplitFuse: composes each step from running decodes and chunks of prompts.

Holmes et al., DeepSpeed-FastGen (2024): every step has about the same number of tokens, so that
its time is even: long prompts are split over several steps, short ones fused into one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from mii.engine.fair_queue import FairQueue
from mii.engine.plan import PlannedSequence, StepPlan, StepResult
from mii.engine.state_manager import DSStateManager, SchedulingResult, SequenceState
from mii.errors import InvalidArgument


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request as the scheduler sees it: ids and counts."""

    uid: int  # rises with arrival
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()  # ids that end the sequence
    answer_ids: tuple[int, ...] = ()  # new tokens that are known already, from another engine
    client: str = ""  # whom it is counted for
    sequence: SequenceState | None = field(default=None, init=False)  # once it has been admitted
    num_generated: int = field(default=0, init=False)  # known new tokens
    num_cached: int = field(default=0, init=False)  # prompt tokens out of the prefix cache
    admitted_at: float | None = field(default=None, init=False)  # time.monotonic(), the first time
    is_running: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.num_generated = len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """One new token of a request, and whether it was the last."""

    uid: int
    token_id: int
    finish_reason: str | None  # "stop": it is one of the stop ids; "length": no more may follow


class Scheduler:
    """Decides what each step computes. Requests are served in the order of their arrival, and
    where clients wait for each other, so that each gets as many tokens as the others (`FairQueue`).

    Every running request that decodes takes part in every step with one token. What is left of the
    token budget, which is larger while nothing decodes and so nobody has to wait, goes to prompts:
    first those already begun, then waiting ones, for which all blocks of the prompt must be free.
    When a decode finds no free block, the request admitted last is preempted: it gives up its
    blocks and is computed anew later, ahead of those that wait.

    Args:
        state: tracks the sequences and their blocks.
        token_budget: tokens of a step in which sequences decode, at most.
        max_sequences: sequences of one step at most.
        max_tokens: tokens of any step at most; None: as token_budget.
    """

    def __init__(
        self,
        state: DSStateManager,
        token_budget: int,
        max_sequences: int,
        max_tokens: int | None = None,
    ) -> None:
        self.state = state
        self.token_budget = token_budget
        self.max_tokens = max(token_budget, max_tokens or 0)
        self.max_sequences = min(max_sequences, token_budget)
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._requests: dict[int, ScheduledRequest] = {}
        self._running: list[ScheduledRequest] = []  # as they were admitted the first time
        self._preempted: deque[ScheduledRequest] = deque()  # likewise; all later than those
        self._waiting = FairQueue()
        self._next_step = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._preempted) + len(self._waiting)

    def add(self, request: ScheduledRequest) -> None:
        """Queue a request.

        Raises:
            InvalidArgument: if the cache could not hold it even if it were alone.
        """
        tokens = len(request.prompt_ids) + request.max_new_tokens
        # The last new token is never computed: its keys and values are of no use.
        blocks = -(-(tokens - 1) // self.state.block_size)
        total = self.state.pool.num_blocks
        if blocks > total or tokens > self.state.max_length:
            capacity = min(total * self.state.block_size + 1, self.state.max_length)
            raise InvalidArgument(
                f"prompt ({len(request.prompt_ids)} tokens) and answer (up to "
                f"{request.max_new_tokens}) together exceed what this engine can hold for one "
                f"request, {capacity} tokens: shorten the prompt or lower max_new_tokens",
                "max_new_tokens",
            )
        self._requests[request.uid] = request
        self._waiting.push(request.client, request.uid)

    def remove(self, uid: int) -> None:
        """Forget a request at once, wherever it is. Unknown uids are ignored."""
        request = self._requests.pop(uid, None)
        if request is None:
            return
        if request.is_running:
            self._running.remove(request)
            request.is_running = False
        else:
            self._leave_queue(request)
        self.state.flush_sequence(uid)

    def schedule(self) -> StepPlan | None:
        """Compose the next step, or return None if there is nothing to compute now."""
        decodes = self._schedule_decodes()
        left = (self.token_budget if decodes else self.max_tokens) - len(decodes)
        chunks = self._schedule_begun_prompts(left)
        left -= sum(chunk.num_tokens for chunk in chunks)
        chunks += self._schedule_waiting(left)
        if not decodes and not chunks:
            return None
        decodes += [chunk for chunk in chunks if chunk.num_tokens == 1]
        longer = [chunk for chunk in chunks if chunk.num_tokens > 1]
        plan = StepPlan(self._next_step, (*decodes, *longer), num_decodes=len(decodes))
        self._next_step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take in what a step gave. Tokens of requests that were removed meanwhile are dropped."""
        updates = []
        for uid, token_id in zip(result.uids, result.token_ids, strict=True):
            request = self._requests.get(uid)
            if request is not None:
                updates.append(self._accept(request, token_id))
        for planned in plan.sequences:
            sequence = self.state.get_sequence(planned.uid)
            if sequence is not None:
                self.state.name_full_blocks(sequence)
        for update in updates:
            if update.finish_reason is not None:
                self.remove(update.uid)
        return updates

    def _accept(self, request: ScheduledRequest, token_id: int) -> TokenUpdate:
        sequence = request.sequence
        assert sequence is not None and sequence.num_in_flight > 0
        sequence.num_in_flight -= 1
        sequence.token_ids.append(token_id)
        request.num_generated += 1
        reason = None
        if token_id in request.stop_ids:
            reason = "stop"
        elif request.num_generated >= request.max_new_tokens:
            reason = "length"
        return TokenUpdate(request.uid, token_id, reason)

    def _schedule_decodes(self) -> list[PlannedSequence]:
        planned = []
        for request in tuple(self._running):
            sequence = request.sequence
            assert sequence is not None
            if not request.is_running or sequence.num_uncomputed != 1:
                continue
            if not self._is_complete(request) and self._make_room(request):
                planned.append(self._plan(request, 1))
        return planned

    def _make_room(self, request: ScheduledRequest) -> bool:
        """Get the block for one more token, preempting later requests, or this one itself."""
        while request.is_running:
            assert request.sequence is not None
            if self.state.extend(request.sequence, 1) is SchedulingResult.Success:
                return True
            self._preempt(self._running[-1])
        return False

    def _preempt(self, request: ScheduledRequest) -> None:
        assert request.sequence is not None
        self._running.remove(request)
        request.is_running = False
        self.state.release_blocks(request.sequence)
        self._preempted.appendleft(request)
        self.num_preemptions += 1

    def _schedule_begun_prompts(self, budget: int) -> list[PlannedSequence]:
        planned = []
        for request in self._running:
            assert request.sequence is not None
            count = min(request.sequence.num_uncomputed, budget)
            if count > 0 and request.sequence.num_uncomputed > 1:
                planned.append(self._plan(request, count))
                budget -= count
        return planned

    def _schedule_waiting(self, budget: int) -> list[PlannedSequence]:
        planned = []
        while budget > 0 and self.num_waiting and len(self._running) < self.max_sequences:
            if self._preempted:
                request = self._preempted[0]
            else:
                request = self._requests[self._waiting.first()]
            if not self._admit(request):
                break
            self._leave_queue(request)
            self._running.append(request)
            request.is_running = True
            assert request.sequence is not None
            count = min(request.sequence.num_uncomputed, budget)
            planned.append(self._plan(request, count))
            budget -= count
        return planned

    def _leave_queue(self, request: ScheduledRequest) -> None:
        if request in self._preempted:
            self._preempted.remove(request)
        else:
            self._waiting.remove(request.client, request.uid)

    def _admit(self, request: ScheduledRequest) -> bool:
        """Give a waiting request all blocks of its known tokens, or change nothing."""
        sequence = request.sequence
        if sequence is None:
            sequence = request.sequence = self.state.get_or_create_sequence(request.uid)
            sequence.token_ids = [*request.prompt_ids, *request.answer_ids]
            sequence.prompt_length = len(request.prompt_ids)
            sequence.owner = request.client
        if sequence.num_in_flight:  # preempted while a step was under way: its token comes first
            return False
        cached, keys = self.state.match_prefix(sequence)
        wanted = -(-len(sequence.token_ids) // self.state.block_size) - len(cached)
        taken = sum(self.state.pool.is_cached(block) for block in cached)
        # A block is left to each running request, so that admission is not undone at once.
        if wanted + taken + len(self._running) > self.state.free_blocks and self._running:
            return False
        self.state.adopt_prefix(sequence, cached, keys)
        if request.admitted_at is None:
            request.admitted_at = time.monotonic()
            request.num_cached = sequence.num_cached
            self.num_cached_tokens += sequence.num_cached
        result = self.state.extend(sequence, sequence.num_uncomputed)
        assert result is SchedulingResult.Success, result
        return True

    def _is_complete(self, request: ScheduledRequest) -> bool:
        """Whether the tokens in flight will be the last ones."""
        assert request.sequence is not None
        return request.num_generated + request.sequence.num_in_flight >= request.max_new_tokens

    def _plan(self, request: ScheduledRequest, count: int) -> PlannedSequence:
        """Turn the next `count` tokens of a request into its share of the step."""
        sequence = request.sequence
        assert sequence is not None
        start = sequence.num_computed
        from_device = start >= len(sequence.token_ids)
        planned = PlannedSequence(
            uid=sequence.uid,
            slot=sequence.slot,
            start=start,
            num_tokens=count,
            token_ids=() if from_device else tuple(sequence.token_ids[start : start + count]),
            new_blocks=tuple(sequence.blocks[sequence.num_announced :]),
            rope_length=sequence.prompt_length,
            samples=start + count == sequence.num_tokens,
            from_device=from_device,
            first=sequence.num_announced == 0,
        )
        sequence.num_announced = len(sequence.blocks)
        sequence.num_computed += count
        sequence.num_in_flight += planned.samples
        self._waiting.charge(request.client, count)
        return planned
