"""How the OpenAI API's two routes answer: whole or as a stream, in a shape that the route gives."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

from aiohttp import web

from mii.proto.inference_pb2 import GenerateResponse, SequenceDelta, Usage
from mii.router.gateway.body import json_response
from mii.router.gateway.events import event_stream
from mii.router.gateway.fields import Asked
from mii.router.relay import Generation, Relay
from mii.router.routing_headers import SESSION_KEY, explanation, session_of, timeout_of


class Shape(Protocol):
    """A route's way to write choices. `index` counts all choices of the request."""

    prefix: str  # of ids
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the choices that begin a stream, before any text."""

    def pieces(self, index: int, delta: SequenceDelta) -> list[dict[str, Any]]:
        """Return the choices of a stream's chunks for `delta`."""

    def whole(self, index: int, delta: SequenceDelta) -> dict[str, Any]:
        """Return the choice for a whole answer."""


class UsageTotal:
    """Adds up the usage of a request's answers: a prompt counts once, however many its answers."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._completion_tokens = 0

    def add(self, delta: SequenceDelta) -> None:
        """Count an answer that has ended."""
        self._completion_tokens += delta.usage.completion_tokens
        first = self._prompts.setdefault(delta.prompt_index, delta.usage)
        if delta.usage.cached_tokens < first.cached_tokens:
            self._prompts[delta.prompt_index] = delta.usage

    def object(self) -> dict[str, Any]:
        """Return the API's `usage`."""
        prompt_tokens = sum(usage.prompt_tokens for usage in self._prompts.values())
        cached_tokens = sum(usage.cached_tokens for usage in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class Answer:
    """One request of the OpenAI API on its way back."""

    def __init__(self, asked: Asked, shape: Shape, model_name: str) -> None:
        self._asked = asked
        self._shape = shape
        self._usage = UsageTotal()
        self._head = {
            "id": shape.prefix + asked.request.request_id,
            "created": int(time.time()),
            "model": model_name,
        }

    def _index(self, delta: SequenceDelta) -> int:
        return delta.prompt_index * self._asked.choices + delta.choice_index

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the one object of an answer that is not streamed."""
        deltas: list[SequenceDelta] = []
        async for message in generation:
            for delta in message.deltas:
                self._usage.add(delta)
                deltas.append(delta)
        deltas.sort(key=self._index)
        if self._asked.returned is not None:
            deltas = _best(deltas, self._asked.returned)
        return {
            **self._head,
            "object": self._shape.whole_object,
            "choices": [self._shape.whole(index, delta) for index, delta in enumerate(deltas)],
            "usage": self._usage.object(),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return a stream's first chunks."""
        count = len(self._asked.request.prompts) * self._asked.choices
        return self._chunks(choice for i in range(count) for choice in self._shape.opening(i))

    def chunks(self, message: GenerateResponse) -> list[dict[str, Any]]:
        """Return a stream's next chunks."""
        chunks = []
        for delta in message.deltas:
            if delta.finish_reason:
                self._usage.add(delta)
            chunks += self._chunks(self._shape.pieces(self._index(delta), delta))
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """Return a stream's last chunk, if it is to tell the usage."""
        if not self._asked.include_usage:
            return []
        usage = self._usage.object()
        return [{**self._head, "object": self._shape.chunk_object, "choices": [], "usage": usage}]

    def _chunks(self, choices: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        usage = {"usage": None} if self._asked.include_usage else {}
        head = {**self._head, "object": self._shape.chunk_object, **usage}
        return [{**head, "choices": [choice]} for choice in choices]


def _best(deltas: Sequence[SequenceDelta], count: int) -> list[SequenceDelta]:
    """Return so many answers to each prompt: the most probable ones by token, best first."""

    def goodness(delta: SequenceDelta) -> float:
        logprobs = [token.sampled.logprob for token in delta.logprobs]
        return sum(logprobs) / max(1, len(logprobs))

    best = []
    for _, answers in groupby(deltas, key=lambda delta: delta.prompt_index):
        best += sorted(answers, key=goodness, reverse=True)[:count]
    return best


async def respond(
    web_request: web.Request, relay: Relay, asked: Asked, shape: Shape
) -> web.StreamResponse:
    """Answer a request. Every error that can be known before the first byte comes as a status."""
    answer = Answer(asked, shape, relay.model_name)
    session = session_of(web_request.headers.get(SESSION_KEY, ""))
    timeout = timeout_of(web_request.headers)
    async with relay.generate(asked.request, timeout, session) as generation:
        if not asked.request.stream:
            whole = await answer.whole(generation)
            told = explanation(web_request.headers, generation.routes)
            return json_response(whole, headers={**asked.headers, **told})
        await generation.accepted()
        request_id = asked.request.request_id
        headers = {**asked.headers, **explanation(web_request.headers, generation.routes)}
        async with event_stream(web_request, request_id, headers) as stream:
            await stream.send(answer.opening())
            async for message in generation:
                await stream.send(answer.chunks(message))
            await stream.send(answer.closing())
        return stream.response
