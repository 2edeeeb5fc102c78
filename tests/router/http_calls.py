"""Plain HTTP calls to a gateway."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mii import control
from tests.router.router_process import RouterProcess


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        """The body, which must be JSON that everyone can read: no NaN, nothing beyond ASCII."""
        assert self.headers.get_content_type() == "application/json"
        return json.loads(self.body.decode("ascii"), parse_constant=_refuse)

    @property
    def error(self) -> dict[str, Any]:
        """The error that the body tells of."""
        assert self.json.keys() == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of the body's server-sent events; the end mark as it is."""
        assert self.headers.get_content_type() == "text/event-stream"
        lines = self.body.decode("ascii").split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def connect(router: RouterProcess) -> http.client.HTTPConnection:
    """Open a connection to the gateway."""
    assert isinstance(router.first, control.Ready) and router.first.rest_port is not None
    return http.client.HTTPConnection("127.0.0.1", router.first.rest_port, timeout=30)


def call(
    router: RouterProcess,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Make one call, on a connection of its own."""
    with closing(connect(router)) as connection:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


def post(router: RouterProcess, path: str, body: Any) -> Answer:
    """Post a value as JSON."""
    data = json.dumps(body).encode()
    return call(router, "POST", path, data, {"Content-Type": "application/json"})


def get(router: RouterProcess, path: str) -> Answer:
    """Get a path."""
    return call(router, "GET", path)
