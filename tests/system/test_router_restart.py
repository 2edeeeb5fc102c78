"""The router is killed under clients: workers stay, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import mii
from mii import MIIClient
from mii.keys import key_headers
from mii.proto.inference_pb2 import GenerateRequest, Prompt, SamplingParams
from mii.proto.inference_pb2_grpc import InferenceStub
from mii.proto.worker_pb2 import StatusRequest, StatusResponse
from mii.proto.worker_pb2_grpc import WorkerStub
from mii.registry import DeploymentRecord, Registry

Answer = list[tuple[str, tuple[int, ...]]]
Question = Callable[[], Answer]

LONG: dict[str, Any] = {"max_new_tokens": 120, "ignore_eos": True}


def whole(
    client: MIIClient, prompts: list[str], **params: Any
) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(r), tuple(r.token_ids)) for r in client(prompts, **LONG, **params) or ()]


def streamed(client: MIIClient, prompt: str, **params: Any) -> Answer:
    pieces = list(client.stream(prompt, **LONG, **params))
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    return [("".join(map(str, pieces)), ids)]


def unseeded(client: MIIClient) -> Answer:
    """A question whose answers differ: that they are whole is all that can be said of them."""
    ((text, ids),) = streamed(client, "unseeded", temperature=1.0)
    assert text == client.detokenize(ids)
    return [("", (len(ids),))]


def questions(client: MIIClient) -> list[Question]:
    return [
        lambda: unseeded(client),
        lambda: whole(client, ["abc", "de", "f"], temperature=0),
        lambda: streamed(client, "xyz", temperature=0),
        lambda: streamed(client, "seeded", temperature=0.9, seed=3),
        lambda: whole(client, ["many", "of", "them"], n=2, seed=5, temperature=1.0),
    ]


def router_pid(record: DeploymentRecord) -> int:
    return next(process.pid for process in record.processes if process.role == "router")


def worker_pids(record: DeploymentRecord) -> set[int]:
    return {process.pid for process in record.processes if process.role == "worker"}


@pytest.fixture(scope="module")
def client(cache: Path, tiny_model: Path) -> Any:
    served = mii.serve(
        str(tiny_model), deployment_name="restarted", replica_num=2, port=0, max_restarts=100
    )
    yield served
    served.terminate_server()


def test_the_router_is_killed_under_load_and_nothing_is_lost(
    client: MIIClient, cache: Path
) -> None:
    registry = Registry(cache)
    calm = [ask() for ask in questions(client)]
    over = threading.Event()
    workers = worker_pids(registry.get("restarted"))

    def ask_on(number: int) -> int:
        asked = 0
        while not over.is_set():
            kind = (number + asked) % len(calm)
            assert questions(client)[kind]() == calm[kind]
            asked += 1
        return asked

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask_on, number) for number in range(16)]
        try:
            for _ in range(4):
                record = registry.get("restarted")
                os.kill(router_pid(record), signal.SIGKILL)
                deadline = time.monotonic() + 20
                while router_pid(registry.get("restarted")) == router_pid(record):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                time.sleep(0.5)  # some requests come through in between
        finally:
            over.set()
        assert sum(each.result(60) for each in asking) >= 16
    assert worker_pids(registry.get("restarted")) == workers


def statuses(record: DeploymentRecord) -> list[StatusResponse]:
    key = key_headers(record.config.token, {})
    answers = []
    for process in record.processes:
        if process.role == "worker":
            with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
                stub = WorkerStub(channel)
                answers.append(stub.Status(StatusRequest(), timeout=30, metadata=key))
    return answers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_what_is_not_streamed_is_generated_once(
    number: signal.Signals, client: MIIClient, cache: Path
) -> None:
    record = Registry(cache).get("restarted")
    before = sum(status.generated_tokens for status in statuses(record))
    params: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.8}
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(client, ["a", "b"], n=2, seed=1, **params),
            pool.submit(client, ["c", "d", "e", "f", "g"], **params),
            pool.submit(client, "h", **params),
            pool.submit(client, "i", **{**params, "temperature": 0}),
        ]
        deadline = time.monotonic() + 20
        while sum(s.running_requests for s in statuses(record)) < 11:
            assert time.monotonic() < deadline and not any(each.done() for each in asked)
            time.sleep(0.01)
        os.kill(router_pid(record), number)
        answers = [each.result(60) for each in asked]
    assert [len(answer or ()) for answer in answers] == [4, 5, 1, 1]
    assert all(len(r.token_ids) == 400 for answer in answers for r in answer or ())
    assert sum(status.generated_tokens for status in statuses(record)) - before == 11 * 400


def test_a_plain_client_is_told_at_once_to_try_again(client: MIIClient, cache: Path) -> None:
    record = Registry(cache).get("restarted")
    request = GenerateRequest(
        prompts=[Prompt(text="abc")],
        sampling=SamplingParams(max_new_tokens=400, ignore_eos=True),
        stream=True,
    )
    with grpc.insecure_channel(record.address) as channel:
        call: Any = InferenceStub(channel).Generate(request, timeout=60)
        next(call)
        os.kill(router_pid(record), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - killed < 5
