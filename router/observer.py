"""Sees every request of the router come and go: its log line, its figures, its trace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from mii import logs, traces
from mii.errors import Cancelled, DeadlineExceeded, InternalError, MIIError, Unavailable
from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.server_call import Handler, ServerCall
from mii.router import request_record
from mii.router.access import Caller
from mii.router.gateway.errors import ERROR_CODE
from mii.router.metrics import ReplicaHistory, RouterMetrics
from mii.router.request_record import RequestRecord
from mii.rpc.methods import fault_of
from mii.status import ERROR_KEY

SURFACES: Final = ("grpc", "http")

# Asked every few seconds by whoever watches: they would fill the log and dilute the figures.
_WATCHED: Final = ("/grpc.", "GET /health", "GET /live", "GET /metrics")
# Questions that nobody was meant to answer.
_UNKNOWN: Final = ("not_found", "method_not_allowed")
_CLIENT_GONE: Final = "499"  # nginx's status for it

_WebHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Ending:
    """How a request ends.

    Args:
        record: of the request.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.status = ""  # that the client is told
        self.code = ""  # of the error that the client is told; "": none

    def failed(self, error: Exception) -> CallFault:
        """Note, and return, what a gRPC call ends with."""
        fault = fault_of(error)
        self.status = StatusCode(fault.code).name
        self.code = dict(fault.metadata).get(ERROR_KEY, self.status.lower())
        return fault

    def leave(self) -> None:
        """Note that the client has closed its connection."""
        # Some do as soon as they have the last byte, before the handler has returned.
        if not (self.record.complete or self.record.error is not None):
            self.status, self.code = _CLIENT_GONE, Cancelled.code

    @property
    def outcome(self) -> str:
        """ "ok", or the code of an error."""
        if self.code:
            return self.code
        error = self.record.error  # that came when the status had been sent
        if isinstance(error, MIIError):
            return error.code
        return "ok" if error is None else InternalError.code


class Observer:
    """Belongs to one event loop.

    Args:
        model_name: what is served.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.metrics = RouterMetrics()
        self.history = ReplicaHistory()

    def handlers(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        """Return handlers of gRPC calls that are observed."""
        return {path: self._observed(path, handler) for path, handler in handlers.items()}

    def _observed(self, path: str, handler: Handler) -> Handler:
        if path.startswith(_WATCHED):
            return handler

        async def handle(call: ServerCall) -> None:
            with self._request("grpc", path, call.headers) as ending:
                ending.record.client = _name_of(call.identity)
                try:
                    await handler(call)
                except asyncio.CancelledError:
                    ending.code = _why_cancelled(call)
                    ending.status = StatusCode.CANCELLED.name
                    raise
                except Exception as error:
                    raise ending.failed(error) from error
                ending.status = StatusCode.OK.name

        return handle

    def judged(self, judge: Callable[[ServerCall], None]) -> Callable[[ServerCall], None]:
        """Return what judges gRPC calls like `judge`, and has those that it refuses observed."""

        def judge_observed(call: ServerCall) -> None:
            try:
                judge(call)
            except Exception as error:
                with self._request("grpc", call.path, call.headers) as ending:
                    fault = ending.failed(error)
                raise fault from error

        return judge_observed

    @property
    def middleware(self) -> Middleware:
        """Has the gateway's requests observed; belongs outside of all others."""

        @web.middleware
        async def observe(request: web.Request, handler: _WebHandler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            route = f"{request.method} {resource.canonical if resource is not None else '*'}"
            if route.startswith(_WATCHED):
                return await handler(request)
            with self._request("http", route, request.headers) as ending:
                ending.status = "200"
                try:
                    response = await handler(request)
                except BaseException:
                    ending.leave()
                    raise
                finally:
                    ending.record.request_id = request.get("request_id", "")
                ending.status, ending.code = str(response.status), response.get(ERROR_CODE, "")
                return response

        return observe

    @contextmanager
    def _request(self, surface: str, method: str, headers: Mapping[str, str]) -> Iterator[_Ending]:
        ending = _Ending(RequestRecord(surface, method, self.metrics))
        token = request_record.current.set(ending.record)
        with traces.span(method, headers) as span:
            try:
                yield ending
            finally:
                request_record.current.reset(token)
                self._ended(ending, span)
                logs.request_id.set("")

    def _ended(self, ending: _Ending, span: traces.Span) -> None:
        record, outcome = ending.record, ending.outcome
        seconds = time.monotonic() - record.began
        self._count(record, outcome, seconds)
        if not (span.recording or logs.access.isEnabledFor(logging.INFO)):
            return
        facts = {
            "surface": record.surface,
            "method": record.method,
            "status": ending.status,
            "outcome": outcome,
            "client": record.client or None,
            **(_generation(record) if record.generates else {}),
        }
        if span.recording:
            span.attributes(_attributes(record, facts, self.model_name))
            if outcome not in ("ok", Cancelled.code):
                span.failed(outcome)
        facts["total_seconds"] = round(seconds, 6)
        logs.tell_access("request", facts, record.request_id)

    def _count(self, record: RequestRecord, outcome: str, seconds: float) -> None:
        metrics = self.metrics
        metrics.requests[record.surface, outcome] += 1
        if outcome not in ("ok", Cancelled.code, *_UNKNOWN) and not record.replicas:
            metrics.refused[outcome] += 1
        if not record.generates:
            return
        metrics.total.observe(seconds)
        metrics.request_generated_tokens.observe(record.generated_tokens)
        if record.prompt_tokens:
            metrics.request_prompt_tokens.observe(record.prompt_tokens)
        if record.first_token is not None:
            metrics.time_to_first_token.observe(record.first_token)
        if record.queue_seconds is not None:
            metrics.queue.observe(record.queue_seconds)


def _generation(record: RequestRecord) -> dict[str, Any]:
    queue, first = record.queue_seconds, record.first_token
    return {
        "prompt_tokens": record.prompt_tokens or None,
        "cached_tokens": record.cached_tokens or None,
        "generated_tokens": record.generated_tokens,
        "queue_seconds": None if queue is None else round(queue, 6),
        "time_to_first_token_seconds": None if first is None else round(first, 6),
        "replicas": ",".join(map(str, record.replicas)),
        "moves": record.moves,
    }


def _attributes(record: RequestRecord, facts: dict[str, Any], model: str) -> dict[str, Any]:
    """Return a span's attributes: by OpenTelemetry's names where there are any."""
    if record.surface == "http":
        verb, _, route = record.method.partition(" ")
        status = {
            "http.request.method": verb,
            "http.route": route,
            "http.response.status_code": int(facts["status"]),
        }
    else:
        status = {
            "rpc.system": "grpc",
            "rpc.method": record.method.lstrip("/"),
            "rpc.response.status_code": facts["status"],
        }
    generation = {}
    if record.generates:
        generation = {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": facts["prompt_tokens"],
            "gen_ai.usage.output_tokens": facts["generated_tokens"],
        }
    own = ("outcome", "client", "queue_seconds", "time_to_first_token_seconds", "replicas", "moves")
    told = {f"mii.{name}": facts.get(name) for name in own}
    return {**status, **generation, **told, "mii.request_id": record.request_id}


def _name_of(caller: object) -> str:
    return caller.name if isinstance(caller, Caller) else ""


def _why_cancelled(call: ServerCall) -> str:
    if call.loss is not None:
        return Cancelled.code
    return DeadlineExceeded.code if call.time_remaining() == 0.0 else Unavailable.code
