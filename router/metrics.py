"""What the router counts, cheaply enough for every token; `router/exposition.py` shows it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

from mii import control

_LATENCIES: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_TOKEN_GAPS: Final = (
    *(0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
_LENGTHS: Final = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0),
    *(10_000.0, 20_000.0, 50_000.0, 100_000.0, 200_000.0, 500_000.0, 1_000_000.0),
)


class Histogram:
    """Counts values by size. `prometheus_client`'s takes 2 us a value, this one a fifth of that.

    Args:
        bounds: upper ends of the buckets, rising; a last one without an end is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that has come so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return how many values are at most each bound, as the Prometheus format has it."""
        total, buckets = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets


class RouterMetrics:
    """The router's counters. They only grow, but for `requests_running` and `prompts_open`."""

    def __init__(self) -> None:
        self.requests = Counter[tuple[str, str]]()  # ended, by surface and outcome
        self.refused = Counter[str]()  # ended before a replica was asked, by the error's code
        self.failovers = Counter[int]()  # prompts moved away, by the replica that was left
        self.requests_running = 0  # that are being answered, their prompts waiting or not
        self.prompts_open = 0  # of them, whose answers have not ended
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.time_to_first_token = Histogram(_LATENCIES)
        self.inter_token = Histogram(_TOKEN_GAPS)
        self.total = Histogram(_LATENCIES)
        self.queue = Histogram(_LATENCIES)
        self.request_prompt_tokens = Histogram(_LENGTHS)
        self.request_generated_tokens = Histogram(_LENGTHS)


class ReplicaHistory:
    """Counts deaths and restarts from what the supervisor tells the router."""

    def __init__(self) -> None:
        self.deaths = Counter[int]()
        self.restarts = Counter[int]()
        self.ready: dict[int, bool] = {}  # by number of those that there are
        self._away: set[int] = set()  # those that have served and do not now

    def take(self, told: control.Message) -> None:
        """Take a message of the supervisor's."""
        if isinstance(told, control.Died):
            self.deaths[told.replica] += 1
            self._away.add(told.replica)
        elif isinstance(told, control.Replicas):
            self._take_replicas(told.replicas)

    def _take_replicas(self, replicas: Sequence[control.Replica]) -> None:
        for info in replicas:
            if info.ready:
                if info.replica in self._away:
                    self.restarts[info.replica] += 1
                    self._away.discard(info.replica)
            elif self.ready.get(info.replica):
                self._away.add(info.replica)
        self.ready = {info.replica: info.ready for info in replicas}
        self._away &= self.ready.keys()  # one that was removed does not come back: it is new then
