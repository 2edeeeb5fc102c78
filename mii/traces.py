"""Traces of requests through router and workers, where OpenTelemetry is asked for.

That is so if the standard variables name an endpoint (OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) and `mii[otel]` is installed. Otherwise nothing of it is
imported, and `span` gives one that does nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mii.otel import Tracing

Attributes = Mapping[str, Any]

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_logger = logging.getLogger(__name__)
_tracing: Tracing | None = None  # of this process


class Span:
    """A span that does nothing; `mii.otel.RecordedSpan` is one that does. A context manager."""

    recording = False

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def attributes(self, values: Attributes) -> None:
        """Add what the span is about; None: not known, and left out."""

    def failed(self, why: str) -> None:
        """Note that it ended with an error."""

    def phase(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        """Add a child that has already ended; times are those of time.monotonic()."""


_NO_SPAN: Final = Span()


def set_up(process: str, deployment: str) -> None:
    """Begin to trace, if the environment asks for it.

    Args:
        process: what the process is called in the deployment, such as "worker 0.1".
        deployment: the deployment's name.
    """
    global _tracing
    if not _asked_for(os.environ):
        return
    try:
        from mii.otel import Tracing

        _tracing = Tracing(process, deployment)
    except ImportError as error:
        _logger.warning(
            "there will be no traces, though %s is set: %s (pip install 'mii[otel]')",
            " or ".join(_ENDPOINTS),
            error,
        )
    except (ValueError, OSError) as error:  # a variable that makes no sense, a file that is missing
        _logger.warning("there will be no traces: %s", error)


def close() -> None:
    """Send what has not been sent, for a moment at most."""
    if _tracing is not None:
        _tracing.close()


def span(name: str, headers: Mapping[str, str] | None = None) -> Span:
    """Return a span, which begins when its block is entered and is then the current one.

    Args:
        name: one of few.
        headers: of a request that has come in, whose trace is gone on with; None: the span belongs
            to the current one.
    """
    return _NO_SPAN if _tracing is None else _tracing.span(name, headers)


def outgoing() -> tuple[tuple[str, str], ...]:
    """Return the headers by which another process goes on with the current trace."""
    return () if _tracing is None else _tracing.outgoing()


def _asked_for(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in [each.strip() for each in exporters.split(",")]:
        return False
    return any(environment.get(name) for name in _ENDPOINTS)
