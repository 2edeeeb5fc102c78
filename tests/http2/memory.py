"""A transport without a network, for tests that look at every byte and every turn of the loop."""

from __future__ import annotations

import asyncio


class MemoryTransport(asyncio.Transport):
    """Keeps what is written.

    Its buffer never fills by itself; tests call the protocol's `pause_writing`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.paused = False
        self.written = bytearray()

    def take(self) -> bytes:
        """Return what has been written since the last time."""
        taken = bytes(self.written)
        self.written.clear()
        return taken

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


async def turns(count: int = 3) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


async def deliver(data: bytes, protocol: asyncio.Protocol, transport: MemoryTransport) -> None:
    """Give a protocol bytes to read, and wait until it reads on."""
    protocol.data_received(data)
    while transport.paused and not transport.closed:
        await asyncio.sleep(0)
