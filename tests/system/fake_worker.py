"""A worker without a model, for tests of process life: it does what the "model" tells it to.

`config.engine.model_path` is JSON: {"replica.rank": "what to do", ...}; others just serve.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

from mii.control import ControlChannel, Failed, Message, Progress, Ready, Start, Stop
from mii.errors import ModelError
from mii.pulse import Pulse


def main() -> None:
    channel = ControlChannel.from_arguments(sys.argv[1:])
    start = channel.receive_start()
    behaviour = json.loads(start.config.engine.model_path).get(f"{start.replica}.{start.rank}")
    stopped = threading.Event()
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())

    def on_message(message: Message) -> None:
        if isinstance(message, Stop) and behaviour != "stubborn":
            stopped.set()

    channel.listen(on_message)
    channel.send(Progress("reading weights", 0.5))
    if behaviour and behaviour.startswith("fail once there is "):
        behaviour = "fail" if os.path.exists(behaviour.rpartition(" ")[2]) else None
    if behaviour and behaviour.startswith("wait until there is "):
        while not os.path.exists(behaviour.rpartition(" ")[2]) and not stopped.wait(0.02):
            pass
    match behaviour:
        case "fail":
            channel.send(Failed.of(ModelError("shard 3 is corrupt")))
            sys.exit(1)
        case "fail unforeseen":
            channel.send(Failed.of(ZeroDivisionError("division by zero")))
            time.sleep(60)
        case "raise":
            raise RuntimeError("the very last words")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            stopped.wait(60)
            sys.exit(0)
        case "hold the lock":
            channel.send(Progress("holding the lock"))
            sum(range(10**12))  # in C, without ever letting another thread run
    if start.plan_fds:
        check_links(start)
    with listen(start.preferred_port) as server:
        channel.send(Ready(server.getsockname()[1]))
        assert start.pulse_fd is not None
        pulse = Pulse(start.pulse_fd)
        while not stopped.wait(0.02) or behaviour == "stubborn":
            pulse.tick()


def check_links(start: Start) -> None:
    """See that rank 0 can say something to each rank, and that all have the same memory."""
    assert start.shared_memory_fd is not None
    links = [socket.socket(fileno=descriptor) for descriptor in start.plan_fds]
    if start.rank == 0:
        os.pwrite(start.shared_memory_fd, b"written by rank 0", 1 << 20)
        for rank, link in enumerate(links, start=1):
            link.sendall(bytes([rank]))
            assert link.recv(1) == bytes([rank])
    else:
        rank_told = links[0].recv(1)
        assert rank_told == bytes([start.rank])
        assert os.pread(start.shared_memory_fd, 17, 1 << 20) == b"written by rank 0"
        links[0].sendall(rank_told)


def listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


if __name__ == "__main__":
    main()
