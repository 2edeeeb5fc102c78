"""Clients that give up at any moment: nothing of theirs is left anywhere.

Run as a program, for five minutes with 64 clients: python -m tests.system.test_cancellations
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

import mii
from mii import AsyncMIIClient
from mii.registry import DeploymentRecord, Registry

GIVEN_UP = 0.2  # part of the requests
SETTLED_SECONDS = 20.0


async def over_grpc(client: AsyncMIIClient, rng: random.Random) -> None:
    """Ask for a stream, or for whole answers."""
    params: dict[str, Any] = {"max_new_tokens": rng.randint(1, 60), "ignore_eos": True}
    prompt = "x" * rng.randint(1, 200)
    if rng.random() < 0.5:
        async for _ in client.stream(prompt, **params):
            pass
    else:
        await client([prompt, prompt[:5]], n=rng.randint(1, 3), **params)


async def over_http(session: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
    """Ask for a completion, streamed or whole."""
    body = {
        "prompt": "y" * rng.randint(1, 200), "max_tokens": rng.randint(1, 60), "ignore_eos": True,
        "stream": rng.random() < 0.5,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def ask_on(client: AsyncMIIClient, url: str, seed: int, until: float) -> Counter[str]:
    """Ask again and again, and give up some of it after a random time."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            asked = over_grpc(client, rng) if seed % 2 else over_http(session, url, rng)
            task = asyncio.ensure_future(asked)
            if rng.random() < GIVEN_UP:
                await asyncio.wait([task], timeout=rng.uniform(0.0, 0.3))
                task.cancel()
            try:
                await task
                ends["whole"] += 1
            except asyncio.CancelledError:
                ends["given up"] += 1
    return ends


async def figures(url: str) -> dict[str, float]:
    """Return the sum of each of the deployment's figures."""
    sums: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if found := re.match(r"mii:(\w+)(?:\{.*\})? ([\d.e+-]+)$", line):
                sums[found[1]] += float(found[2])
    return dict(sums)


def is_idle(now: dict[str, float]) -> bool:
    """Whether neither router nor engine knows of a request, and every block is free."""
    names = ("requests_in_progress", "replica_outstanding_prompts")
    names += ("num_requests_running", "num_requests_waiting")
    return (
        all(now[name] == 0 for name in names)
        and now["kv_cache_free_blocks"] == now["kv_cache_blocks"] > 0
    )


async def storm(record: DeploymentRecord, clients: int, seconds: float) -> Counter[str]:
    """Have clients ask and give up; return how their requests ended, once nothing is left."""
    url = f"http://{record.rest_address}"
    client = AsyncMIIClient(record.address)
    until = time.monotonic() + seconds
    ends = await asyncio.gather(*(ask_on(client, url, seed, until) for seed in range(clients)))
    await client.close()
    deadline = time.monotonic() + SETTLED_SECONDS
    while not is_idle(now := await figures(url)):
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.1)
    return sum(ends, Counter())


def test_nothing_is_left_of_requests_that_were_given_up(cache: Path, tiny_model: Path) -> None:
    client = mii.serve(
        str(tiny_model), replica_num=2, port=0, enable_rest=True, rest_port=0, num_blocks=64,
        threads=1, access_log=False,
    )  # fmt: skip
    try:
        record = Registry(cache).get(str(client.deployment_name))
        ends = asyncio.run(storm(record, clients=16, seconds=8))
        assert ends["whole"] > 5 and ends["given up"] > 5, ends
    finally:
        client.terminate_server()


def main() -> None:
    """Run for five minutes."""
    os.environ["MII_CACHE_PATH"] = folder = tempfile.mkdtemp()
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    client = mii.serve("smollm2", replica_num=2, port=0, enable_rest=True, rest_port=0, threads=1)
    try:
        record = Registry(Path(folder)).get(str(client.deployment_name))
        print(dict(asyncio.run(storm(record, clients=64, seconds=seconds))), "and nothing is left")
    finally:
        client.terminate_server()


if __name__ == "__main__":
    main()
