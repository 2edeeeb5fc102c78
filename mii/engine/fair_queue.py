"""Requests that wait, in an order that is fair to their clients.

Start-time fair queueing (Goyal, Vin, Cheng 1996) by computed tokens, as the virtual token counter
of Sheng et al., Fairness in Serving Large Language Models (2024).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict


class _Client:
    """What a client has waiting, and the tokens that count against it."""

    __slots__ = ("name", "served", "waiting")

    def __init__(self, name: str, served: int) -> None:
        self.name = name
        self.served = served
        self.waiting: OrderedDict[int, None] = OrderedDict()  # uids, first come first


class FairQueue:
    """Ids of requests. The first is the oldest one of the client that has been served least.

    A client for which more tokens are computed than for the others has to wait until those have
    caught up. Two that both have requests waiting are never further apart than one request of each
    (for as many as run at one time, if they run beside each other). Who comes back counts at least
    as much as the least served of those that wait: what was not used is not saved up. While nobody
    waits nobody is kept from anything, and nothing is counted.

    All operations take O(log clients), amortised. What is remembered: the clients that wait, and
    those that have been served more than the least of these.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        # One entry for each client: the tokens that it had been served when they were last looked
        # at (they only rise), its number, itself.
        self._heap: list[tuple[int, int, _Client]] = []
        self._numbers = itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, client: str, uid: int) -> None:
        """Put a request behind those of its client."""
        least = self._least()
        # Clients that are known have been served no less than the least one.
        known = self._clients.get(client) or self._begin(client, least.served if least else 0)
        known.waiting[uid] = None
        self._length += 1

    def first(self) -> int:
        """Return the request whose turn it is; it stays. The queue must not be empty."""
        least = self._least()
        assert least is not None
        return next(iter(least.waiting))

    def remove(self, client: str, uid: int) -> None:
        """Take a request out, because it has its turn or is given up."""
        del self._clients[client].waiting[uid]
        self._length -= 1
        if not self._length:
            self._clients.clear()
            self._heap.clear()

    def charge(self, client: str, tokens: int) -> None:
        """Count tokens that are computed for a client."""
        known = self._clients.get(client)
        if known is None:
            least = self._least()
            if least is None:
                return
            known = self._begin(client, least.served)
        known.served += tokens

    def _begin(self, name: str, served: int) -> _Client:
        client = self._clients[name] = _Client(name, served)
        heapq.heappush(self._heap, (served, next(self._numbers), client))
        return client

    def _least(self) -> _Client | None:
        """Return the least served client that waits, having forgotten those that cannot matter."""
        while self._heap:
            served, number, client = self._heap[0]
            if client.served > served:
                heapq.heapreplace(self._heap, (client.served, number, client))
            elif client.waiting:
                return client
            else:  # coming back it would count as much as the least one
                heapq.heappop(self._heap)
                del self._clients[client.name]
        return None
