"""How step plans reach the other ranks of a replica: one socket pair from rank 0 to each.

A blocked read costs nothing while the replica is idle, and wakes within tens of microseconds.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from mii.errors import InternalError

_LENGTH = struct.Struct("<I")


class PlanSender:
    """Rank 0's ends."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = tuple(sockets)

    def send(self, plan: bytes) -> None:
        """Send one plan to every other rank.

        Raises:
            InternalError: if one of them is gone.
        """
        message = _LENGTH.pack(len(plan)) + plan
        for rank, link in enumerate(self._sockets, start=1):
            try:
                link.sendall(message)
            except OSError as error:
                raise InternalError(f"rank {rank} of this replica has died") from error

    def close(self) -> None:
        """Tell the other ranks that no plan will follow."""
        for link in self._sockets:
            link.close()


class PlanReceiver:
    """Another rank's end."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def receive(self) -> bytes | None:
        """Wait for the next plan; None when rank 0 has closed its end or is gone."""
        header = self._receive_exactly(_LENGTH.size)
        if header is None:
            return None
        return self._receive_exactly(_LENGTH.unpack(header)[0])

    def close(self) -> None:
        """Close this end."""
        self._link.close()

    def _receive_exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._link.recv(count - len(parts))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
