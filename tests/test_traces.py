"""Traces cost nothing where nobody asks for them, and break nothing where they cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys

_SCRIPT = """
import sys
{before}
import logging
logging.basicConfig()
import mii.router.main
from mii import traces
traces.set_up("router", "acme")
with traces.span("request", {{"traceparent": "x"}}) as span:
    span.attributes({{"a": 1}})
    assert not span.recording and traces.outgoing() == ()
traces.close()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
_ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


def run(before: str = "", **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(before=before)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return done.stdout.strip(), done.stderr


def test_without_an_endpoint_nothing_is_imported() -> None:
    assert run() == ("[]", "")


def test_what_switches_the_standard_off_switches_it_off_here() -> None:
    assert run(**_ENDPOINT, OTEL_SDK_DISABLED="true") == ("[]", "")
    assert run(**_ENDPOINT, OTEL_TRACES_EXPORTER="none") == ("[]", "")


def test_without_the_package_a_warning_says_how_to_get_it() -> None:
    modules, said = run("sys.modules['opentelemetry'] = None", **_ENDPOINT)
    assert modules == "['opentelemetry']"
    assert "no traces" in said and "pip install 'mii[otel]'" in said


def test_a_protocol_that_there_is_no_exporter_for_is_a_warning() -> None:
    _, said = run(**_ENDPOINT, OTEL_EXPORTER_OTLP_PROTOCOL="http/json")
    assert "http/json" in said and "http/protobuf" in said
