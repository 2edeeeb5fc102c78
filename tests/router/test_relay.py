"""The relay over a transport without a network: orders of arrival that a network seldom gives."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii import control
from mii.errors import InternalError, Overloaded, SlowReader
from mii.proto.inference_pb2 import GenerateRequest, GenerateResponse, Prompt, SequenceDelta
from mii.router.balancer import RoundRobin
from mii.router.limits import RequestLimit
from mii.router.relay import Relay
from mii.router.replicas import Replicas

Piece = tuple[int, str, str]  # choice, text, finish reason


class ScriptedTransport:
    """A worker whose answer to the prompt "3" is the third script.

    A script's messages come each after a number of loop turns.
    """

    def __init__(self, scripts: list[Any]) -> None:
        self._scripts = scripts
        self.cancelled: set[int] = set()

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float | None,
        on_accepted: Callable[[], None],
        on_message: Callable[[bytes], None],
    ) -> None:
        prompt = int(request.prompts[0].text)
        on_accepted()
        try:
            for turns, pieces in self._scripts[prompt]:
                for _ in range(turns):
                    await asyncio.sleep(0)
                on_message(message_of(pieces).SerializeToString())
        except asyncio.CancelledError:
            self.cancelled.add(prompt)
            raise

    async def close(self) -> None:
        return None

    tokenize = detokenize = list_models = status = healthy = close


def message_of(pieces: list[Piece]) -> GenerateResponse:
    return GenerateResponse(
        deltas=[
            SequenceDelta(choice_index=choice, text=text, finish_reason=reason)
            for choice, text, reason in pieces
        ]
    )


def relay_of(scripts: list[Any], limit: int = 10) -> Relay:
    return relay_over(ScriptedTransport(scripts), limit)


def relay_over(transport: Any, limit: int = 10) -> Relay:
    replicas = Replicas(lambda address: transport, RoundRobin(), lambda: None)
    replicas.update([control.Replica(0, "a:1", True), control.Replica(1, "b:1", True)])
    return Relay(replicas, "m", RequestLimit(limit, 10**6))


def request_of(scripts: list[Any], **fields: Any) -> GenerateRequest:
    prompts = [Prompt(text=str(index)) for index in range(len(scripts))]
    return GenerateRequest(prompts=prompts, stream=True, **fields)


steps = st.lists(st.tuples(st.integers(0, 4), st.text("ab", max_size=3)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=1, max_size=6), st.integers(0, 5))
def test_each_answer_keeps_its_order_whatever_arrives_when(
    scripts: list[list[tuple[int, str]]], reader_turns: int
) -> None:
    async def run() -> None:
        whole = [
            [(turns, [(0, text, "")]) for turns, text in script] + [(0, [(0, ".", "stop")])]
            for script in scripts
        ]
        texts: dict[int, str] = defaultdict(str)
        async with relay_of(whole).generate(request_of(whole)) as generation:
            async for message in generation:
                for delta in message.deltas:
                    texts[delta.prompt_index] += delta.text
                for _ in range(reader_turns):
                    await asyncio.sleep(0)
        assert texts == {
            index: "".join(text for _, text in script) + "." for index, script in enumerate(scripts)
        }

    asyncio.run(run())


async def test_deltas_that_wait_for_the_client_are_merged() -> None:
    scripts = [[(0, [(0, "a", "")]), (0, [(0, "b", "stop")])]] * 10
    async with relay_of(scripts).generate(request_of(scripts)) as generation:
        await generation.accepted()
        for _ in range(20):
            await asyncio.sleep(0)
        sizes = [len(message.deltas) async for message in generation]
    assert sizes == [20]


async def test_merged_messages_stay_small_enough_for_any_client() -> None:
    text = "x" * 400_000
    scripts = [[(0, [(0, text, "stop")])]] * 10
    async with relay_of(scripts).generate(request_of(scripts)) as generation:
        for _ in range(20):
            await asyncio.sleep(0)
        sizes = [message.ByteSize() async for message in generation]
    assert sum(sizes) > 4_000_000 and max(sizes) <= 2**20


async def test_a_client_that_does_not_read_is_cut_off_by_name_and_its_work_cancelled() -> None:
    text = "x" * 100_000
    endless = [(1, [(0, text, "")])] * 100_000
    transport = ScriptedTransport([endless, endless])
    async with relay_over(transport).generate(request_of([0, 1])) as generation:
        for _ in range(500):
            await asyncio.sleep(0)
        with pytest.raises(SlowReader, match="unread"):
            async for _ in generation:
                pass
    assert transport.cancelled


async def test_an_answer_that_is_not_streamed_may_be_of_any_size() -> None:
    scripts = [[(0, [(0, "x" * 1_000_000, "stop")])]] * 10
    request = request_of(scripts)
    request.stream = False
    async with relay_of(scripts).generate(request) as generation:
        for _ in range(100):
            await asyncio.sleep(0)
        sizes = [message.ByteSize() async for message in generation]
    assert sum(sizes) > 10_000_000


class Client:
    """A sink with room for so many messages at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.texts: list[str] = []

    @property
    def writable(self) -> bool:
        return self.room > 0

    def send(self, body: bytes) -> None:
        assert self.room > 0
        self.room -= 1
        message = GenerateResponse.FromString(body)
        self.texts.append("".join(delta.text for delta in message.deltas))


async def test_a_sink_gets_all_in_order_and_nothing_while_it_has_no_room() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    script = [(1, [(0, letter, "")]) for letter in letters] + [(1, [(0, ".", "stop")])]
    client = Client(room=3)
    async with relay_of([script]).generate(request_of([script])) as generation:
        sent = asyncio.ensure_future(generation.send_to(client))
        for _ in range(200):
            await asyncio.sleep(0)
        assert client.texts == ["a", "b", "c"] and not sent.done()
        client.room = 1
        generation.pass_on()
        await sent
    assert client.texts == ["a", "b", "c", letters[3:] + "."]


async def test_what_came_before_an_error_is_told_before_it() -> None:
    scripts = [[(0, [(0, "a", "")]), (0, [(5, "?", "")])]]
    async with relay_of(scripts).generate(request_of(scripts)) as generation:
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await anext(generation)).deltas[0].text == "a"
        with pytest.raises(InternalError, match="choice 5"):
            await anext(generation)


async def test_an_error_cancels_the_other_prompts_even_if_the_client_does_not_read() -> None:
    endless = [(1, [(0, "a", "")])] * 100_000
    scripts = [endless, [(3, [(5, "?", "")])]]
    transport = ScriptedTransport(scripts)
    async with relay_over(transport).generate(request_of(scripts)):
        for _ in range(50):
            await asyncio.sleep(0)
        assert transport.cancelled == {0}


async def test_an_answer_that_goes_on_after_its_end_is_an_error() -> None:
    scripts = [[(0, [(0, "a", "stop")]), (0, [(0, "b", "")])]]
    async with relay_of(scripts).generate(request_of(scripts)) as generation:
        assert (await anext(generation)).deltas[0].finish_reason == "stop"
        with pytest.raises(InternalError, match="after the end"):
            await anext(generation)


async def test_requests_beyond_the_bound_are_refused_at_once_and_others_not_disturbed() -> None:
    scripts = [[(50, [(0, "a", "stop")])]]
    relay = relay_of(scripts, limit=1)
    async with relay.generate(request_of(scripts)) as generation:
        with pytest.raises(Overloaded) as caught:
            async with relay.generate(request_of(scripts)):
                raise AssertionError
        assert caught.value.retry_after
        assert (await anext(generation)).deltas[0].text == "a"
    async with relay.generate(request_of(scripts)):
        pass
