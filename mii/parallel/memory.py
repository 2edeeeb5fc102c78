"""Memory that the ranks of one host share, and the semaphores that order access to it.

No torch here: the supervisor, which creates the memory, does without.

    | semaphores: one for each (from, to) | slot 0 of rank 0 | slot 0 of rank 1 | ... | slot 1 ... |
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable

from mii.errors import InternalError

SLOT_BYTES = 4 << 20  # of one rank; larger tensors travel in pieces
NUM_SLOTS = 2  # so that a rank may write while a slower one still reads what came before
_SEMAPHORE_BYTES = 64  # a cache line each; sem_t is 32 bytes with glibc
_SPINS = 64  # about 20 us: what a peer on another core is usually behind
_NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this system has memory without a name, and semaphores for processes to share."""
    return sys.platform == "linux"


def _header_bytes(size: int) -> int:
    return -(-size * size * _SEMAPHORE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def shared_memory_bytes(size: int) -> int:
    """Return the length of the memory that `size` ranks share."""
    return _header_bytes(size) + NUM_SLOTS * size * SLOT_BYTES


def create_shared_memory(size: int) -> int:
    """Return a file descriptor of new shared memory for `size` ranks.

    The memory has no name: it is gone when the last process that inherited the descriptor is.
    """
    descriptor = os.memfd_create("mii-ranks")  # not in /dev/shm, which containers keep small
    os.ftruncate(descriptor, shared_memory_bytes(size))
    Semaphores(map_shared_memory(descriptor, size), size).initialise()
    return descriptor


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map what `create_shared_memory` made, in another process."""
    return mmap.mmap(descriptor, shared_memory_bytes(size))


def slot_offset(slot: int, rank: int, size: int) -> int:
    """Return where a rank's slot begins in the memory."""
    return _header_bytes(size) + (slot * size + rank) * SLOT_BYTES


class Semaphores:
    """POSIX semaphores in shared memory, one for each ordered pair of ranks.

    Posting and waiting also order memory: what a rank wrote before it posted is seen by the rank
    that waited, on every processor (POSIX, Base Definitions 4.15).
    """

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self._memory = memory
        self._size = size
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        blocking = ctypes.CDLL(None, use_errno=True)  # gives up the GIL while it waits
        quick = ctypes.PyDLL(None, use_errno=True)  # keeps it: the call is shorter than a switch
        self._init, self._timed_wait = blocking.sem_init, blocking.sem_timedwait
        self._post, self._try_wait = quick.sem_post, quick.sem_trywait
        for function in (self._init, self._timed_wait, self._post, self._try_wait):
            function.argtypes = [ctypes.c_void_p]
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._timed_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]

    def initialise(self) -> None:
        """Set every semaphore to 0. Once, before any rank uses them."""
        for index in range(self._size * self._size):
            if self._init(self._address + index * _SEMAPHORE_BYTES, 1, 0) != 0:
                raise InternalError(f"sem_init: {os.strerror(ctypes.get_errno())}")

    def post(self, source: int, target: int) -> None:
        """Let rank `target` go on past one wait for rank `source`."""
        self._post(self._place(source, target))

    def wait(self, source: int, target: int, peers_alive: Callable[[], bool]) -> None:
        """Wait until rank `source` has posted for rank `target`.

        Raises:
            InternalError: if a peer has died meanwhile.
        """
        place = self._place(source, target)
        for _ in range(_SPINS):
            if self._try_wait(place) == 0:
                return
        while self._wait_one_second(place) != 0:
            if not peers_alive():
                raise InternalError(f"rank {source} of this replica has died")

    def _wait_one_second(self, place: int) -> int:
        until = time.time_ns() + _NANOSECONDS  # CLOCK_REALTIME, as sem_timedwait wants
        deadline = _Timespec(until // _NANOSECONDS, until % _NANOSECONDS)
        result: int = self._timed_wait(place, ctypes.byref(deadline))
        return result

    def _place(self, source: int, target: int) -> int:
        return self._address + (source * self._size + target) * _SEMAPHORE_BYTES
