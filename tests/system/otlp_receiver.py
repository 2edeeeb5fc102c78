"""A collector of traces: takes OTLP over HTTP and remembers the spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SECONDS = 60.0  # within which what is waited for must come


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int  # ns
    ended: int
    failed: bool
    attributes: dict[str, object] = field(hash=False)


class OtlpReceiver:
    """Listens until `close`."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._came:
            for resource in request.resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    self.spans.append(
                        ReceivedSpan(
                            about["service.name"],
                            about["service.instance.id"],
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == 2,
                            {
                                each.key: getattr(each.value, each.value.WhichOneof("value") or "")
                                for each in span.attributes
                            },
                        )
                    )
            self._came.notify_all()

    def until(self, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Return the spans that have come once they are enough."""
        deadline = time.monotonic() + SECONDS
        with self._came:
            while not enough(self.spans):
                assert self._came.wait(deadline - time.monotonic()), self.spans
            return list(self.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
