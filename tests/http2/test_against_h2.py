"""Both our ends against `h2`, an implementation that refuses whatever breaks the protocol."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.http2.client import ClientCall, _ClientConnection
from mii.http2.grpc_wire import frame_message
from mii.http2.headers import encode_headers
from mii.http2.limits import Limits
from mii.http2.server import Server
from tests.http2.conftest import fault_of, message, standard_handlers
from tests.http2.memory import MemoryTransport, deliver, turns

WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
Operation = tuple[str, int, int]  # what, which stream, how much


def messages_in(data: bytes) -> list[bytes]:
    """The messages of a stream."""
    found = []
    while data:
        length = int.from_bytes(data[1:5], "big")
        found.append(data[5 : 5 + length])
        data = data[5 + length :]
    return found


@dataclass
class Asked:
    """A call as the h2 client has it."""

    method: str
    bodies: list[bytes]
    unsent: bytes
    ended: bool = False
    over: bool = False  # by a reset of either side
    answer: bytes = b""
    trailers: dict[bytes, bytes] = field(default_factory=dict)


class Conversation:
    """An h2 client and our server, with a wire in memory between them."""

    def __init__(self, limits: Limits) -> None:
        self.server = Server(standard_handlers([]), limits=limits, fault_of=fault_of)
        self.connection = self.server.protocol()
        self.wire = MemoryTransport()
        self.connection.connection_made(self.wire)
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self.client = h2.connection.H2Connection(config)
        self.client.initiate_connection()
        self.calls: dict[int, Asked] = {}
        self.unacknowledged: list[tuple[int, int]] = []

    async def exchange(self, cut: int = 0) -> None:
        """Carry bytes in both directions until nobody has any, those of the client in pieces."""
        while True:
            data = self.client.data_to_send()
            piece = cut or len(data)
            for at in range(0, len(data), piece or 1):
                await deliver(data[at : at + piece], self.connection, self.wire)
            await turns(4)
            back = self.wire.take()
            for event in self.client.receive_data(back):
                self._on(event)
            if not data and not back:
                return

    def _on(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                if event.stream_ended is not None:
                    self.calls[event.stream_id].trailers = dict(event.headers)
            case h2.events.DataReceived():
                self.calls[event.stream_id].answer += event.data
                size = event.flow_controlled_length or 0
                self.unacknowledged.append((event.stream_id, size))
            case h2.events.StreamReset():
                self.calls[event.stream_id].over = True
            case h2.events.ConnectionTerminated():
                raise AssertionError(event)

    def do(self, operation: Operation) -> None:
        what, which, amount = operation
        if what == "open":
            self._open(which, amount)
        elif what == "settings":
            self.client.update_settings({WINDOW: amount})
        elif what == "ping":
            self.client.ping(b"12345678")
        elif what == "acknowledge":
            self._acknowledge()
        elif what == "pause":
            self.connection.pause_writing()
        elif what == "resume":
            self.connection.resume_writing()
        elif self.calls:
            number = list(self.calls)[which % len(self.calls)]
            asked = self.calls[number]
            if asked.ended or asked.over:
                return
            if what == "send":
                self._send(number, amount)
            elif what == "end" and not asked.unsent:
                asked.ended = True
                self.client.end_stream(number)
            elif what == "reset":
                asked.over = True
                self.client.reset_stream(number, h2.errors.ErrorCodes.CANCEL)

    def _open(self, which: int, amount: int) -> None:
        method = ("Echo", "Converse", "Wait", "Refuse", "Nothing", "Fail")[which % 6]
        rng = random.Random(amount)
        count = rng.randrange(6) if method == "Converse" else 1
        bodies = [rng.randbytes(rng.choice((0, 1, 100, amount))) for _ in range(count)]
        number = self.client.get_next_available_stream_id()
        self.calls[number] = Asked(method, bodies, b"".join(map(message, bodies)))
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", b"here"),
            (b":path", b"/a.B/" + method.encode()),
            (b"content-type", b"application/grpc"),
        ]
        self.client.send_headers(number, headers)

    def _send(self, number: int, amount: int) -> None:
        asked = self.calls[number]
        room = min(
            amount,
            self.client.local_flow_control_window(number),
            self.client.max_outbound_frame_size,
        )
        part, asked.unsent = asked.unsent[: max(0, room)], asked.unsent[max(0, room) :]
        if part:
            self.client.send_data(number, part)

    def _acknowledge(self) -> None:
        for number, size in self.unacknowledged:
            self.client.acknowledge_received_data(size, number)
        self.unacknowledged.clear()

    async def finish(self) -> None:
        """Send all that is unsent, read all that is unread."""
        self.connection.resume_writing()
        self.client.update_settings({WINDOW: 65535})
        for _ in range(200):
            await self.exchange()
            self._acknowledge()
            for number, asked in self.calls.items():
                self._send_rest(number, asked)
            waiting = [a for a in self.calls.values() if a.method != "Wait" and not a.over]
            if all(asked.trailers for asked in waiting):
                break
        await self.exchange()

    def _send_rest(self, number: int, asked: Asked) -> None:
        if asked.over or asked.ended:
            return
        before = None
        while asked.unsent and before != len(asked.unsent):
            before = len(asked.unsent)
            self._send(number, 16384)
        if not asked.unsent:
            asked.ended = True
            self.client.end_stream(number)


def check(asked: Asked) -> None:
    """Compare a call's answer to what it asked."""
    if not asked.trailers:  # the client has cancelled it, or it waits
        assert asked.over or asked.method == "Wait"
        return
    status = int(asked.trailers[b"grpc-status"])
    if asked.method == "Echo":
        assert status == 0 and messages_in(asked.answer) == asked.bodies
    elif asked.method == "Converse":
        assert status == 0 and messages_in(asked.answer) == [each.upper() for each in asked.bodies]
    else:
        assert status == {"Refuse": 10, "Nothing": 12, "Fail": 13}[asked.method]


operations = st.tuples(
    st.sampled_from(
        ("open", "open", "send", "send", "send", "end", "reset", "settings", "ping", "acknowledge")
        + ("pause", "resume", "turn", "turn")
    ),
    st.integers(0, 100),
    st.sampled_from((0, 1, 5, 15, 100, 5000, 16384, 70_000)),
)
small = Limits(stream_window=1000, connection_window=65535, max_streams=10**6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(operations, max_size=60),
    st.sampled_from((0, 1, 7, 1000)),
    st.sampled_from((Limits(), small)),
)
def test_whatever_an_h2_client_does_its_calls_are_answered(
    script: Sequence[Operation], cut: int, limits: Limits
) -> None:
    async def run() -> None:
        conversation = Conversation(limits)
        for operation in script:
            if operation[0] == "turn":
                await conversation.exchange(cut)
            else:
                conversation.do(operation)
        await conversation.finish()
        for asked in conversation.calls.values():
            check(asked)
        left = [a for a in conversation.calls.values() if a.method == "Wait" and not a.over]
        assert conversation.server.calls_under_way == len(left)
        assert conversation.server.held_bytes == 0
        conversation.connection.connection_lost(None)
        await turns()
        assert not conversation.server.calls_under_way

    asyncio.run(run())


@pytest.mark.parametrize("table_size", [0, 100, 4096, 65536])
async def test_an_h2_client_with_any_header_table_is_answered(table_size: int) -> None:
    conversation = Conversation(Limits())
    code = h2.settings.SettingCodes.HEADER_TABLE_SIZE
    conversation.client.update_settings({code: table_size})
    for number in range(4):
        conversation.do(("open", number, 5))
        await conversation.exchange()
    await conversation.finish()
    for asked in conversation.calls.values():
        check(asked)
    conversation.connection.connection_lost(None)


class H2Server:
    """An h2 server that answers with what it is asked, and our client, in memory."""

    def __init__(self, cut: int, window: int) -> None:
        self._cut = cut
        self._rng = random.Random(cut)
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.server = h2.connection.H2Connection(config)
        self.server.local_settings = h2.settings.Settings(
            client=False, initial_values={WINDOW: window}
        )
        self.server.initiate_connection()
        self.client = _ClientConnection(Limits(), lambda connection: None)
        self.wire = MemoryTransport()
        self.client.connection_made(self.wire)
        self.asked: dict[int, bytearray] = {}
        self.unsent: dict[int, bytes] = {}
        self.begun: set[int] = set()

    async def exchange(self) -> None:
        """Carry bytes until nobody has any; answer requests that have come in whole."""
        while True:
            await turns()
            data = self.wire.take()
            for at in range(0, len(data), self._cut):
                for event in self.server.receive_data(data[at : at + self._cut]):
                    self._on(event)
            self._answer()
            back = self.server.data_to_send()
            for at in range(0, len(back), self._cut):
                await deliver(back[at : at + self._cut], self.client, self.wire)
            if not data and not back:
                return

    def _on(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self.asked[event.stream_id] = bytearray()
            case h2.events.DataReceived():
                self.asked[event.stream_id] += event.data
                size = event.flow_controlled_length or 0
                self.server.acknowledge_received_data(size, event.stream_id)
            case h2.events.StreamEnded():
                self.unsent[event.stream_id] = bytes(self.asked[event.stream_id])
            case h2.events.StreamReset():
                self.unsent.pop(event.stream_id, None)

    def _answer(self) -> None:
        for number, data in list(self.unsent.items()):
            if number not in self.begun:
                self.begun.add(number)
                headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
                self.server.send_headers(number, headers)
            room = min(self.server.local_flow_control_window(number), 16384, len(data))
            padding = self._rng.choice((None, 0, 7)) if room > 8 else None
            if padding is not None:  # which windows count, too
                room -= 8
            if room:
                self.server.send_data(number, data[:room], pad_length=padding)
            if room == len(data):
                self.server.send_headers(number, [(b"grpc-status", b"0")], end_stream=True)
                del self.unsent[number]
            else:
                self.unsent[number] = data[room:]

    def ask(self, body: bytes, take: Callable[[bytes], None]) -> ClientCall:
        """Send a request as `Channel` does."""
        call = ClientCall(2**30, take)
        stream = self.client.open(call)
        pseudo = {b":method": b"POST", b":scheme": b"http", b":path": b"/x", b":authority": b"y"}
        stream.send_headers(encode_headers(pseudo.items()))
        stream.send(frame_message(body))
        stream.end()
        call.begin(stream, None)
        return call


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((0, 1, 95, 5000, 70_000)), st.booleans()), max_size=5),
    st.sampled_from((50, 1000, 10**6)),
    st.sampled_from((0, 100, 65535, 2**31 - 1)),
)
def test_an_h2_server_understands_our_client(
    requests: list[tuple[int, bool]], cut: int, window: int
) -> None:
    async def run() -> None:
        two = H2Server(cut, window)
        await two.exchange()
        calls = []
        for size, cancelled in requests:
            got: list[bytes] = []
            body = random.Random(size).randbytes(size)
            calls.append((body, cancelled, got, two.ask(body, got.append)))
        for _, cancelled, _, call in calls:
            if cancelled:
                call.cancel()
        await two.exchange()
        if window < 2**20:
            two.server.update_settings({WINDOW: 2**20})
            await two.exchange()
        for body, cancelled, got, call in calls:
            if not cancelled:
                await call.wait()
                assert got == [body]
        assert not two.client.streams
        two.client.connection_lost(None)

    asyncio.run(run())


async def test_a_reset_reaches_the_handler_and_a_cancellation_the_peer_within_two_turns() -> None:
    conversation = Conversation(Limits())
    conversation.do(("open", 2, 5))  # Wait
    conversation.do(("send", 0, 100))
    await conversation.exchange()
    assert conversation.server.calls_under_way == 1
    conversation.do(("reset", 0, 0))
    conversation.connection.data_received(conversation.client.data_to_send())
    await turns(2)
    assert conversation.server.calls_under_way == 0
    conversation.connection.connection_lost(None)

    two = H2Server(10**6, 65535)
    call = two.ask(b"x", lambda body: None)
    await two.exchange()
    two.asked.clear()
    call = two.ask(bytes(100_000), lambda body: None)
    await turns(2)
    two.wire.take()
    call.cancel()
    await turns(2)
    assert two.wire.take()[3] == 3  # RST_STREAM
    two.client.connection_lost(None)
