"""The process of one rank of a replica: `python -P -m mii.workers.main --control-fd N`.

The main thread is the engine's; gRPC has an event loop in another one, and a third waits for
SIGTERM, which is thus heard also while the engine computes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

from mii import logs, traces
from mii.control import ControlChannel, Failed, Message, Progress, Ready, Start, Stop
from mii.errors import MIIError

_STOP_GRACE: Final = 1.0  # seconds for calls under way to hear why they end
_STOP_SECONDS: Final = 2.5  # until the process ends in any case, of the three that a Stop allows

_logger = logging.getLogger("mii.workers")


class Ending:
    """What SIGTERM and Stop set in motion: once, from any thread, and bounded in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._action: Callable[[], None] | None = None

    def call(self, action: Callable[[], None]) -> None:
        """Have `action` called when the end begins. Until then it would end the process at once."""
        with self._lock:
            self._action = action

    def begin(self) -> None:
        """Begin the end."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
            action = self._action
        if action is None:  # still loading: there is nothing to end in an orderly way
            os._exit(0)
        try:
            self.arm()
            action()
        except (RuntimeError, MemoryError):  # no memory, not even for a thread
            os._exit(1)

    def arm(self) -> None:
        """End the process in a while, whatever it is doing then."""
        timer = threading.Timer(_STOP_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()

    def on_message(self, message: Message) -> None:
        """Take a message of the control channel."""
        if isinstance(message, Stop):
            self.begin()

    def wait_for_signal(self) -> None:
        """Begin the end at SIGTERM."""
        signal.sigwait([signal.SIGTERM])
        self.begin()


def serve(start: Start, channel: ControlChannel, ending: Ending) -> None:
    """Load the model and serve rank 0 until the end has begun.

    Raises:
        Exception: why it cannot be loaded, or why the engine has failed.
    """
    from mii.engine.build import build_generator  # torch
    from mii.workers.loop import EngineLoop
    from mii.workers.ranks import WorkerStatus, engine_counters, pulse_of, rank_of
    from mii.workers.server import LoopThread, WorkerServer
    from mii.workers.servicer import Servicer

    config = start.config.engine
    generator = build_generator(config, rank_of(start), _progress(channel))
    pulse = pulse_of(start)
    thread = LoopThread(pulse.tick)
    engine = EngineLoop(generator, thread.loop, pulse)

    async def make_server() -> WorkerServer:
        return WorkerServer(
            WorkerStatus(start, lambda: engine_counters(generator.stats())),
            Servicer(engine, generator.prompts, config),
            start.config.token,
        )

    server = thread.do(make_server())
    port = thread.do(server.start(start.preferred_port))
    ending.call(engine.stop)
    channel.send(Ready(port))
    _logger.info("serving on port %d", port)
    try:
        engine.run()
    finally:
        thread.do(server.stop(_STOP_GRACE))
        generator.close()


def follow(start: Start, channel: ControlChannel, ending: Ending) -> None:
    """Load a share of the model and compute what rank 0 says, until rank 0 ends.

    Raises:
        Exception: why it cannot be loaded, or why it cannot go on.
    """
    from mii.engine.build import FollowerStats, run_follower  # torch
    from mii.proto.worker_pb2 import StatusResponse
    from mii.workers.ranks import WorkerStatus, pulse_of, rank_of
    from mii.workers.server import LoopThread, WorkerServer

    thread = LoopThread(pulse_of(start).tick)
    stats = FollowerStats()

    async def make_server() -> WorkerServer:
        status = WorkerStatus(start, lambda: StatusResponse(steps=stats.steps))
        return WorkerServer(status, token=start.config.token)

    server = thread.do(make_server())

    def on_ready(counters: FollowerStats) -> None:
        nonlocal stats
        stats = counters
        port = thread.do(server.start(start.preferred_port))
        ending.call(lambda: None)  # rank 0, which has heard of it too, may still need this rank
        channel.send(Ready(port))
        _logger.info("serving on port %d", port)

    run_follower(start.config.engine, rank_of(start), _progress(channel), on_ready)


def _progress(channel: ControlChannel) -> Callable[[str, float | None], None]:
    return lambda what, fraction: channel.send(Progress(what, fraction))


def main() -> None:
    """Run the process."""
    # Ctrl-C in a terminal reaches every process of its group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before there is any thread, so that every one inherits it and `wait_for_signal` gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    channel = ControlChannel.from_arguments(sys.argv[1:])
    start = channel.receive_start()
    logs.set_up(f"worker {start.replica}.{start.rank}", start.config)
    traces.set_up(f"worker {start.replica}.{start.rank}", start.config.deployment_name)
    ending = Ending()
    channel.listen(ending.on_message)
    threading.Thread(target=ending.wait_for_signal, name="signals", daemon=True).start()
    try:
        channel.send(Progress("loading PyTorch"))
        (serve if start.rank == 0 else follow)(start, channel, ending)
    except BaseException as error:
        foreseen = isinstance(error, MIIError)
        _logger.critical(
            "this worker cannot go on: %s", error, exc_info=None if foreseen else error
        )
        channel.send(Failed.of(error))
        _exit(1)
    _logger.info("stopped")
    _exit(0)


def _exit(status: int) -> None:
    """End the process; threads of libraries, which may be in the middle of anything, go with it."""
    traces.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
