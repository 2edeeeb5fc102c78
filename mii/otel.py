"""Traces by OpenTelemetry. Imported by `mii.traces` alone, and only where they are asked for."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Mapping
from contextvars import Token
from types import TracebackType
from typing import Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mii import logs
from mii.traces import Attributes, Span

_CLOSE_SECONDS: Final = 0.5
_EXPORTERS: Final = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


class Tracing:
    """What one process traces with. All settings are those of the standard variables.

    Args:
        process: what the process is called in the deployment, such as "worker 0.1".
        deployment: the deployment's name.

    Raises:
        ImportError: if the exporter for the protocol that is asked for is not installed.
    """

    def __init__(self, process: str, deployment: str) -> None:
        self._provider = TracerProvider(resource=_resource(process, deployment))
        self._provider.add_span_processor(BatchSpanProcessor(_exporter()))
        self._tracer = self._provider.get_tracer("mii")
        self._propagator = TraceContextTextMapPropagator()

    def span(self, name: str, headers: Mapping[str, str] | None) -> Span:
        """See `mii.traces.span`."""
        if headers is None:
            return RecordedSpan(self._tracer, name, SpanKind.CLIENT, None)
        parent = self._propagator.extract(headers, context=Context())
        return RecordedSpan(self._tracer, name, SpanKind.SERVER, parent)

    def outgoing(self) -> tuple[tuple[str, str], ...]:
        """See `mii.traces.outgoing`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return tuple(carrier.items())

    def close(self) -> None:
        """See `mii.traces.close`."""
        # A collector that does not answer must not keep the process from ending.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class RecordedSpan(Span):
    """A span that is exported when it has ended.

    Args:
        tracer: begins it.
        name: one of few.
        kind: which side of a call it is.
        parent: what it belongs to; None: the current span.
    """

    def __init__(
        self, tracer: trace.Tracer, name: str, kind: SpanKind, parent: Context | None
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._context = parent
        self._span: trace.Span = trace.INVALID_SPAN
        self._token: Token[Context] | None = None

    def __enter__(self) -> Span:
        self._span = self._tracer.start_span(self._name, self._context, self._kind)
        self._context = trace.set_span_in_context(self._span, self._context)
        self._token = context.attach(self._context)
        self.recording = self._span.is_recording()
        logs.trace_id.set(trace.format_trace_id(self._span.get_span_context().trace_id))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._span.set_attribute("mii.cancelled", True)
        elif error is not None:
            self.failed(getattr(error, "code", type(error).__name__))
        if self._token is not None:
            context.detach(self._token)
        self._span.end()

    def attributes(self, values: Attributes) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._span.set_attributes(known)

    def failed(self, why: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, str(why)))

    def phase(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        if not self.recording:
            return
        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            name,
            self._context,
            attributes=dict(attributes),
            start_time=int((began + offset) * 1e9),
        )
        span.end(int((max(began, ended) + offset) * 1e9))


def _resource(process: str, deployment: str) -> Resource:
    own = {"service.namespace": deployment, "service.instance.id": process}
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in given:
        own["service.name"] = f"mii-{process.split()[0]}"
    return Resource.create(own)


def _exporter() -> SpanExporter:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in names if os.environ.get(name)), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ImportError(f"OTLP protocol {protocol!r} is none of {', '.join(_EXPORTERS)}")
    exporter: SpanExporter = importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    return exporter
