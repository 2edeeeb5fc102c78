"""What is known of one request on its way through the router: for its log line, metrics, traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from mii import logs, traces
from mii.errors import Unavailable
from mii.proto.inference_pb2 import Usage
from mii.router.balancer import Choice
from mii.router.metrics import RouterMetrics

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from its arrival to its end.

    Args:
        surface: "grpc" or "http".
        method: what it asks for: a gRPC method's path, or an HTTP method and route.
        metrics: count it.
    """

    surface: str
    method: str
    metrics: RouterMetrics
    request_id: str = ""
    client: str = ""  # the name that its key belongs to
    began: float = field(default_factory=time.monotonic)
    error: BaseException | None = None  # that its answers ended with
    generates: bool = False
    open_prompts: int = 0
    complete: bool = False  # every answer has come to its end
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float | None = None  # of the prompt that waited longest
    first_token: float | None = None  # seconds after `began`
    replicas: list[int] = field(default_factory=list)  # that were asked, in order
    moves: int = 0

    def identify(self, request_id: str) -> None:
        """Note the request's id, also for what is logged from here on."""
        self.request_id = request_id
        logs.request_id.set(request_id)

    def begin(self, prompts: int) -> None:
        """Note that it was admitted, with so many prompts."""
        self.generates = True
        self.open_prompts = prompts
        self.metrics.prompts_open += prompts
        self.metrics.requests_running += 1

    def end(self, error: BaseException | None) -> None:
        """Note that nothing more is generated, and the error that is why, if any."""
        self.error = error
        self.complete = self.open_prompts == 0
        self.metrics.prompts_open -= self.open_prompts
        self.metrics.requests_running -= 1
        self.open_prompts = 0

    @contextmanager
    def attempt(self, choice: Choice) -> Iterator[traces.Span]:
        """Note that a prompt is at a replica for as long as the block runs."""
        if choice.number not in self.replicas:
            self.replicas.append(choice.number)
        with traces.span("attempt") as span:
            if span.recording:
                span.attributes({"mii.replica": choice.number, "mii.route": choice.reason})
            yield span

    def move(self, replica: int, error: Unavailable) -> None:
        """Note that a prompt is moved away from a replica, and why."""
        self.moves += 1
        self.metrics.failovers[replica] += 1
        _logger.info("a prompt is moved away from replica %d: %s", replica, error)

    def note_first_token(self, seconds: float) -> None:
        """Note when a first token has come, in seconds after the request's arrival."""
        if self.first_token is None or seconds < self.first_token:
            self.first_token = seconds


# The request that the running task serves.
current: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def here() -> RequestRecord:
    """Return the current request's record; one that nobody reads, where there is none."""
    return current.get() or RequestRecord("", "", RouterMetrics())


class PromptRecord:
    """What comes back of one prompt.

    Args:
        record: of the request.
        choices: answers to the prompt.
        awaited: how many of them are still to come.
        streamed: every token's arrival is seen; else the worker's times are all that is known.
    """

    __slots__ = ("_came", "_prompt_known", "_record", "_streamed", "_unfinished")

    def __init__(self, record: RequestRecord, choices: int, awaited: int, streamed: bool) -> None:
        self._record = record
        self._streamed = streamed
        self._came = [0.0] * choices  # when each answer's last token came; time.monotonic()
        self._unfinished = awaited
        self._prompt_known = False

    def tokens(self, choice: int, count: int) -> None:
        """Count tokens of an answer that have come together. Called for every message."""
        record = self._record
        metrics = record.metrics
        record.generated_tokens += count
        metrics.generated_tokens += count
        if self._streamed and count:
            now = time.monotonic()
            if last := self._came[choice]:
                metrics.inter_token.observe((now - last) / count, count)
            elif record.first_token is None:
                record.first_token = now - record.began
            self._came[choice] = now

    def ended(self, usage: Usage) -> None:
        """Count an answer that has come to its end."""
        record, now = self._record, time.monotonic()
        if not self._prompt_known:
            self._prompt_known = True
            record.prompt_tokens += usage.prompt_tokens
            record.cached_tokens += usage.cached_tokens
            record.metrics.prompt_tokens += usage.prompt_tokens
            record.metrics.cached_tokens += usage.cached_tokens
        # What the worker does not know of: the way here, and the wait for a replica.
        before = max(0.0, now - record.began - usage.total_seconds)
        record.queue_seconds = max(record.queue_seconds or 0.0, before + usage.queue_seconds)
        if not self._streamed:
            record.note_first_token(before + usage.time_to_first_token_seconds)
            gaps = usage.completion_tokens - 1
            if gaps > 0:
                seconds = usage.total_seconds - usage.time_to_first_token_seconds
                record.metrics.inter_token.observe(seconds / gaps, gaps)
        self._unfinished -= 1
        if self._unfinished == 0 and record.open_prompts > 0:
            record.open_prompts -= 1
            record.metrics.prompts_open -= 1
