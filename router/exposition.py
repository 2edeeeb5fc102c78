"""GET /metrics: what router and workers count, in the format of Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mii.errors import MIIError, Overloaded
from mii.proto.worker_pb2 import StatusResponse
from mii.router.metrics import Histogram
from mii.router.observer import SURFACES, Observer
from mii.router.replicas import Replica, Replicas

_TIMEOUT: Final = 1.0  # seconds that a worker has to say how it is

Statuses = Mapping[int, StatusResponse]


class WorkerStatuses:
    """What the workers count. Each is asked once at a time, however many want to know.

    Args:
        replicas: whose workers.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._asking: asyncio.Task[Statuses] | None = None

    async def latest(self) -> Statuses:
        """Return the counters of those that answer within a second, by replica."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Statuses:
        replicas = [each for each in self._replicas.all() if not each.down]
        answers = await asyncio.gather(*map(_status_of, replicas))
        pairs = zip(replicas, answers, strict=True)
        return {replica.number: answer for replica, answer in pairs if answer is not None}


async def _status_of(replica: Replica) -> StatusResponse | None:
    try:
        return await replica.transport.status(_TIMEOUT)
    except MIIError:
        return None


class Exposition(Collector):
    """Writes the figures down. Belongs to one event loop.

    Args:
        observer: has the router's own.
        replicas: whose workers have the others.
    """

    def __init__(self, observer: Observer, replicas: Replicas) -> None:
        self._observer = observer
        self._replicas = replicas
        self._workers = WorkerStatuses(replicas)
        self._statuses: Statuses = {}
        self._began = time.time()
        self._model = observer.model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics"""
        self._statuses = await self._workers.latest()
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    def collect(self) -> Iterator[Metric]:
        """Yield all of it, as `prometheus_client` asks for it."""
        yield from self._of_replicas()
        yield from self._of_workers()
        yield from self._of_requests()
        yield from self._of_protocol()

    def _of_replicas(self) -> Iterator[Metric]:
        history = self._observer.history
        up = {each.number: not each.down for each in self._replicas.all()}
        numbers = sorted(history.ready)
        yield self._gauge(
            "replica_up",
            "1 if requests are sent to the replica",
            ((number, up.get(number, False)) for number in numbers),
        )
        yield self._gauge(
            "replica_outstanding_prompts",
            "Prompts that the router has sent to the replica and that are not answered yet",
            ((each.number, each.outstanding) for each in self._replicas.all()),
        )
        moved = self._observer.metrics.failovers
        for name, what, counts in (
            ("replica_deaths", "Times that the replica has died", history.deaths),
            ("replica_restarts", "Times that the replica has come back", history.restarts),
            ("failovers", "Prompts that were moved away from the replica", moved),
        ):
            known = sorted({*numbers, *counts})
            yield self._counter(name, what, ((number, counts[number]) for number in known))

    def _of_workers(self) -> Iterator[Metric]:
        for name, what, attribute in _WORKER_GAUGES:
            yield self._gauge(name, what, self._each(attribute))
        used = ((number, _usage([each])) for number, each in self._statuses.items())
        yield self._gauge("kv_cache_usage_ratio", "Part of the KV cache that is in use", used)
        for name, what, attribute in _WORKER_COUNTERS:
            yield self._counter(name, what, self._each(attribute))

    def _of_requests(self) -> Iterator[Metric]:
        metrics = self._observer.metrics
        ended = CounterMetricFamily(
            "mii:requests",
            'Requests that have ended, by outcome: "ok", "cancelled", or an error\'s code',
            labels=["model_name", "surface", "outcome"],
        )
        for surface, outcome in sorted({*metrics.requests, *((each, "ok") for each in SURFACES)}):
            count = metrics.requests[surface, outcome]
            ended.add_metric([self._model, surface, outcome], count)
        yield ended
        refused = CounterMetricFamily(
            "mii:requests_refused",
            "Requests that have ended with an error before any replica was asked",
            labels=["model_name", "reason"],
        )
        for reason in sorted({*metrics.refused, Overloaded.code}):
            refused.add_metric([self._model, reason], metrics.refused[reason])
        yield refused
        running = "Requests that the router is answering, on any surface"
        yield self._plain_gauge("requests_in_progress", running, metrics.requests_running)
        for name, what, value in (
            ("prompt_tokens", "Tokens of the prompts answered", metrics.prompt_tokens),
            ("cached_prompt_tokens", "Of them, out of prefix caches", metrics.cached_tokens),
            ("generation_tokens", "Tokens generated", metrics.generated_tokens),
        ):
            family = CounterMetricFamily(f"mii:{name}", what, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        for name, what, histogram in (
            (
                "time_to_first_token_seconds",
                "From a request's arrival to its first token",
                metrics.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "From one token of an answer to the next",
                metrics.inter_token,
            ),
            ("e2e_request_latency_seconds", "From a request's arrival to its end", metrics.total),
            (
                "request_queue_time_seconds",
                "From a request's arrival until all its prompts are computed",
                metrics.queue,
            ),
            ("request_prompt_tokens", "Of one request's prompts", metrics.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Of one request's answers",
                metrics.request_generated_tokens,
            ),
        ):
            yield self._histogram(name, what, histogram)

    def _of_protocol(self) -> Iterator[Metric]:
        """Yield what the Gateway API inference extension asks of a model server.

        It takes one series of each, so these stand for all replicas together.
        """
        statuses = self._statuses.values()
        sent = sum(each.outstanding for each in self._replicas.all())
        here = max(0, self._observer.metrics.prompts_open - sent)
        queued = here + sum(each.waiting_requests for each in statuses)
        yield self._plain_gauge("total_queued_requests", "Requests that wait", queued)
        running = sum(each.running_requests for each in statuses)
        yield self._plain_gauge("total_running_requests", "Requests that are computed", running)
        used = "Part of all replicas' KV caches that is in use, 0 to 1"
        yield self._plain_gauge("kv_cache_utilization", used, _usage(statuses))
        info = GaugeMetricFamily(
            "mii:cache_config_info",
            "The KV caches: tokens of a block, and blocks of all replicas",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        blocks = sum(each.total_blocks for each in statuses)
        size = max((each.block_size for each in statuses), default=0)
        if blocks:
            info.add_metric([self._model, str(size), str(blocks)], 1)
        yield info
        lora = GaugeMetricFamily(
            "mii:lora_requests_info",
            "LoRA adapters: none can be loaded",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lora.add_metric(["0", "", ""], self._began)
        yield lora

    def _each(self, attribute: str) -> Iterator[tuple[int, float]]:
        return ((number, getattr(each, attribute)) for number, each in self._statuses.items())

    def _gauge(self, name: str, what: str, values: Iterable[tuple[int, float]]) -> Metric:
        family = GaugeMetricFamily(f"mii:{name}", what, labels=["model_name", "replica"])
        for number, value in values:
            family.add_metric([self._model, str(number)], float(value))
        return family

    def _plain_gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"mii:{name}", what, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family

    def _counter(self, name: str, what: str, values: Iterable[tuple[int, float]]) -> Metric:
        family = CounterMetricFamily(f"mii:{name}", what, labels=["model_name", "replica"])
        for number, value in values:
            family.add_metric([self._model, str(number)], value)
        return family

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"mii:{name}", what, labels=["model_name"])
        family.add_metric([self._model], histogram.cumulative(), histogram.sum)
        return family


def _usage(statuses: Iterable[StatusResponse]) -> float:
    """Return which part of the blocks is in use."""
    total = free = 0
    for status in statuses:
        total += status.total_blocks
        free += status.free_blocks
    return 1 - free / total if total else 0.0


# name, what it is, attribute of StatusResponse
_WORKER_GAUGES: Final = (
    ("num_requests_running", "Requests that the engine computes", "running_requests"),
    ("num_requests_waiting", "Requests that wait for room in the KV cache", "waiting_requests"),
    ("kv_cache_blocks", "Blocks of the KV cache", "total_blocks"),
    (
        "kv_cache_free_blocks",
        "Of them, those free or held by the prefix cache alone",
        "free_blocks",
    ),
    ("engine_step_seconds", "Duration of the engine's last step", "last_step_seconds"),
    ("worker_resident_memory_bytes", "Memory of rank 0's process", "resident_bytes"),
)
_WORKER_COUNTERS: Final = (
    ("engine_steps", "Steps of the engine since its start", "steps"),
    ("engine_prompt_tokens", "Tokens of prompts that the engine has accepted", "prompt_tokens"),
    ("engine_generation_tokens", "Tokens that the engine has generated", "generated_tokens"),
    (
        "prefix_cache_hit_tokens",
        "Tokens of prompts that were found in the prefix cache",
        "prefix_cache_hit_tokens",
    ),
    ("num_preemptions", "Requests that had to give up their blocks for others", "preemptions"),
)
