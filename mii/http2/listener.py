"""One port for HTTP/2 and HTTP/1.1: the first bytes of a connection tell which it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from mii.http2.frames import PREFACE

_ONLY_HTTP2: Final = (
    b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: h2c\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s"
)


class Switch(asyncio.Protocol):
    """Waits for a connection's first bytes, and hands it over.

    Args:
        http2: makes the protocol for connections that begin with HTTP/2's preface.
        http1: for all others.
        refusal: what others are told if there is no `http1`.
        seconds: for the first bytes to come.
    """

    def __init__(
        self,
        http2: Callable[[], asyncio.Protocol],
        http1: Callable[[], asyncio.Protocol] | None,
        refusal: bytes = b"this port speaks HTTP/2 only\n",
        seconds: float = 10.0,
    ) -> None:
        self._http2 = http2
        self._http1 = http1
        self._refusal = refusal
        self._seconds = seconds
        self._refused = False
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._refused:  # read on, or the answer is lost when the socket is closed
            return
        self._first += data
        if self._first.startswith(PREFACE):
            self._hand_over(self._http2())
        elif PREFACE.startswith(self._first):
            return
        elif self._http1 is not None:
            self._hand_over(self._http1())
        elif self._transport is not None:
            self._refused = True
            self._transport.write(_ONLY_HTTP2 % (len(self._refusal), self._refusal))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def _hand_over(self, protocol: asyncio.Protocol) -> None:
        transport = self._transport
        assert transport is not None and self._timer is not None
        self._timer.cancel()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(self._first)
