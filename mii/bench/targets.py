"""Whom to ask: any server with the OpenAI API, or one of ours over gRPC."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from mii.async_client import AsyncMIIClient
from mii.bench.workload import Question


@dataclass
class Measured:
    """One request as its client saw it; times on `time.perf_counter`'s clock."""

    began: float
    arrivals: list[float] = field(default_factory=list)  # of pieces of the answer
    prompt_tokens: int = 0
    new_tokens: int = 0
    ended: float = 0.0
    error: str = ""

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Target(Protocol):
    """A server."""

    async def ask(self, question: Question, measured: Measured) -> None:
        """Ask, and note what comes; raises what goes wrong."""

    async def close(self) -> None:
        """Close all connections."""


class OpenAITarget:
    """A server with the OpenAI API.

    Args:
        url: up to and without /v1.
        model: its name there.
        chat: ask by /v1/chat/completions instead of /v1/completions.
        key: for `Authorization`.
    """

    def __init__(self, url: str, model: str, *, chat: bool, key: str | None) -> None:
        import aiohttp

        base = url.rstrip("/").removesuffix("/v1")
        self._url = f"{base}/v1/{'chat/' if chat else ''}completions"
        self._model = model
        self._chat = chat
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        )

    async def ask(self, question: Question, measured: Measured) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": question.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": question.prompt}]
        else:
            body["prompt"] = question.prompt
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    self._take(json.loads(line[6:]), measured)

    def _take(self, chunk: dict[str, Any], measured: Measured) -> None:
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"].get("message", chunk["error"])))
        for choice in chunk.get("choices", ()):
            text = choice.get("delta", {}).get("content") if self._chat else choice.get("text")
            if text:
                measured.arrivals.append(time.perf_counter())
        if usage := chunk.get("usage"):
            measured.prompt_tokens = usage["prompt_tokens"]
            measured.new_tokens = usage["completion_tokens"]

    async def close(self) -> None:
        await self._session.close()


class GrpcTarget:
    """A deployment of ours.

    Args:
        client: of it.
    """

    def __init__(self, client: AsyncMIIClient) -> None:
        self._client = client

    async def ask(self, question: Question, measured: Measured) -> None:
        pieces = self._client.stream(
            question.prompt, max_new_tokens=question.new_tokens, temperature=0, ignore_eos=True
        )
        async for piece in pieces:
            if piece.token_ids:
                measured.arrivals.append(time.perf_counter())
            measured.prompt_tokens = piece.prompt_length
            measured.new_tokens += len(piece.token_ids)

    async def close(self) -> None:
        await self._client.close()
