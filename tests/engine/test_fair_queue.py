"""The queue serves clients evenly, each in its order, and loses nobody."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mii.engine.fair_queue import FairQueue

LARGEST = {"a": 50, "b": 7, "c": 20}  # tokens of a request

clients = st.sampled_from("abc")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), clients, st.integers(0, 50)),
        st.tuples(st.just("take"), st.just(""), st.just(0)),
        st.tuples(st.just("give up"), st.just(""), st.integers(0, 100)),
    ),
    max_size=120,
)


@dataclass
class Server:
    """Serves one request at a time from a queue, and keeps a list of what must be in that."""

    queue: FairQueue = field(default_factory=FairQueue)
    waiting: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    uids: itertools.count[int] = field(default_factory=itertools.count)

    def push(self, client: str, size: int) -> int:
        uid = next(self.uids)
        self.waiting[uid] = client
        self.sizes[uid] = size
        self.queue.push(client, uid)
        return uid

    def take(self) -> int:
        uid = self.queue.first()
        client = self.waiting.pop(uid)  # it is there, and comes out once
        assert uid < min((u for u, c in self.waiting.items() if c == client), default=uid + 1)
        self.queue.remove(client, uid)
        for part in (self.sizes[uid] // 2, -(-self.sizes[uid] // 2)):
            self.queue.charge(client, part)
        self.served[client] += self.sizes[uid]
        return uid

    def give_up(self, uid: int) -> None:
        self.queue.remove(self.waiting.pop(uid), uid)

    def do(self, operation: str, client: str, number: int) -> None:
        if operation == "push":
            self.push(client, min(number, LARGEST[client]))
        elif self.waiting and operation == "take":
            self.take()
        elif self.waiting:
            self.give_up(sorted(self.waiting)[number % len(self.waiting)])
        assert len(self.queue) == len(self.waiting)


@given(operations)
def test_each_request_comes_out_once_and_in_the_order_of_its_client(
    operations: list[tuple[str, str, int]],
) -> None:
    server = Server()
    for operation in operations:
        server.do(*operation)
    while server.waiting:
        server.take()
    assert len(server.queue) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=60))
def test_one_client_is_served_in_the_order_of_arrival(arrivals: list[tuple[bool, int]]) -> None:
    server = Server()
    turns = itertools.count()
    for takes, size in arrivals:
        server.push("", size)
        if takes:
            assert server.take() == next(turns)


@settings(max_examples=400)
@given(operations)
def test_clients_that_wait_beside_each_other_stay_within_a_request_of_each(
    operations: list[tuple[str, str, int]],
) -> None:
    server = Server()
    spans: dict[tuple[str, str], list[int]] = {}  # of the lead of one over the other
    for operation in operations:
        server.do(*operation)
        backlogged = set(server.waiting.values())
        for pair in itertools.combinations("abc", 2):
            if not backlogged.issuperset(pair):
                spans.pop(pair, None)
                continue
            one, other = pair
            leads = spans.setdefault(pair, [])
            leads.append(server.served[one] - server.served[other])
            assert max(leads) - min(leads) <= LARGEST[one] + LARGEST[other]


@given(st.integers(1, 100), st.integers(1, 30))
def test_who_comes_back_has_saved_nothing_up(requests: int, flood: int) -> None:
    server = Server()
    for _ in range(requests + 10):
        server.push("a", 10)
    for _ in range(requests):
        server.take()
    for _ in range(flood):
        server.push("b", 10)
    before = server.served["a"]
    for turn in range(1, 2 * min(flood, 10)):
        server.take()
        assert abs(server.served["a"] - before - server.served["b"]) <= 10, turn


def test_what_was_computed_while_nobody_waited_is_held_against_nobody() -> None:
    queue = FairQueue()
    queue.push("a", 0)
    queue.remove("a", queue.first())
    queue.charge("a", 10**6)
    for uid in range(1, 4):
        queue.push("b", uid)
    queue.push("a", 4)
    queue.remove("b", queue.first())
    queue.charge("b", 1)
    assert queue.first() == 4


def test_a_debt_outlasts_the_absence_of_a_client() -> None:
    """Or one that sends wave after wave, and waits for none while the last one runs, had it all."""
    queue = FairQueue()
    for uid, client in enumerate("abbbb"):
        queue.push(client, uid)
    queue.remove("a", 0)
    queue.charge("a", 100)  # that it is running only, or gone, makes no difference
    queue.push("a", 5)
    for uid in range(1, 4):
        assert queue.first() == uid
        queue.remove("b", uid)
        queue.charge("b", 40)
    assert queue.first() == 5


def test_tokens_count_against_a_client_that_has_nothing_waiting() -> None:
    queue = FairQueue()
    for uid in range(4):
        queue.push("b", uid)
    queue.charge("b", 100)
    queue.charge("a", 50)  # of what it has running
    queue.push("a", 4)
    queue.charge("b", 49)
    assert queue.first() == 0
    queue.charge("b", 2)
    assert queue.first() == 4


@given(st.lists(st.tuples(st.text("xyz", max_size=8), st.integers(0, 9)), max_size=60))
def test_clients_are_forgotten_once_they_do_not_matter(visits: list[tuple[str, int]]) -> None:
    queue = FairQueue()
    queue.push("stays", -1)
    for uid, (client, tokens) in enumerate(visits):
        queue.push(client, uid)
        queue.remove(client, uid)
        queue.charge(client, tokens)
    queue.charge("stays", 1000)
    assert queue.first() == -1
    assert queue._clients.keys() == {"stays"}
    queue.remove("stays", -1)
    assert not queue._clients and not queue._heap
