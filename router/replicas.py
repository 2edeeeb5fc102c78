"""The replicas that the router knows, and which of them can answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from mii import control
from mii.errors import DeadlineExceeded, MIIError, ServiceError, Unavailable
from mii.proto.inference_pb2 import Prompt
from mii.router.balancer import Choice, Policy, ReplicaLoad, stick_to_session
from mii.router.transport import WorkerTransport

_PROBE_TIMEOUT: Final = 2.0  # seconds
_HOLDING_TIMEOUT: Final = 1.0  # seconds
_AUTOPSY_SECONDS: Final = 1.0  # that the supervisor has to say what a dead replica was computing
_PATIENCE: Final = 60.0  # seconds that a prompt waits for a replica that is to come back
_PROBE_PAUSES: Final = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between probes; the last one repeats

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """One replica as the router sees it."""

    number: int
    address: str
    transport: WorkerTransport
    down: str = ""  # why no prompt may be sent to it; "" if one may
    death: asyncio.Future[control.Died] = field(  # what is known of it, when it has died
        default_factory=lambda: asyncio.get_running_loop().create_future(), repr=False
    )
    outstanding: int = 0  # prompts sent and not answered yet
    tokens: float = 0.0  # of them and of what is still to come of their answers, estimated
    probe: asyncio.Task[None] | None = field(default=None, repr=False)

    @contextmanager
    def answering(self, tokens: float) -> Iterator[Answering]:
        """Count one prompt for as long as the block runs.

        Args:
            tokens: of it and of what is still to come of its answers, estimated.
        """
        answering = Answering(self, tokens)
        self.outstanding += 1
        self.tokens += tokens
        try:
            yield answering
        finally:
            self.outstanding -= 1
            self.tokens -= answering.tokens


@dataclass
class Answering:
    """One prompt that a replica is answering."""

    replica: Replica
    tokens: float  # still to be computed of it, estimated

    def computed(self, tokens: float) -> None:
        """Note that so many of them have been computed."""
        self.tokens -= tokens
        self.replica.tokens -= tokens


class Replicas:
    """The set of replicas. Belongs to one event loop."""

    def __init__(
        self,
        connect: Callable[[str], WorkerTransport],
        policy: Policy,
        on_change: Callable[[], None],
        patience: float = _PATIENCE,
        weights: Sequence[float] = (),
    ) -> None:
        """Begin with no replica.

        Args:
            connect: makes the way to the worker at an address.
            policy: chooses among the replicas that can answer.
            on_change: called each time that `serving` may have changed.
            patience: seconds that a prompt waits for a replica that is to come back.
            weights: of the replicas by number, how much of the work each gets; others have 1.
        """
        self._weights = dict(enumerate(weights))
        self._connect = connect
        self._policy = policy
        self._tell_change = on_change
        self._patience = patience
        self._change = asyncio.Event()  # a new one for each change
        self._replicas: dict[int, Replica] = {}
        self._told: tuple[control.Replica, ...] = ()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> bool:
        """Whether any replica can answer."""
        return any(not replica.down for replica in self._replicas.values())

    @property
    def told(self) -> tuple[control.Replica, ...]:
        """What the supervisor has said of all replicas."""
        return self._told

    def all(self) -> list[Replica]:
        """Return those that the supervisor calls ready, by number."""
        return list(self._replicas.values())

    async def changed(self) -> None:
        """Return when something has changed."""
        await self._change.wait()

    def update(self, told: Sequence[control.Replica]) -> None:
        """Take the supervisor's word: connect what became ready, drop what is not any more."""
        self._told = tuple(told)
        ready = {info.replica: info for info in told if info.ready}
        for number, replica in list(self._replicas.items()):
            if number not in ready or ready[number].address != replica.address:
                self._drop(self._replicas.pop(number))
        for number in sorted(ready.keys() - self._replicas.keys()):
            address = ready[number].address
            self._replicas[number] = Replica(number, address, self._connect(address))
        self._replicas = dict(sorted(self._replicas.items()))
        self._on_change()

    def died(self, told: control.Died) -> None:
        """Take the supervisor's word on what a replica was computing when it died."""
        replica = self._replicas.get(told.replica)
        known = replica is not None and replica.address == told.address
        if replica is not None and known and not replica.death.done():
            replica.death.set_result(told)

    async def blame(self, replica: Replica, request_id: str) -> float:
        """Return how likely it is a request's fault that a replica is gone.

        0: it was not computing the request; 0.5: it was, but was killed from outside; 1: it was,
        and failed, or nobody knows.
        """
        try:
            death = await asyncio.wait_for(asyncio.shield(replica.death), _AUTOPSY_SECONDS)
        except TimeoutError:
            return 1.0
        if request_id not in death.computing:
            return 0.0
        return 1.0 if death.by_itself else 0.5

    async def holders(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Return by request id which replicas have answers of requests that are sent again."""

        async def ask(replica: Replica) -> Sequence[str]:
            try:
                return await replica.transport.holding(request_ids, _HOLDING_TIMEOUT)
            except MIIError:
                return ()

        asked = self._up() if self.serving else []
        answers = await asyncio.gather(*map(ask, asked))
        return {
            held: replica.number
            for replica, answer in zip(asked, answers, strict=True)
            for held in answer
        }

    async def pick(
        self, prompt: Prompt, session: str, deadline: float | None, holder: int | None = None
    ) -> tuple[Replica, Choice]:
        """Return the replica that is to answer `prompt`, once there is one, and why that one.

        Args:
            prompt: for policies that look at it.
            session: whose requests all go to one replica while it is there; "": of none.
            deadline: on the event loop's clock, when nobody waits for an answer any more.
            holder: the replica that has the answer, or is at it; None: there is none.

        Raises:
            Unavailable: if none can; at once, unless one that could is to come back.
            DeadlineExceeded: if none comes back in time.
        """
        patience = asyncio.get_running_loop().time() + self._patience
        while self._returning and not self.serving:
            if deadline is not None and deadline <= patience:
                await self._next_change(deadline, DeadlineExceeded)
            else:
                await self._next_change(patience, Unavailable)
        loads = [
            ReplicaLoad(
                replica.number,
                replica.outstanding,
                replica.tokens,
                self._weights.get(replica.number, 1.0),
            )
            for replica in self._up()
        ]
        policy = self._policy
        if holder is not None and any(load.number == holder for load in loads):
            choice = Choice(holder, "it has the answer")
        else:
            choice = stick_to_session(loads, session) if session else policy.choose(loads, prompt)
        return self._replicas[choice.number], choice

    @property
    def _returning(self) -> bool:
        """Whether a replica that could answer is to do so again."""
        return any(info.returning or info.ready for info in self._told)

    async def _next_change(self, until: float, kind: type[ServiceError]) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._change.wait()
        except TimeoutError:
            raise kind(f"{self._why_none()}; none has come back in time") from None

    def _on_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        self._tell_change()

    def any(self) -> Replica:
        """Return the least busy replica, for a question that any of them answers alike.

        Raises:
            Unavailable: at once, if none can.
        """
        return min(self._up(), key=lambda replica: replica.outstanding)

    def mark_down(self, replica: Replica, why: str) -> None:
        """Send `replica` nothing until its health check says SERVING."""
        if replica.down or self._replicas.get(replica.number) is not replica:
            return
        _logger.warning("replica %d at %s is down: %s", replica.number, replica.address, why)
        replica.down = why
        replica.probe = asyncio.create_task(self._probe(replica))
        self._on_change()

    def part(self) -> None:
        """Give up the connections: calls under way are not cancelled, so that workers keep what is
        not streamed for the next router."""
        for replica in self._replicas.values():
            self._drop(replica)

    async def close(self) -> None:
        """Drop all replicas."""
        self.update(())
        await asyncio.gather(*self._closing)

    async def _probe(self, replica: Replica) -> None:
        pauses = iter(_PROBE_PAUSES)
        pause = next(pauses)
        while not await replica.transport.healthy(_PROBE_TIMEOUT):
            await asyncio.sleep(pause)
            pause = next(pauses, pause)
        _logger.info("replica %d at %s is serving again", replica.number, replica.address)
        replica.down = ""
        self._on_change()

    def _drop(self, replica: Replica) -> None:
        replica.down = "it has left the deployment"
        if replica.probe is not None:
            replica.probe.cancel()
        task = asyncio.create_task(replica.transport.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _up(self) -> list[Replica]:
        up = [replica for replica in self._replicas.values() if not replica.down]
        if not up:
            raise Unavailable(self._why_none())
        return up

    def _why_none(self) -> str:
        if not self._told:
            return "no replica is ready yet: the deployment is starting"
        reasons = []
        for info in self._told:
            replica = self._replicas.get(info.replica)
            reasons.append(f"replica {info.replica} {_state(info, replica)}")
        return f"no replica can answer: {'; '.join(reasons)}"


def _state(info: control.Replica, replica: Replica | None) -> str:
    if not info.ready or replica is None:
        state = "is being started again" if info.returning else "is not ready"
        return f"{state} ({info.words})" if info.words else state
    return f"at {replica.address} is down ({replica.down})"
