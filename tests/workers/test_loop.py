"""The engine's loop behind gRPC: calls given up, slow readers, engines that fail or stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from mii.channel import channel_options
from mii.engine.generator import Delta
from mii.errors import Unavailable
from mii.proto.inference_pb2 import GenerateRequest, Prompt, SamplingParams
from mii.proto.inference_pb2_grpc import InferenceStub
from mii.workers.loop import EngineCall, Piece
from tests.fakes import continuation
from tests.serving import ServedWorker
from tests.workers.conftest import StartWorker


def asked(text: str, count: int, *, stream: bool = True, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        prompts=[Prompt(text=text)],
        sampling=SamplingParams(max_new_tokens=count, temperature=0, n=n),
        stream=stream,
    )


def token_ids(call: Any) -> list[int]:
    return [token for message in call for delta in message.deltas for token in delta.token_ids]


def cancel(call: Any, channel: grpc.Channel) -> None:
    call.cancel()


def disconnect(call: Any, channel: grpc.Channel) -> None:
    channel.close()


def let_it_pass(call: Any, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError):
        token_ids(call)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("give_up", "timeout"), [(cancel, None), (disconnect, None), (let_it_pass, 0.5)]
)
def test_a_call_that_is_given_up_is_gone_within_one_step(
    start_worker: StartWorker,
    give_up: Callable[[Any, grpc.Channel], None],
    timeout: float | None,
    stream: bool,
) -> None:
    worker = start_worker(gated=True)
    with grpc.insecure_channel(worker.address, channel_options()) as channel:
        call = InferenceStub(channel).Generate(
            asked("abcdef", 100, stream=stream, n=2), timeout=timeout
        )
        worker.model.gate.release()
        worker.until_step(2)
        assert worker.stats().free_blocks < worker.stats().total_blocks
        give_up(call, channel)
        while worker.stats().running:  # until the cancellation has come through
            worker.model.gate.release()
        worker.until_idle()
    assert worker.stats().steps < 100
    worker.model.open.set()
    call = worker.stub.Generate(asked("abc", 5))
    assert token_ids(call) == continuation(list(b"abc"), 5)


def test_a_call_given_up_leaves_the_others_alone(start_worker: StartWorker) -> None:
    worker = start_worker()
    kept = worker.stub.Generate(asked("abc", 200))
    dropped = worker.stub.Generate(asked("xyz", 200))
    next(dropped)
    dropped.cancel()
    assert token_ids(kept) == continuation(list(b"abc"), 200)
    worker.until_idle()


def test_a_call_given_up_before_its_turn_is_never_computed(start_worker: StartWorker) -> None:
    worker = start_worker(gated=True, max_sequences=1)
    first = worker.stub.Generate(asked("abc", 3))
    worker.until_step(1)
    waiting = worker.stub.Generate(asked("xyz" * 30, 3))
    assert not waiting.done()
    waiting.cancel()
    worker.model.open.set()
    assert len(token_ids(first)) == 3
    worker.until_idle()
    assert worker.stats().generated_tokens == 3


class Reader:
    """Takes pieces while it has room."""

    def __init__(self, call: EngineCall) -> None:
        self.room = True
        self.pieces: list[Piece] = []
        self.reading = asyncio.ensure_future(call.send_to(self.take, lambda: self.room))

    def take(self, pieces: list[Piece]) -> None:
        assert self.room
        self.pieces += pieces


async def reader_of(call: EngineCall) -> Reader:
    reader = Reader(call)
    await asyncio.sleep(0)
    return reader


async def test_what_waits_for_a_slow_reader_is_merged() -> None:
    call = EngineCall(2, least=1)
    reader = await reader_of(call)
    reader.room = False
    for step in range(1000):
        for index in range(2):
            call.deliver(index, delta(f"{step} ", step, "length" if step == 999 else None))
        call.pass_on()
    await asyncio.sleep(0)
    assert not reader.pieces and not reader.reading.done()
    reader.room = True
    call.pass_on()
    await reader.reading
    assert [piece.index for piece in reader.pieces] == [0, 1]
    for piece in reader.pieces:
        assert "".join(piece.texts) == "".join(f"{step} " for step in range(1000))
        assert piece.token_ids == list(range(1000))
        assert piece.finish_reason == "length"


async def test_what_a_step_gives_a_call_comes_together() -> None:
    call = EngineCall(3, least=1)
    call.deliver(0, delta("a", 1))
    call.deliver(1, delta("b", 2, "stop"))
    call.deliver(2, delta("c", 3))
    reader = await reader_of(call)
    assert sorted(piece.index for piece in reader.pieces) == [0, 1, 2]


async def test_whole_answers_come_only_when_they_have_ended() -> None:
    call = EngineCall(2, least=64)
    reader = await reader_of(call)
    call.deliver(0, delta("a", 1))
    call.deliver(1, delta("b", 2))
    call.pass_on()
    assert not reader.pieces
    call.deliver(1, delta("c", 3, "stop"))
    call.pass_on()
    (piece,) = reader.pieces
    assert (piece.index, piece.texts, piece.token_ids) == (1, ["b", "c"], [2, 3])
    assert call.running
    call.deliver(0, delta("d", 4, "stop"))
    call.pass_on()
    await reader.reading
    assert (reader.pieces[1].index, reader.pieces[1].token_ids) == (0, [1, 4])
    assert not call.running


async def test_what_came_before_an_error_is_not_lost() -> None:
    call = EngineCall(1, least=1)
    call.deliver(0, delta("a", 1))
    call.fail(Unavailable("gone"))
    reader = await reader_of(call)
    assert [piece.token_ids for piece in reader.pieces] == [[1]]
    with pytest.raises(Unavailable):
        await reader.reading


async def test_a_sink_that_fails_ends_its_call_with_its_error() -> None:
    call = EngineCall(1, least=1)

    def fail(pieces: list[Piece]) -> None:
        raise ZeroDivisionError

    sending = asyncio.ensure_future(call.send_to(fail, lambda: True))
    await asyncio.sleep(0)
    call.deliver(0, delta("a", 1))
    call.pass_on()
    with pytest.raises(ZeroDivisionError):
        await sending


def test_a_worker_without_memory_ends_so_that_another_one_can_answer(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(gated=True)
    running = worker.stub.Generate(asked("abc", 2))
    worker.until_step(1)

    def prepare(*arguments: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker.prompts, "prepare", prepare)
    for call in (worker.stub.Generate(asked("def", 2)), running):
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    worker.model.open.set()
    worker.engine_thread.join(10)
    assert "start new thread" in str(worker.error)


def delta(text: str, token: int, finish_reason: str | None = None) -> Delta:
    return Delta(0, text, (token,), (), finish_reason, None, None)


def test_an_engine_that_fails_tells_every_call_why(start_worker: StartWorker) -> None:
    worker = start_worker(gated=True)
    calls = [worker.stub.Generate(asked("abc", 9, stream=stream)) for stream in (True, False)]
    worker.until_step(1)
    worker.model.failure = ZeroDivisionError("the last straw")
    worker.model.open.set()
    worker.engine_thread.join(10)
    assert worker.error is worker.model.failure
    calls.append(worker.stub.Generate(asked("abc", 9)))
    for call in calls:
        with pytest.raises(grpc.RpcError):
            token_ids(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "ZeroDivisionError: the last straw" in call.details()


def test_a_worker_that_stops_ends_its_calls_as_unavailable(start_worker: StartWorker) -> None:
    worker = start_worker(gated=True)
    calls = [worker.stub.Generate(asked("abc", 9, stream=stream)) for stream in (True, False)]
    worker.until_step(1)
    worker.engine.stop()
    for call in calls:
        with pytest.raises(grpc.RpcError):
            token_ids(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopping" in call.details()
    worker.model.open.set()
    worker.engine_thread.join(10)
    assert worker.error is None


def test_an_idle_engine_sleeps(worker: ServedWorker) -> None:
    assert token_ids(worker.stub.Generate(asked("abc", 3)))
    worker.until_idle()
    steps, before = worker.stats().steps, time.process_time()
    time.sleep(0.3)
    assert worker.stats().steps == steps
    assert time.process_time() - before < 0.15  # a thread that does not sleep takes all of 0.3


def test_many_streams_at_once_on_few_blocks(start_worker: StartWorker) -> None:
    worker = start_worker(num_blocks=24, token_budget=12, max_sequences=6)
    prompts = [bytes([97 + i % 26] * (1 + i % 17)) for i in range(60)]
    calls = [worker.stub.Generate(asked(prompt.decode(), 5 + len(prompt))) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        assert token_ids(call) == continuation(list(prompt), 5 + len(prompt))
    worker.until_idle()
