"""What a flood of one client does to others: nothing. The real relay, connections and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from mii import control
from mii.errors import Overloaded
from mii.keys import digest_of
from mii.proto.inference_pb2 import GenerateRequest, Prompt, SamplingParams
from mii.proto.modelresponse_pb2 import MultiStringRequest
from mii.proto.modelresponse_pb2_grpc import ModelResponseStub
from mii.router import request_record
from mii.router.balancer import RoundRobin
from mii.router.limits import RequestLimit
from mii.router.metrics import RouterMetrics
from mii.router.relay import Relay
from mii.router.replicas import Replicas
from mii.router.request_record import RequestRecord
from mii.router.transport import Http2Transport
from tests.fakes import continuation
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker
from tests.router.http_calls import call
from tests.serving import MODEL, ServedWorker

FLOOD, OTHERS = 200, 5


@pytest.fixture
def served() -> Iterator[list[ServedWorker]]:
    served = [ServedWorker(gated=True, num_blocks=256) for _ in range(2)]
    yield served
    for worker in served:
        worker.close()


async def test_a_flood_of_one_client_neither_delays_nor_refuses_another(
    served: list[ServedWorker],
) -> None:
    replicas = Replicas(Http2Transport, RoundRobin(), lambda: None)
    replicas.update(
        [control.Replica(number, worker.address, True) for number, worker in enumerate(served)]
    )
    relay = Relay(replicas, MODEL, RequestLimit(2 * FLOOD, 10**6))
    ended: list[str] = []  # whose requests, as they end

    async def ask(client: str, number: int) -> None:
        request_record.current.set(RequestRecord("grpc", "", RouterMetrics(), client=client))
        request = GenerateRequest(
            prompts=[Prompt(text=f"{client}{number}")],
            sampling=SamplingParams(max_new_tokens=12, temperature=0),
            client="flood",  # which nobody believes
        )
        async with relay.generate(request) as generation:
            answers = [delta async for message in generation for delta in message.deltas]
        prompt = list(f"{client}{number}".encode())
        assert answers[0].token_ids == continuation(prompt, 12)
        ended.append(client)

    async def arrived(count: int) -> None:
        """Return when so many requests wait for the engines, which stand still."""
        async with asyncio.timeout(20):
            while sum(len(worker.engine._calls) for worker in served) < count:
                await asyncio.sleep(0.001)

    flood = [asyncio.create_task(ask("flood", number)) for number in range(FLOOD)]
    await arrived(FLOOD)
    with pytest.raises(Overloaded, match=f"'flood', has {FLOOD} requests"):
        await asyncio.wait_for(ask("flood", FLOOD), 10)
    others = [asyncio.create_task(ask("other", number)) for number in range(OTHERS)]
    await arrived(FLOOD + OTHERS)
    for worker in served:
        worker.model.open.set()
    await asyncio.gather(*others)
    assert ended.count("flood") < 50
    await asyncio.gather(*flood)
    assert ended.count("flood") == FLOOD
    await replicas.close()


def test_each_key_is_a_client_on_every_surface(
    start_router: StartRouter, workers: list[FakeWorker]
) -> None:
    keys = "key-of-the-first", "key-of-the-second"
    router = start_router(api_keys=tuple(map(digest_of, keys)), max_requests=2)
    router.tell(*workers)
    router.wait_for(HealthCheckResponse.SERVING)
    legacy = ModelResponseStub(router.channel)
    seen = []
    for key in keys:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        metadata = (("authorization", headers["authorization"]),)
        request = GenerateRequest(prompts=[Prompt(text="a b")], client="somebody else")
        list(router.inference.Generate(request, metadata=metadata))
        legacy.GeneratorReply(MultiStringRequest(request=["a b"]), metadata=metadata)
        for path, body in (
            ("/generate", b'{"prompts": "a b"}'),
            ("/v1/completions", b'{"model": "default", "prompt": "a b"}'),
        ):
            answer = call(router, "POST", path, body, headers)
            assert answer.status == 200
        asked = [request for worker in workers for request in worker.requests]
        assert len(asked) == 4 * (len(seen) + 1)
        (client,) = {request.client for request in asked} - {*seen}
        seen.append(client)
    assert "somebody else" not in seen and "" not in seen

    held = GenerateRequest(prompts=[Prompt(text="<hold>")], stream=True)
    first, second = ((("x-api-key", key),) for key in keys)
    holding = router.inference.Generate(held, metadata=first)
    holding.initial_metadata()
    with pytest.raises(grpc.RpcError, match="the client of this key") as caught:
        list(router.inference.Generate(held, metadata=first))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    list(router.inference.Generate(GenerateRequest(prompts=[Prompt(text="a")]), metadata=second))
    holding.cancel()
