"""The control channel between a process and the one that started it.

A child inherits one end of a UNIX socket pair, whose number stands in its arguments
(`--control-fd N`), and the two speak JSON, a line for a message: `{"event": "...", ...}`. Every
message is one of the frozen dataclasses below; `event` is its wire name.

    parent -> child   Start      the first line: what to run, and as what
                      Replicas   (to the router) where to send requests now
                      Died       (to the router) what a replica was computing when it died
                      OperationEnded  (to the router) an operation has ended
                      Detach     (to the supervisor) live on without me
                      Stop       end in an orderly way; SIGTERM means the same
    child -> parent   Progress   what a start is busy with
                      Ready      serving, on this port
                      Failed     the last words of a child that cannot go on
                      Terminate  (from the router) a client asked for the deployment's end
                      Operation  (from the router) an operator asked for a restart, or to scale

The end of the stream means that the other side is gone. A child then exits at once, whatever it
is doing, so that nothing outlives a killed parent:

    channel = ControlChannel.from_arguments(sys.argv[1:])
    start = channel.receive_start()
    channel.listen(on_message)  # in a daemon thread; exits the process at the end of the stream
    ...
    channel.send(Ready(port=50051))
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from mii.config import DeploymentConfig
from mii.errors import ERRORS_BY_CODE, DeploymentError, InternalError, MIIError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """What the child is, and all it needs for that. Numbers of descriptors are inherited ones."""

    event: ClassVar[str] = "start"
    config: DeploymentConfig  # with the plan applied: threads, blocks and budgets stand in .engine
    role: Literal["supervisor", "router", "worker"]
    replica: int = 0
    rank: int = 0  # tensor-parallel rank within the replica
    preferred_port: int = 0  # a worker takes it if it is free, else any; 0: any
    shared_memory_fd: int | None = None  # tensor parallel: made by mii.parallel.memory
    pulse_fd: int | None = None  # a worker's: made by mii.pulse
    plan_fds: tuple[int, ...] = ()  # rank 0: a socket to each other rank; else: one, to rank 0
    parent_pid: int | None = None  # set if the kernel may kill the child with this parent


@dataclass(frozen=True)
class Replica:
    """One replica as the router sees it."""

    replica: int
    address: str  # host:port of its rank 0; "" while it has none
    ready: bool
    returning: bool = False  # it has been ready, has died and is started again
    dead: bool = False  # for good
    words: str = ""  # why it has died, if it has
    busy_with: str = ""  # what a start is at


@dataclass(frozen=True)
class Replicas:
    """All replicas: starting, ready, to be started again, or dead for good."""

    event: ClassVar[str] = "replicas"
    replicas: tuple[Replica, ...]


@dataclass(frozen=True)
class Died:
    """A replica has died."""

    event: ClassVar[str] = "died"
    replica: int
    address: str
    computing: tuple[str, ...]  # ids of the requests of the step that it never came to the end of
    by_itself: bool = True  # it failed; False: it was killed from outside


@dataclass(frozen=True)
class Operation:
    """An operator asks for a restart of all replicas, or for another number of them."""

    event: ClassVar[str] = "operation"
    number: int  # of the operation, for its end; the same if it is asked for again
    replicas: int | None = None  # wanted; None: restart those that there are


@dataclass(frozen=True)
class OperationEnded:
    """An operation has ended."""

    event: ClassVar[str] = "operation ended"
    number: int
    error: str = ""  # why it did not do what was asked; "" if it did


@dataclass(frozen=True)
class Detach:
    """The script that started the deployment goes its own way, and the deployment lives on."""

    event: ClassVar[str] = "detach"


@dataclass(frozen=True)
class Stop:
    """End in an orderly way, within three seconds."""

    event: ClassVar[str] = "stop"


@dataclass(frozen=True)
class Progress:
    """What a start is busy with."""

    event: ClassVar[str] = "progress"
    what: str  # such as "reading weights"
    fraction: float | None = None  # done of it, 0 to 1, if known


@dataclass(frozen=True)
class Ready:
    """The child serves. For the router: its ports are bound, replicas or not."""

    event: ClassVar[str] = "ready"
    port: int  # that gRPC listens on
    rest_port: int | None = None  # that the gateway listens on, if it does


@dataclass(frozen=True)
class Failed:
    """Why the child cannot go on. It exits after this."""

    event: ClassVar[str] = "failed"
    kind: str  # the `code` of an error in mii.errors
    message: str

    @staticmethod
    def of(error: BaseException) -> Failed:
        """Put an error into words; one that is not ours keeps its class's name."""
        if isinstance(error, MIIError):
            return Failed(error.code, str(error))
        return Failed(InternalError.code, f"{type(error).__name__}: {error}")

    def to_error(self) -> MIIError:
        """Return the error again. What nobody foresaw is a DeploymentError here."""
        kind = ERRORS_BY_CODE.get(self.kind, DeploymentError)
        return (DeploymentError if kind is InternalError else kind)(self.message)


@dataclass(frozen=True)
class Terminate:
    """A client of the router asked for the end of the deployment."""

    event: ClassVar[str] = "terminate"


Message = (
    Start
    | Replicas
    | Died
    | Operation
    | OperationEnded
    | Detach
    | Stop
    | Progress
    | Ready
    | Failed
    | Terminate
)

_KINDS: dict[str, type[Any]] = {
    kind.event: kind
    for kind in (
        Start,
        Replicas,
        Died,
        Operation,
        OperationEnded,
        Detach,
        Stop,
        Progress,
        Ready,
        Failed,
        Terminate,
    )
}


def encode(message: Message) -> bytes:
    """Return a message as its line."""
    return json.dumps({"event": message.event, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of a line.

    Raises:
        InternalError: if the line is no message.
    """
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("event")]
        if kind is Start:
            values["config"] = DeploymentConfig.from_json(json.dumps(values["config"]))
            values["plan_fds"] = tuple(values.get("plan_fds", ()))
        if kind is Replicas:
            values["replicas"] = tuple(Replica(**each) for each in values["replicas"])
        if kind is Died:
            values["computing"] = tuple(values["computing"])
        message: Message = kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InternalError(f"not a control message: {line[:200]!r}") from error
    return message


def exit_at_once() -> None:
    """End this process without any clean-up: the parent, for whom it worked, is gone."""
    os._exit(1)


class ControlChannel:
    """One end of a control channel. `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._send_lock = threading.Lock()

    @staticmethod
    def pair() -> tuple[ControlChannel, socket.socket]:
        """Return the parent's end, and the child's to be inherited and then closed here."""
        ours, theirs = socket.socketpair()
        return ControlChannel(ours), theirs

    @staticmethod
    def from_arguments(arguments: Sequence[str]) -> ControlChannel:
        """Return the inherited end that a child's command line names."""
        parser = argparse.ArgumentParser(description="A process of an mii deployment.")
        parser.add_argument("--control-fd", type=int, required=True)
        descriptor = parser.parse_args(arguments).control_fd
        os.set_inheritable(descriptor, False)
        return ControlChannel(socket.socket(fileno=descriptor))

    def send(self, message: Message) -> None:
        """Send a message. To a side that is gone it sends nothing: the stream's end tells that."""
        with self._send_lock:
            try:
                self._connection.sendall(encode(message))
            except OSError:
                return

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the stream."""
        try:
            line = self._lines.readline()
        except (OSError, ValueError):  # reset by the other side; closed by this one
            return None
        return decode(line) if line.endswith(b"\n") else None

    def messages(self) -> Iterator[Message]:
        """Iterate over messages until the end of the stream."""
        while (message := self.receive()) is not None:
            yield message

    def receive_start(self) -> Start:
        """Wait for a child's first message, and tie its life to the parent's where it says so."""
        message = self.receive()
        if message is None:
            exit_at_once()
        if not isinstance(message, Start):
            raise InternalError(f"the first control message is {message!r}, not Start")
        if message.parent_pid is not None:
            _die_with_parent(message.parent_pid)
        return message

    def listen(
        self,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None] = exit_at_once,
    ) -> threading.Thread:
        """Call back, in a new daemon thread, for every message and at the end of the stream."""

        def run() -> None:
            for message in self.messages():
                on_message(message)
            on_end()

        thread = threading.Thread(target=run, name="control channel", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close this end; a thread that waits in `receive` gets the end of the stream."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()  # it holds the socket open
        self._connection.close()


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent, even while a C call holds the GIL."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call
        exit_at_once()
