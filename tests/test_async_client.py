"""The client for event loops, against a worker in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mii.async_client import AsyncMIIClient
from mii.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidArgument,
    Unavailable,
)
from mii.response import Response
from tests.serving import ServedWorker
from tests.test_client import GREEDY, Terminable, answer, texts


@pytest.fixture(scope="module")
def worker() -> Iterator[ServedWorker]:
    worker = ServedWorker()
    yield worker
    worker.close()


@pytest.fixture
def gated() -> Iterator[ServedWorker]:
    """A worker whose engine computes a step only when it may."""
    worker = ServedWorker(gated=True)
    yield worker
    worker.close()


@pytest.fixture
async def client(worker: ServedWorker) -> AsyncIterator[AsyncMIIClient]:
    async with AsyncMIIClient(worker.address) as client:
        yield client


async def test_many_calls_at_once_each_get_their_own_answer(client: AsyncMIIClient) -> None:
    prompts = ["abcdefghijklmnop"[: 1 + index % 16] for index in range(50)]
    answers = await asyncio.gather(*(client([prompt, "z"], **GREEDY) for prompt in prompts))
    assert [texts(each) for each in answers] == [[answer(p), answer("z")] for p in prompts]


async def test_every_form_of_prompt_gives_its_answer(client: AsyncMIIClient) -> None:
    assert texts(await client.generate(prompt_token_ids=[97], **GREEDY)) == [answer("a")]
    chat = await client(messages=[{"role": "user", "content": "hi"}], **GREEDY)
    assert texts(chat) == [answer("user: hi\nassistant: ")]
    assert await client.tokenize("ab") == [97, 98]
    assert await client.detokenize([97, 98]) == "ab"


async def test_a_stream_joins_to_the_whole_answer(client: AsyncMIIClient) -> None:
    pieces = [piece async for piece in client.stream("abc", **GREEDY)]
    assert "".join(map(str, pieces)) == answer("abc")
    assert (pieces[-1].finish_reason, pieces[-1].generated_length) == ("length", 12)
    with pytest.raises(InvalidArgument, match="temperature"):
        client.stream("abc", temperature=-1)


async def test_a_streaming_function_may_be_a_coroutine_function(client: AsyncMIIClient) -> None:
    plain: list[Response] = []
    awaited: list[Response] = []

    async def take(responses: list[Response]) -> None:
        await asyncio.sleep(0)
        awaited.extend(responses)

    assert await client("abc", streaming_fn=plain.extend, **GREEDY) is None
    assert await client("abc", streaming_fn=take, **GREEDY) is None
    assert "".join(map(str, plain)) == "".join(map(str, awaited)) == answer("abc")


async def test_leaving_a_stream_ends_the_generation(gated: ServedWorker) -> None:
    async with AsyncMIIClient(gated.address) as client:
        async with contextlib.aclosing(client.stream("abc", temperature=0)) as stream:
            gated.model.gate.release()
            assert str(await anext(stream)) == answer("abc", 1)
        gated.model.open.set()
        await asyncio.to_thread(gated.until_idle)
    assert gated.stats().generated_tokens < 100  # of 253


@pytest.mark.parametrize("streams", [False, True])
async def test_a_task_that_is_cancelled_ends_the_generation(
    gated: ServedWorker, streams: bool
) -> None:
    pieces: list[Response] = []
    function = pieces.extend if streams else None
    async with AsyncMIIClient(gated.address) as client:
        task = asyncio.ensure_future(client("abc", streaming_fn=function, temperature=0))
        await asyncio.to_thread(gated.until_step, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gated.model.open.set()
        await asyncio.to_thread(gated.until_idle)
        assert texts(await client("abc", **GREEDY)) == [answer("abc")]
    assert gated.stats().generated_tokens < 100


async def test_a_deadline_ends_the_call(gated: ServedWorker) -> None:
    async with AsyncMIIClient(gated.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client("abc", timeout=0.2, **GREEDY)
        gated.model.open.set()
        await asyncio.to_thread(gated.until_idle)


async def test_errors_arrive_as_what_they_are(client: AsyncMIIClient) -> None:
    with pytest.raises(ContextLengthExceeded):
        await client("x" * 256)
    with pytest.raises(ContextLengthExceeded):
        async for _ in client.stream("x" * 256):
            pass
    with pytest.raises(InvalidArgument, match="ids = 9999"):
        await client.detokenize([9999])


async def test_closing_ends_calls_under_way_and_a_further_call_connects_again(
    gated: ServedWorker,
) -> None:
    client = AsyncMIIClient(gated.address)
    call = asyncio.ensure_future(client("abc", **GREEDY))
    await asyncio.to_thread(gated.until_step, 1)
    await client.close()
    with pytest.raises(Cancelled, match="closed"):
        await call
    gated.model.open.set()
    assert texts(await client("abc", **GREEDY)) == [answer("abc")]
    await client.close()


def test_every_loop_may_use_the_same_client(worker: ServedWorker) -> None:
    client = AsyncMIIClient(worker.address)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(texts(await client("abc", **GREEDY)))
        await client.close()

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(ask())
    assert answers == [[answer("abc")]] * 5


async def test_terminate_returns_when_nobody_listens_any_more() -> None:
    router = Terminable()
    client = AsyncMIIClient(router.address, deployment_name="acme")
    await client.terminate_server()
    await client.terminate_server()
    assert router.asked == 1
    with pytest.raises(Unavailable, match="has been terminated"):
        await client("abc")
    await client.close()
    router.close()
