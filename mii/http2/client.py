"""A gRPC client on one connection, which it makes anew when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import ClassVar, Final

from mii.http2.connection import Connection
from mii.http2.frames import MAX_STREAM_ID, ConnectionFault, ErrorCode, StreamFault
from mii.http2.grpc_wire import (
    CONTENT_TYPE,
    CallFault,
    MessageReader,
    StatusCode,
    decode_message_text,
    format_timeout,
    frame_message,
    metadata_block,
)
from mii.http2.header_decoder import Header
from mii.http2.headers import check_response, encode_headers
from mii.http2.limits import Limits
from mii.http2.stream import Loss, Stream

Metadata = tuple[tuple[str, str], ...]

_CONNECT_SECONDS: Final = 5.0
_FIXED_HEADERS: Final = (
    (b":method", b"POST"),
    (b"content-type", CONTENT_TYPE),
    (b"te", b"trailers"),
)
_STATUS_OF_LOSS: Final[dict[int, StatusCode]] = {
    ErrorCode.REFUSED_STREAM: StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
}
# gRPC's http-grpc-status-mapping.md: of what answers instead of a gRPC server.
_STATUS_OF_HTTP: Final = {
    "400": StatusCode.INTERNAL,
    "401": StatusCode.UNAUTHENTICATED,
    "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
    "429": StatusCode.UNAVAILABLE,
    "502": StatusCode.UNAVAILABLE,
    "503": StatusCode.UNAVAILABLE,
    "504": StatusCode.UNAVAILABLE,
}


class ClientCall:
    """One call under way.

    Args:
        max_message_bytes: of a message of the response.
        on_message: is called with each message of the response, from the event loop.
        on_headers: is called with the response's initial metadata.
    """

    __slots__ = (
        "_ended",
        "_headers_came",
        "_on_headers",
        "_on_message",
        "_reader",
        "_stream",
        "_timer",
    )

    def __init__(
        self,
        max_message_bytes: int,
        on_message: Callable[[bytes], None],
        on_headers: Callable[[dict[str, str]], None] | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_headers = on_headers
        self._reader = MessageReader(max_message_bytes)
        self._headers_came = False
        self._stream: Stream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Return when the call has ended with status OK.

        Raises:
            CallFault: with any other status, and the trailing metadata.
            asyncio.CancelledError: if the caller is cancelled; the call then is, too.
        """
        try:
            await self._ended
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Tell the server that nobody wants the answer; does nothing after the call's end."""
        self._finish(CallFault(StatusCode.CANCELLED, "the call was cancelled"))

    def begin(self, stream: Stream, timeout: float | None) -> None:
        """Note what carries the call."""
        self._stream = stream
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)

    def headers_received(self, headers: list[Header], ended: bool) -> None:
        check_response(headers, trailers=self._headers_came)
        plain = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        status = plain.get(":status", "")
        if status.startswith("1") and not ended:
            return
        if ended and "grpc-status" in plain:
            self._finish(_fault_of(plain))
        elif not self._headers_came and status != "200":
            code = _STATUS_OF_HTTP.get(status, StatusCode.UNKNOWN)
            self._finish(CallFault(code, f"the server answers with HTTP status {status[:8]}"))
        elif ended:
            self._finish(CallFault(StatusCode.UNKNOWN, "the server ended the call without status"))
        elif self._headers_came:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
        else:
            self._headers_came = True
            if self._on_headers is not None:
                self._on_headers(plain)

    def data_received(self, data: bytes, ended: bool) -> None:
        if not self._headers_came:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "data before headers")
        try:
            messages = self._reader.feed(data)
        except CallFault as fault:
            self._finish(fault)
            return
        for message in messages:
            try:
                self._on_message(message)
            except Exception as error:
                self._fail(error)
                return
        if ended:
            reason = "the server ended the stream without a status"
            self._finish(CallFault(StatusCode.INTERNAL, reason))

    def stream_lost(self, loss: Loss) -> None:
        self._stream = None
        code = StatusCode.UNAVAILABLE
        if not (loss.with_connection or loss.unprocessed):
            code = _STATUS_OF_LOSS.get(loss.code, StatusCode.INTERNAL)
        self._finish(CallFault(code, loss.message))

    def resume_writing(self) -> None:
        """Nothing: a request is one message, which the stream holds."""

    def _expire(self) -> None:
        self._finish(CallFault(StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed"))

    def _finish(self, fault: CallFault | None) -> None:
        if fault is None:
            self._settle()
            if not self._ended.done():
                self._ended.set_result(None)
        else:
            self._fail(fault)

    def _fail(self, error: Exception) -> None:
        self._settle()
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # whether anybody waits for it or not

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stream, self._stream = self._stream, None
        if stream is not None and not stream.over:
            stream.reset(ErrorCode.CANCEL)


def _fault_of(trailers: dict[str, str]) -> CallFault | None:
    """Return what the trailers of a call tell of; None: that it went well."""
    status = trailers.get("grpc-status", "")
    if status == "0":
        return None
    known = status.isascii() and status.isdigit() and len(status) < 4
    code = int(status) if known else int(StatusCode.UNKNOWN)
    text = decode_message_text(trailers.get("grpc-message", "").encode("latin-1"))
    metadata = tuple(item for item in trailers.items() if not item[0].startswith((":", "grpc-")))
    return CallFault(code, text or "the server gives no reason", metadata)


class _ClientConnection(Connection):
    """A connection to a server."""

    is_server: ClassVar[bool] = False

    def __init__(self, limits: Limits, on_lost: Callable[[_ClientConnection], None]) -> None:
        super().__init__(limits)
        self._on_lost = on_lost
        self._next_stream = 1
        self._change: asyncio.Event | None = None  # while somebody waits for it

    def open(self, receiver: ClientCall) -> Stream:
        """Open a stream."""
        stream = Stream(self, self._next_stream, receiver)
        self.streams[stream.number] = stream
        self._next_stream += 2
        return stream

    @property
    def usable(self) -> bool:
        """Whether it takes another stream now."""
        return (
            not self.closing
            and len(self.streams) < self.peer_max_streams
            and self._next_stream <= MAX_STREAM_ID
        )

    @property
    def used_up(self) -> bool:
        """Whether it never takes another stream."""
        return self.closing or self._next_stream > MAX_STREAM_ID

    async def changed(self) -> None:
        """Return when a stream has ended, or the connection."""
        if self._change is None:
            self._change = asyncio.Event()
        await self._change.wait()

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        if self._change is not None:
            self._tell_change()

    def closed(self, message: str) -> None:
        if self._change is not None:
            self._tell_change()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._on_lost(self)

    def _tell_change(self) -> None:
        assert self._change is not None
        self._change.set()
        self._change = None

    def headers_received(self, number: int, headers: list[Header], ended: bool) -> None:
        stream = self.streams.get(number)
        if stream is None:
            if number % 2 == 0 or self._is_idle(number):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"headers on stream {number}")
            return  # of a call that was cancelled meanwhile
        if stream.ended_there:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "headers after the end")
        stream.ended_there = ended
        stream.receiver.headers_received(headers, ended)
        if stream.over:
            self.forget(stream)

    def _is_idle(self, number: int) -> bool:
        return number % 2 == 0 or number >= self._next_stream


class Channel:
    """Calls to one server.

    Args:
        address: "host:port".
        limits: of what the server may do.
        metadata: sent with every call.
        tls: speak TLS.
    """

    def __init__(
        self,
        address: str,
        *,
        limits: Limits,
        metadata: Metadata = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._limits = limits
        self._tls = tls
        authority = (b":authority", address.encode())
        scheme = (b":scheme", b"http" if tls is None else b"https")
        fixed = [authority, scheme, *_FIXED_HEADERS]
        self._fixed = encode_headers(fixed)
        self._metadata = encode_headers(metadata_block(metadata))
        self._connection: _ClientConnection | None = None
        self._connections: set[_ClientConnection] = set()  # that one, and those it has replaced
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False

    async def call(
        self,
        path: str,
        body: bytes,
        on_message: Callable[[bytes], None],
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
        on_headers: Callable[[dict[str, str]], None] | None = None,
    ) -> ClientCall:
        """Begin a call, connecting first if need be.

        Args:
            path: "/package.Service/Method".
            body: the request's only message.
            on_message: is called with each message of the response.
            timeout: seconds until nobody waits for the answer any more, told to the server, too.
            metadata: besides the channel's.
            on_headers: is called with the response's initial metadata.

        Raises:
            CallFault: UNAVAILABLE, if there is no connection to be had; DEADLINE_EXCEEDED, if not
                in time.
            ValueError: for metadata that cannot be sent.
        """
        block = encode_headers(((b":path", path.encode()),)) + self._fixed + self._metadata
        if metadata:
            block += encode_headers(metadata_block(metadata))
        connection = self._connection
        if connection is None or not connection.usable:
            began = asyncio.get_running_loop().time()
            connection = await self._connected(timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (asyncio.get_running_loop().time() - began))
        if timeout is not None:
            block += encode_headers(((b"grpc-timeout", format_timeout(timeout)),))
        call = ClientCall(self._limits.max_message_bytes, on_message, on_headers)
        stream = connection.open(call)
        stream.send_headers(block)
        stream.send(frame_message(body))
        stream.end()
        call.begin(stream, timeout)
        return call

    async def unary(
        self, path: str, body: bytes, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        """Make a call that is answered by one message, and return that.

        Raises:
            CallFault: if it ends with any status but OK, or without a message.
        """
        messages: list[bytes] = []
        call = await self.call(path, body, messages.append, timeout=timeout, metadata=metadata)
        await call.wait()
        if len(messages) != 1:
            raise CallFault(StatusCode.INTERNAL, f"{path} was answered by {len(messages)} messages")
        return messages[0]

    async def close(self) -> None:
        """Give up the connection; calls under way end as UNAVAILABLE."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        for connection in list(self._connections):
            connection.abort("the connection was given up")

    async def _connected(self, timeout: float | None) -> _ClientConnection:
        """Return the connection when it takes another stream; a new one if it never will."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    connection = self._connection
                    if connection is None or connection.used_up:
                        await self._new_connection()
                    elif not connection.usable:
                        await connection.changed()
                    else:
                        return connection
        except TimeoutError:
            message = "the call's deadline has passed before there was a connection for it"
            raise CallFault(StatusCode.DEADLINE_EXCEEDED, message) from None

    async def _new_connection(self) -> None:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._settled)
        connecting = self._connecting
        await asyncio.wait([connecting])
        if connecting.cancelled():
            raise CallFault(StatusCode.UNAVAILABLE, "the channel is closed")
        connecting.result()

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()

    async def _connect(self) -> None:
        if self._closed:
            raise CallFault(StatusCode.UNAVAILABLE, "the channel is closed")
        made = _ClientConnection(self._limits, self._lost)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.create_connection(
                    lambda: made, self._host.strip("[]"), self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            address = f"{self._host}:{self._port}"
            message = f"no connection to {address}: {error or 'it takes too long'}"
            raise CallFault(StatusCode.UNAVAILABLE, message) from None
        if not made.closing:
            self._connection = made
            self._connections.add(made)

    def _lost(self, connection: _ClientConnection) -> None:
        self._connections.discard(connection)
        if self._connection is connection:
            self._connection = None
