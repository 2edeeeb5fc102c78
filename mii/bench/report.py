"""What the measurements add up to: throughput, latencies, and how many users were served well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mii.bench.targets import Measured

# DeepSpeed-FastGen's agreement with a user: the first token comes within prompt tokens / 512
# seconds, and then the moving average of the rate never falls below so many tokens per second.
FASTGEN_PROMPT_RATE = 512.0
FASTGEN_RATES = (2.0, 4.0, 6.0)
_FASTGEN_SPAN = 16


@dataclass(frozen=True)
class Agreement:
    """What a request must hold to count as good; seconds, None: anything goes."""

    time_to_first_token: float | None = None
    inter_token_latency: float | None = None  # mean of the request
    end_to_end: float | None = None

    def holds(self, measured: Measured) -> bool:
        """Whether a request was good."""
        gaps = measured.gaps
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        pairs = (
            (self.time_to_first_token, measured.time_to_first_token),
            (self.inter_token_latency, mean),
            (self.end_to_end, measured.ended - measured.began),
        )
        return all(limit is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True)
class Distribution:
    """Of some times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    longest: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Distribution:
        """Sum up; all 0 where there is nothing."""
        values = sorted(1e3 * each for each in seconds) or [0.0]
        mean = sum(values) / len(values)
        p50, p90, p95, p99 = (quantile(values, part) for part in (0.5, 0.9, 0.95, 0.99))
        return Distribution(mean, p50, p90, p95, p99, values[-1])


@dataclass(frozen=True)
class Report:
    """A run's figures."""

    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    good_requests_per_second: float  # that hold the agreement
    effective_requests_per_second: dict[str, float]  # FastGen's, by tokens per second
    time_to_first_token_ms: Distribution
    inter_token_latency_ms: Distribution
    end_to_end_ms: Distribution
    errors: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it for a terminal."""
        rows = [
            ("requests", f"{self.requests}" + (f", {self.failed} failed" if self.failed else "")),
            ("duration", f"{self.seconds:.2f} s"),
            ("requests per second", f"{self.requests_per_second:.2f}"),
            ("input tokens per second", f"{self.input_tokens_per_second:.1f}"),
            ("output tokens per second", f"{self.output_tokens_per_second:.1f}"),
            ("good requests per second", f"{self.good_requests_per_second:.2f}"),
        ]
        rows += [
            (f"effective at {rate} tokens/s (FastGen)", f"{value:.2f} requests per second")
            for rate, value in self.effective_requests_per_second.items()
        ]
        lines = [f"{name:36s} {value}" for name, value in rows]
        lines.append(
            f"{'milliseconds':28s}{'mean':>9s}{'p50':>9s}{'p90':>9s}{'p95':>9s}{'p99':>9s}"
        )
        for name, each in (
            ("time to first token", self.time_to_first_token_ms),
            ("between tokens", self.inter_token_latency_ms),
            ("whole answer", self.end_to_end_ms),
        ):
            values = (each.mean, each.p50, each.p90, each.p95, each.p99)
            lines.append(f"{name:28s}" + "".join(f"{value:9.1f}" for value in values))
        lines += [f"{count} x {error}" for error, count in self.errors.items()]
        return lines


def report_on(results: Sequence[Measured], agreement: Agreement) -> Report:
    """Sum up a run."""
    good = [each for each in results if not each.error]
    began = min((each.began for each in results), default=0.0)
    seconds = max((each.ended for each in results), default=0.0) - began
    errors = Counter(each.error[:200] for each in results if each.error)

    def per_second(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Report(
        requests=len(results),
        failed=len(results) - len(good),
        seconds=seconds,
        requests_per_second=per_second(len(good)),
        input_tokens_per_second=per_second(sum(each.prompt_tokens for each in good)),
        output_tokens_per_second=per_second(sum(each.new_tokens for each in good)),
        good_requests_per_second=per_second(sum(map(agreement.holds, good))),
        effective_requests_per_second={
            f"{rate:g}": per_second(sum(is_effective(each, rate) for each in good))
            for rate in FASTGEN_RATES
        },
        time_to_first_token_ms=Distribution.of([each.time_to_first_token for each in good]),
        inter_token_latency_ms=Distribution.of([gap for each in good for gap in each.gaps]),
        end_to_end_ms=Distribution.of([each.ended - each.began for each in good]),
        errors=dict(errors.most_common(5)),
    )


def is_effective(measured: Measured, rate: float) -> bool:
    """Whether a request counts for FastGen's effective throughput at a rate in tokens per second.

    Holmes et al., DeepSpeed-FastGen (2024): an exponential moving average (span 16) of the times
    between tokens, every point of which must stay below 1 / rate.
    """
    if measured.time_to_first_token > measured.prompt_tokens / FASTGEN_PROMPT_RATE:
        return False
    average: float | None = None
    for gap in measured.gaps:
        weight = 2 / (_FASTGEN_SPAN + 1)
        average = gap if average is None else weight * gap + (1 - weight) * average
        if average >= 1 / rate:
            return False
    return True


def quantile(ascending: Sequence[float], part: float) -> float:
    """Return a quantile, between two values linearly."""
    place = part * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])
