"""Answers that outlive the connection they were asked for on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mii.proto.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    PartialAnswer,
    Prompt,
    SamplingParams,
)
from mii.proto.worker_pb2 import HoldingRequest
from mii.proto.worker_pb2_grpc import WorkerStub
from mii.router.transport import Http2Transport
from mii.workers.orphans import Orphans, RecordedCall
from tests.fakes import continuation
from tests.serving import ServedWorker
from tests.workers.conftest import StartWorker

LENGTH = 200  # more than one message


def asked(text: str = "abc", *, attempt: int = 1, count: int = LENGTH, n: int = 1) -> Any:
    return GenerateRequest(
        request_id="r-1",
        prompts=[Prompt(text=text)],
        sampling=SamplingParams(max_new_tokens=count, temperature=0, n=n, seed=3),
        attempt=attempt,
    )


def answer(text: str = "abc", count: int = LENGTH) -> list[int]:
    return continuation(list(text.encode()), count)


def held_by(worker: ServedWorker) -> list[str]:
    return list(WorkerStub(worker.channel).Holding(HoldingRequest(request_ids=["r-1"])).request_ids)


class Asking:
    """A router's call, over a connection of its own."""

    def __init__(self, worker: ServedWorker, request: GenerateRequest) -> None:
        self.transport = Http2Transport(worker.address)
        self.messages: list[GenerateResponse] = []
        self.accepted = asyncio.Event()
        self.task = asyncio.create_task(
            self.transport.generate(request, 60, self.accepted.set, self._take)
        )

    def _take(self, body: bytes) -> None:
        self.messages.append(GenerateResponse.FromString(body))

    async def lose_connection(self) -> None:
        await self.transport.close()
        await asyncio.gather(self.task, return_exceptions=True)

    def tokens(self, choice: int = 0) -> list[int]:
        deltas = [delta for message in self.messages for delta in message.deltas]
        return [i for delta in deltas if delta.choice_index == choice for i in delta.token_ids]


Ask = Callable[[ServedWorker, GenerateRequest], Asking]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    calls: list[Asking] = []

    def begin(worker: ServedWorker, request: GenerateRequest) -> Asking:
        calls.append(Asking(worker, request))
        return calls[-1]

    yield begin
    for call in calls:
        await call.lose_connection()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.002)


def compute(worker: ServedWorker, steps: int) -> None:
    """Let the gated engine come to the end of so many more steps."""
    before = worker.model.begun
    for _ in range(steps):
        worker.model.gate.release()
    worker.until_step(before + steps)


async def test_a_call_whose_connection_is_lost_goes_on_and_is_generated_once(
    start_worker: StartWorker, ask: Ask
) -> None:
    worker = start_worker(gated=True)
    first = ask(worker, asked())
    await first.accepted.wait()
    await asyncio.to_thread(compute, worker, 100)
    assert first.tokens()  # some have come, and are lost with the router that had them
    await first.lose_connection()
    await until(lambda: held_by(worker) == ["r-1"])
    await asyncio.to_thread(compute, worker, 20)
    second = ask(worker, asked(attempt=2))
    await second.accepted.wait()
    worker.model.open.set()
    await second.task
    assert second.tokens() == answer()
    (last,) = second.messages[-1].deltas
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", LENGTH)
    assert worker.stats().generated_tokens == LENGTH
    worker.until_idle()


async def test_an_answer_that_ends_meanwhile_is_there_for_who_asks_again(
    start_worker: StartWorker, ask: Ask
) -> None:
    worker = start_worker(gated=True)
    first = ask(worker, asked(n=2))
    await first.accepted.wait()
    await first.lose_connection()
    await until(lambda: held_by(worker) == ["r-1"])
    worker.model.open.set()
    await asyncio.to_thread(worker.until_idle)
    request = asked(attempt=2, n=2)
    request.resume.append(PartialAnswer(choice_index=1))  # the other one has come
    second = ask(worker, request)
    await second.task
    assert second.tokens(1) == answer() and not second.tokens(0)
    assert worker.stats().generated_tokens == 2 * LENGTH


async def test_an_answer_that_was_sent_in_vain_is_not_generated_again(
    worker: ServedWorker, ask: Ask
) -> None:
    before = worker.stats().generated_tokens
    await ask(worker, asked()).task
    again = ask(worker, asked(attempt=2))
    await again.task
    assert again.tokens() == answer()
    assert worker.stats().generated_tokens - before == LENGTH


@pytest.mark.parametrize("kind", ["cancelled", "streamed", "of a client that does not come back"])
async def test_what_nobody_will_ask_for_ends_at_once(
    kind: str, start_worker: StartWorker, ask: Ask
) -> None:
    worker = start_worker(gated=True)
    request = asked(attempt=0 if kind.startswith("of") else 1)
    request.stream = kind == "streamed"
    call = ask(worker, request)
    await call.accepted.wait()
    if kind == "cancelled":
        call.task.cancel()
    else:
        await call.lose_connection()

    def is_idle() -> bool:
        worker.model.gate.release()  # between two steps the engine hears of it
        return worker.stats().running == 0

    await until(is_idle)
    assert not held_by(worker) and worker.stats().generated_tokens < LENGTH


@pytest.mark.parametrize("other", [asked("abd", attempt=2), asked(count=7, attempt=2), asked()])
async def test_another_request_of_that_id_gets_its_own_answer(
    other: GenerateRequest, start_worker: StartWorker, ask: Ask
) -> None:
    worker = start_worker(gated=True)
    first = ask(worker, asked())
    await first.accepted.wait()
    await first.lose_connection()
    await until(lambda: held_by(worker) == ["r-1"])
    second = ask(worker, other)
    worker.model.open.set()
    await second.task
    assert second.tokens() == answer(other.prompts[0].text, other.sampling.max_new_tokens)
    assert not first.tokens()
    await asyncio.to_thread(worker.until_idle)


class IdleEngine:
    """Remembers what was released."""

    def __init__(self) -> None:
        self.released: list[Any] = []

    def release(self, call: Any) -> None:
        self.released.append(call)


class EndedCall:
    """An engine's call that has nothing more to say."""

    running = False

    def redirect(self, sink: Any) -> None:
        return None


def ended(request_id: str, text: str = "abc") -> RecordedCall:
    request = asked(text)
    request.request_id = request_id
    call = RecordedCall(request, EndedCall(), lambda pieces: GenerateResponse())  # type: ignore[arg-type]
    call.message_of([])
    return call


async def test_what_is_kept_is_bounded_in_time_and_bytes() -> None:
    engine: Any = IdleEngine()
    orphans = Orphans(engine, seconds=0.05, max_bytes=20_000)
    for number in range(30):
        orphans.keep(ended(f"r-{number}"))
    held = orphans.holding([f"r-{number}" for number in range(30)])
    assert "r-29" in held and "r-0" not in held and 5 < len(held) < 20
    orphans.keep(ended("large", "x" * 20_000))
    assert not orphans.holding(["large", "r-29"])
    orphans.keep(ended("r-31"))
    await until(lambda: not orphans.holding(["r-31"]))
    assert len(engine.released) == 32
