"""Many streams at once on few blocks: each gets what it gets alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

import mii
from mii import AsyncMIIClient, MIIClient
from mii.keys import key_headers
from mii.proto.worker_pb2 import StatusRequest, StatusResponse
from mii.proto.worker_pb2_grpc import WorkerStub
from mii.registry import Registry

Request = tuple[str, dict[str, Any]]


def requests_of(count: int, longest: int) -> list[Request]:
    """Prompts and answers of mixed lengths; half of them drawn, half greedy, some with stops."""
    rng = random.Random(11)
    requests = []
    for index in range(count):
        prompt = "".join(rng.choices("abcdefgh ,.", k=rng.randint(1, longest)))
        params: dict[str, Any] = {"max_new_tokens": rng.randint(1, longest // 2), "seed": index}
        if index % 2:
            params["temperature"] = 0
        if index % 5 == 0:
            params["stop"] = ["ab", "e."]
        if index % 7 == 0:
            params["repetition_penalty"] = 1.3
        requests.append((prompt, params))
    return requests


async def stream(client: AsyncMIIClient, request: Request) -> tuple[str, list[int], str]:
    prompt, params = request
    pieces = [piece async for piece in client.stream(prompt, timeout=600, **params)]
    ids = [token for piece in pieces for token in piece.token_ids]
    return "".join(map(str, pieces)), ids, pieces[-1].finish_reason


async def all_at_once(client: MIIClient, requests: list[Request]) -> list[Any]:
    streaming = AsyncMIIClient(client.address)
    try:
        return await asyncio.gather(*(stream(streaming, request) for request in requests))
    finally:
        await streaming.close()


async def one_by_one(client: MIIClient, requests: list[Request]) -> list[Any]:
    streaming = AsyncMIIClient(client.address)
    try:
        return [await stream(streaming, request) for request in requests]
    finally:
        await streaming.close()


def status_of(cache: Path, client: MIIClient) -> StatusResponse:
    record = Registry(cache).get(str(client.deployment_name))
    port = next(process.port for process in record.processes if process.role == "worker")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        key = key_headers(record.config.token, {})
        return WorkerStub(channel).Status(StatusRequest(), timeout=30, metadata=key)


@pytest.mark.parametrize(
    ("model", "count", "blocks", "longest"),
    [
        pytest.param("tiny_model", 200, 48, 120, id="tiny"),
        pytest.param("smollm2", 200, 256, 600, id="smollm2", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(3600)
def test_two_hundred_streams(
    request: pytest.FixtureRequest, cache: Path, model: str, count: int, blocks: int, longest: int
) -> None:
    folder = request.getfixturevalue(model)
    requests = requests_of(count, longest)
    client = mii.serve(
        folder,
        deployment_name=f"load-{model}",
        port=0,
        num_blocks=blocks,
        block_size=8,
        dtype="float32",
        threads=1,  # more wait for each other where other processes have work, too
    )
    try:
        alone = asyncio.run(one_by_one(client, requests))
        asyncio.run(all_at_once(client, requests[:20]))
        before = status_of(cache, client)
        together = asyncio.run(all_at_once(client, requests))
        after = status_of(cache, client)
    finally:
        client.terminate_server()
    assert together == alone
    assert after.preemptions > before.preemptions
    assert after.running_requests == after.waiting_requests == 0
    assert after.free_blocks == after.total_blocks == blocks
    print(f"resident: {before.resident_bytes / 1e6:.0f} MB, then {after.resident_bytes / 1e6:.0f}")
    assert after.resident_bytes - before.resident_bytes < 64e6
