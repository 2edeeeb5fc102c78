"""The scheduler answers every request as if it were alone, within its budgets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.engine.plan import StepPlan, StepResult
from mii.engine.scheduler import ScheduledRequest, Scheduler
from mii.engine.state_manager import DSStateManager
from mii.errors import InvalidArgument
from tests.fakes import continuation, next_token


@dataclass
class Simulation:
    """A scheduler with a model that reads what it answers out of the blocks it was given."""

    num_blocks: int
    block_size: int = 4
    token_budget: int = 16
    max_tokens: int = 0
    max_sequences: int = 8
    prefix_caching: bool = True
    launched: int = 0  # steps whose results are held back, as a device would
    plans: list[StepPlan] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = DSStateManager(self.num_blocks, self.block_size, 64, 1000, self.prefix_caching)
        self.scheduler = Scheduler(
            self.state, self.token_budget, self.max_sequences, self.max_tokens
        )
        self.cache = [[-1] * self.block_size for _ in range(self.num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.pending: list[tuple[StepPlan, StepResult]] = []

    def add(
        self,
        uid: int,
        prompt: list[int],
        count: int,
        stops: frozenset[int] = frozenset(),
        client: str = "",
    ) -> None:
        self.scheduler.add(ScheduledRequest(uid, tuple(prompt), count, stops, client=client))
        self.answers[uid] = []

    def run_model(self, plan: StepPlan) -> StepResult:
        sampled = []
        for s in plan.sequences:
            table = self.tables[s.slot] = [] if s.first else self.tables[s.slot]
            table += s.new_blocks
            ids = [self.last[s.slot]] if s.from_device else s.token_ids
            assert len(ids) == s.num_tokens
            for position, token in enumerate(ids, s.start):
                self.cache[table[position // self.block_size]][position % self.block_size] = token
        for s in plan.sequences:
            if s.samples:
                end = s.start + s.num_tokens
                context = [t for block in self.tables[s.slot] for t in self.cache[block]][:end]
                self.last[s.slot] = next_token(context)
                sampled.append((s.uid, self.last[s.slot]))
        return StepResult(plan.step, tuple(u for u, _ in sampled), tuple(t for _, t in sampled))

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            # Tokens of a preempted sequence that are computed again are a prompt's, not decodes.
            decodes = any(
                s.num_tokens == 1 and s.samples and (s.from_device or s.start >= s.rope_length)
                for s in plan.sequences
            )
            budget = self.token_budget if decodes else max(self.token_budget, self.max_tokens)
            assert 0 < plan.num_tokens <= budget
            assert len(plan.sequences) <= self.max_sequences
            assert all(
                (s.num_tokens == 1) == (i < plan.num_decodes) for i, s in enumerate(plan.sequences)
            )
            self.pending.append((plan, self.run_model(plan)))
        if self.pending and (plan is None or len(self.pending) > self.launched):
            for update in self.scheduler.update(*self.pending.pop(0)):
                self.answers[update.uid].append(update.token_id)
                if update.finish_reason:
                    self.reasons[update.uid] = update.finish_reason
        self.state.pool.check()
        return bool(self.scheduler.num_running + self.scheduler.num_waiting + len(self.pending))

    def run(self, limit: int = 5000) -> None:
        while self.step():
            limit -= 1
            assert limit > 0, "the scheduler makes no progress"
        assert self.state.free_blocks == self.num_blocks
        assert self.state.n_tracked_sequences == 0


requests = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=40),  # few ids: many shared prefixes
        st.integers(1, 30),
        st.integers(0, 12),  # the step before which it arrives
        st.one_of(st.none(), st.integers(1, 20)),  # the step after which it is aborted
        st.sampled_from("abc"),  # whose it is
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(18, 60),
    token_budget=st.integers(2, 24),
    max_tokens=st.integers(0, 40),
    max_sequences=st.integers(1, 8),
    launched=st.integers(0, 1),
    prefix_caching=st.booleans(),
)
def test_each_answer_equals_the_solo_run(
    requests, num_blocks, token_budget, max_tokens, max_sequences, launched, prefix_caching
) -> None:
    simulation = Simulation(
        num_blocks,
        token_budget=token_budget,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        launched=launched,
        prefix_caching=prefix_caching,
    )
    for step in range(22):
        for uid, (prompt, count, arrives, _, client) in enumerate(requests):
            if arrives == step:
                simulation.add(uid, prompt, count, client=client)
        simulation.step()
        for uid, (_, _, arrives, aborted, _) in enumerate(requests):
            if aborted is not None and step == arrives + aborted:
                simulation.scheduler.remove(uid)
    simulation.run()
    for uid, (prompt, count, _, aborted, _) in enumerate(requests):
        expected = continuation(prompt, count)
        answer = simulation.answers[uid]
        if aborted is None:
            assert answer == expected
            assert simulation.reasons[uid] == "length"
        else:
            assert answer == expected[: len(answer)]


def test_running_decodes_take_part_in_every_step_while_prompts_are_prefilled() -> None:
    simulation = Simulation(num_blocks=500, token_budget=16)
    simulation.add(0, [1, 2, 3], 60)
    simulation.step()
    for uid in range(1, 5):
        simulation.add(uid, [uid] * 150, 2)
    simulation.run()
    decoding = [p for p in simulation.plans[1:60] if any(s.uid == 0 for s in p.sequences)]
    assert len(decoding) == 59
    # The budget is used up while there are prompts to be had.
    assert all(p.num_tokens == 16 for p in simulation.plans[1:40])


def test_prompts_alone_take_larger_steps() -> None:
    simulation = Simulation(num_blocks=500, token_budget=16, max_tokens=50)
    simulation.add(0, [1] * 120, 3)
    simulation.run()
    assert [plan.num_tokens for plan in simulation.plans] == [50, 50, 20, 1, 1]


def test_memory_that_runs_out_preempts_the_youngest_and_nothing_is_lost() -> None:
    simulation = Simulation(num_blocks=12, token_budget=64)
    for uid in range(4):
        simulation.add(uid, [uid + 1] * 5, 35)
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for uid in range(4):
        assert simulation.answers[uid] == continuation([uid + 1] * 5, 35)


def test_two_long_requests_do_not_preempt_each_other_for_ever() -> None:
    simulation = Simulation(num_blocks=20, token_budget=64)
    simulation.add(0, [1] * 8, 40)
    simulation.add(1, [2] * 8, 40)
    for uid in range(2, 12):
        simulation.add(uid, [uid] * 6, 4)
    simulation.run()
    assert simulation.scheduler.num_preemptions < 5


def admissions(simulation: Simulation) -> list[int]:
    """The requests in the order in which they were begun."""
    return [s.uid for plan in simulation.plans for s in plan.sequences if s.first]


def test_a_flood_of_one_client_does_not_hold_up_another() -> None:
    simulation = Simulation(num_blocks=500, max_sequences=4)
    for uid in range(60):
        simulation.add(uid, [uid] * 6, 5, client="flood")
    for _ in range(12):
        simulation.step()
    earlier = len(admissions(simulation))
    assert 4 < earlier < 30
    for uid in range(100, 106):
        simulation.add(uid, [uid] * 6, 5, client="other")
    simulation.run()
    order = admissions(simulation)[earlier:]
    # In turn, but for what runs beside each other.
    assert order.index(105) <= 2 * 6 + 4
    assert [uid for uid in order if uid >= 100] == list(range(100, 106))
    assert [uid for uid in order if uid < 100] == list(range(earlier, 60))


def test_what_the_prefix_cache_saves_is_not_held_against_a_client() -> None:
    simulation = Simulation(num_blocks=500, token_budget=20, max_sequences=1)
    simulation.add(0, [1] * 16, 1, client="cached")
    simulation.run()
    for uid in range(1, 11):
        simulation.add(uid, [100 + uid] * 20, 1, client="new")
        simulation.add(100 + uid, [1] * 16 + [uid] * 4, 1, client="cached")
    simulation.run()
    order = admissions(simulation)[1:]
    # 20 tokens to compute against 4.
    assert sum(uid > 100 for uid in order[:12]) == 10


def test_the_request_admitted_last_is_preempted_first() -> None:
    simulation = Simulation(num_blocks=12, token_budget=64)
    for uid, client in ((0, "a"), (1, "a"), (9, "b")):
        simulation.add(uid, [uid + 1] * 5, 35, client=client)
    simulation.run()
    assert admissions(simulation)[:3] == [0, 9, 1]
    assert simulation.scheduler.num_preemptions > 0
    assert list(simulation.reasons) == [0, 9, 1]


def test_equal_prefixes_are_computed_once_and_the_last_token_always() -> None:
    simulation = Simulation(num_blocks=64, token_budget=64)
    for uid, length in enumerate((8, 8, 9, 4, 7)):
        simulation.add(uid, list(range(1, 9))[:length] + [9] * (length - 8), 3)
        simulation.run()
        assert simulation.answers[uid] == continuation(
            list(range(1, 9))[:length] + [9] * (length - 8), 3
        )
    computed = [p.sequences[0].num_tokens for p in simulation.plans if p.sequences[0].first]
    assert computed == [8, 4, 1, 4, 3]


def test_blocks_beyond_the_static_length_are_not_shared() -> None:
    state = DSStateManager(64, 4, 8, 1000, static_length=10)
    scheduler = Scheduler(state, 64, 8)
    for uid, length in enumerate((9, 10, 12)):
        for _ in range(2):
            scheduler.add(ScheduledRequest(uid, tuple(range(length)), 1))
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(plan, StepResult(plan.step, (uid,), (0,)))
    again = ScheduledRequest(9, tuple(range(12)), 1)
    scheduler.add(again)
    scheduler.schedule()
    assert again.num_cached == 0
    shorter = ScheduledRequest(10, tuple(range(10)), 1)
    scheduler.add(shorter)
    scheduler.schedule()
    assert shorter.num_cached == 8


def test_clients_share_no_cached_prompt() -> None:
    state = DSStateManager(64, 4, 8, 1000)
    scheduler = Scheduler(state, 64, 8)
    cached = []
    for uid, client in enumerate(("", "one", "two", "one", "")):
        request = ScheduledRequest(uid, tuple(range(12)), 1, client=client)
        scheduler.add(request)
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, StepResult(plan.step, (uid,), (0,)))
        cached.append(request.num_cached)
    assert cached == [0, 0, 0, 8, 8]


def test_a_stop_id_ends_the_request() -> None:
    expected = continuation([5, 6], 20)
    stop = expected[7]
    simulation = Simulation(num_blocks=64)
    simulation.add(0, [5, 6], 20, frozenset({stop}))
    simulation.run()
    assert simulation.answers[0] == expected[: expected.index(stop) + 1]
    assert simulation.reasons[0] == "stop"


@pytest.mark.parametrize(("prompt", "count"), [(30, 20), (1, 49), (48, 2), (60, 1)])
def test_what_can_never_fit_is_refused_at_once(prompt: int, count: int) -> None:
    simulation = Simulation(num_blocks=12)
    with pytest.raises(InvalidArgument, match="can hold for one request, 49 tokens") as caught:
        simulation.add(0, [1] * prompt, count + 1)
    assert caught.value.field == "max_new_tokens"


def test_what_just_fits_is_served() -> None:
    simulation = Simulation(num_blocks=12)
    simulation.add(0, [1] * 30, 19)
    simulation.run()
    assert simulation.answers[0] == continuation([1] * 30, 19)
