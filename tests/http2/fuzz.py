"""Throws broken conversations at a server and at a client: no crash, no hang, no growth.

    python -m tests.http2.fuzz [--seconds 600] [--seed 0]

A conversation is a sequence of frames such as clients, or servers, send, most of them right, cut
into portions at random and then damaged: bits flipped, pieces doubled, dropped or moved. It goes
straight into a connection's `data_received`, without a network. Exits with 1 at the first fault,
and names its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import signal
import struct
import sys
import time
from typing import Any

import hpack

from mii.http2.client import ClientCall, _ClientConnection
from mii.http2.limits import Limits
from mii.http2.server import Server
from tests.http2.conftest import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    fault_of,
    frame,
    message,
    standard_handlers,
)
from tests.http2.memory import MemoryTransport, deliver

_LONGEST_SECONDS = 20  # of a conversation: the signal ends the process
_LONGEST_PORTION_SECONDS = 0.5  # on a busy machine; a portion takes microseconds


class Conversation:
    """What a client says to a server, which follows from a seed."""

    opening = PREFACE + frame(SETTINGS, 0, 0)

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._encoder = hpack.Encoder()
        self._next_stream = 1

    def run(self) -> None:
        """Have it, with a server of its own."""
        asyncio.run(self.have())

    async def have(self) -> None:
        """Have it on the running loop."""
        await _run_portions(self.portions(), self._rng)

    def portions(self) -> list[bytes]:
        """Return its bytes, damaged or not, in portions."""
        rng = self._rng
        data = bytearray(self.opening)
        for _ in range(rng.randint(1, 40)):
            data += self._frame()
        for _ in range(rng.choice([0, 0, 0, 1, 3, 20])):
            self._damage(data)
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 3, 30])))
        places = [0, *cuts, len(data)]
        return [bytes(data[a:b]) for a, b in zip(places, places[1:], strict=False)]

    def _frame(self) -> bytes:
        rng = self._rng
        stream = rng.randrange(1, max(2, self._next_stream), 2) if rng.random() < 0.95 else 0
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                return self._request()
            case 4:
                return frame(
                    DATA, rng.choice([0, 1, 8, 9]), stream, rng.randbytes(rng.randrange(50))
                )
            case 5:
                increment = rng.choice([0, 1, 100, 2**31 - 1])
                return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))
            case 6:
                return frame(RST_STREAM, 0, stream, struct.pack(">I", rng.randrange(15)))
            case 7:
                key, value = rng.randrange(8), rng.choice([0, 1, 100, 65535, 2**24, 2**31])
                return frame(SETTINGS, rng.choice([0, 0, 1]), 0, struct.pack(">HI", key, value))
            case 8:
                return frame(PING, rng.choice([0, 1]), 0, rng.randbytes(8))
            case 9:
                return frame(rng.choice([PRIORITY, GOAWAY, 0x55]), 0, stream, rng.randbytes(8))
            case 10:
                return frame(CONTINUATION, rng.choice([0, END_HEADERS]), stream, rng.randbytes(9))
            case _:
                return frame(rng.randrange(256), rng.randrange(256), stream, rng.randbytes(20))

    def _request(self) -> bytes:
        rng = self._rng
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        path = rng.choice(["Echo", "Count", "Converse", "Wait", "Refuse", "Fail", "Nothing"])
        headers = [
            (":method", rng.choice(["POST", "POST", "POST", "GET"])),
            (":scheme", "http"),
            (":path", f"/a.B/{path}"),
            ("content-type", "application/grpc"),
            ("x" * rng.randrange(1, 30), "v" * rng.choice([0, 5, 5000])),
        ]
        if rng.random() < 0.2:
            headers.append(("grpc-timeout", rng.choice(["1S", "0n", "x", "99999999H"])))
        block = self._encode(headers)
        body = message(b"%d" % rng.randrange(100) if path == "Count" else rng.randbytes(40))
        at = rng.randrange(len(block))
        return (
            frame(HEADERS, 0, stream, block[:at])
            + frame(CONTINUATION, END_HEADERS, stream, block[at:])
            + frame(DATA, 0, stream, body[:7])
            + frame(DATA, END_STREAM | PADDED, stream, b"\x02" + body[7:] + bytes(2))
        )

    def _encode(self, headers: list[tuple[str, str]]) -> bytes:
        # With Huffman's code only what is short: the encoder takes quadratic time.
        return self._encoder.encode(headers, huffman=all(len(value) < 99 for _, value in headers))

    def _damage(self, data: bytearray) -> None:
        rng = self._rng
        safe = len(self.opening) - 9  # SETTINGS may be damaged, too
        if len(data) == safe:
            return
        at = rng.randrange(safe, len(data))
        end = min(len(data), at + rng.randrange(1, 40))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end]
            case _:
                data[at:end] = rng.randbytes(end - at)


class Answers(Conversation):
    """What a server says to a client that has asked it some questions."""

    opening = frame(SETTINGS, 0, 0)
    questions = 8

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._next_stream = 2 * self.questions + 1

    async def have(self) -> None:
        await _run_answers(self.portions(), self.questions)

    def _request(self) -> bytes:
        rng = self._rng
        stream = rng.randrange(1, self._next_stream, 2)
        head = [(":status", rng.choice(["200", "200", "200", "100", "404", "x"]))]
        head += [("content-type", "application/grpc"), ("a", "b" * rng.choice([0, 5, 5000]))]
        tail = [("grpc-status", rng.choice(["0", "0", "13", "x"])), ("grpc-message", "%zz%e4")]
        parts = [
            frame(HEADERS, END_HEADERS, stream, self._encode(head)),
            frame(DATA, 0, stream, message(rng.randbytes(rng.choice([0, 30, 3000])))),
            frame(HEADERS, END_HEADERS | END_STREAM, stream, self._encode(tail)),
        ]
        return b"".join(part for part in parts if rng.random() < 0.9)


async def _run_answers(portions: list[bytes], questions: int) -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    connection, wire = _ClientConnection(Limits(), lambda connection: None), MemoryTransport()
    connection.connection_made(wire)
    calls = [ClientCall(1000, lambda body: None) for _ in range(questions)]
    for call in calls:
        stream = connection.open(call)
        stream.send_headers(b"\x83")
        stream.send(message(b"x" * 20_000))
        stream.end()
        call.begin(stream, None)
    for portion in portions:
        await deliver(portion, connection, wire)
    connection.connection_lost(None)
    ends = asyncio.gather(*(call.wait() for call in calls), return_exceptions=True)
    await asyncio.wait_for(ends, 1.0)
    assert not faults, faults
    assert not connection.streams


def run_bytes(data: bytes) -> None:
    """Have a conversation that begins rightly and goes on with some bytes."""
    asyncio.run(_run_portions([PREFACE + frame(SETTINGS, 0, 0), data], random.Random(0)))


async def _run_portions(portions: list[bytes], rng: random.Random) -> None:
    """Give portions to a connection; check that nothing is raised, and that nothing is left."""
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    server = Server(standard_handlers([]), limits=Limits(), fault_of=fault_of)
    connection, wire = server.protocol(), MemoryTransport()
    connection.connection_made(wire)
    for portion in portions:
        began = time.perf_counter()
        await deliver(portion, connection, wire)
        took = time.perf_counter() - began
        assert took < _LONGEST_PORTION_SECONDS, f"{len(portion)} bytes took {took:.2f} s"
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if rng.random() < 0.05:
            connection.pause_writing()
        elif rng.random() < 0.2:
            connection.resume_writing()
    for _ in range(5):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not faults, faults
    assert not server.calls_under_way and not server.connections and not server.held_bytes
    assert not connection.streams


async def _go_on(first: int, seconds: float) -> tuple[int, int]:
    """Have conversations for a time; return how many, and the memory after the first of them."""
    until = time.monotonic() + seconds
    seed, settled = first, 0
    while time.monotonic() < until:
        signal.alarm(_LONGEST_SECONDS)
        try:
            await (Conversation if seed % 2 else Answers)(seed).have()
        except BaseException:
            print(f"seed {seed}")
            raise
        seed += 1
        if seed - first == 2000:
            settled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(0)
    return seed - first, settled


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first conversation")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    count, settled = asyncio.run(_go_on(options.seed, options.seconds))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - settled if settled else 0
    print(f"{count} conversations; grown by {grown} KiB since the first 2,000")
    sys.exit(grown > 20_000)


if __name__ == "__main__":
    main()
