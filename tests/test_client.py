"""The client against a worker in this process: the real server and engine, over a fake model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.empty_pb2 import Empty

from mii.client import MIIClient
from mii.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeploymentError,
    InternalError,
    InvalidArgument,
    Overloaded,
    Unavailable,
    UnknownArgument,
)
from mii.proto.modelresponse_pb2_grpc import (
    ModelResponseServicer,
    add_ModelResponseServicer_to_server,
)
from mii.response import GenerationFinishReason, Response
from tests.fakes import continuation
from tests.serving import ServedWorker

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def worker() -> Iterator[ServedWorker]:
    worker = ServedWorker()
    yield worker
    worker.close()


@pytest.fixture
def gated() -> Iterator[ServedWorker]:
    """A worker whose engine computes a step only when it may."""
    worker = ServedWorker(gated=True, max_requests=4)
    yield worker
    worker.close()


@pytest.fixture
def client(worker: ServedWorker) -> Iterator[MIIClient]:
    with MIIClient(worker.address) as client:
        yield client


def answer(prompt: str, count: int = 12) -> str:
    return bytes(continuation(list(prompt.encode()), count)).decode()


def texts(responses: list[Response] | None) -> list[str]:
    assert responses is not None
    return [str(response) for response in responses]


def test_answers_come_in_the_order_of_their_prompts(client: MIIClient) -> None:
    prompts = ["abc", "a", "abcdefghij", "a"]
    responses = client(prompts, **GREEDY)
    assert texts(responses) == [answer(prompt) for prompt in prompts]
    assert texts(client.generate(prompts, **GREEDY)) == texts(responses)


def test_one_prompt_gives_a_list_of_one(client: MIIClient) -> None:
    (response,) = client("abc", **GREEDY) or []
    assert response == Response(
        generated_text=answer("abc"),
        prompt_length=3,
        generated_length=12,
        finish_reason="length",
        token_ids=continuation(list(b"abc"), 12),
    )
    assert response.finish_reason == GenerationFinishReason.LENGTH


def test_every_form_of_prompt_gives_its_answer(client: MIIClient) -> None:
    expected = [answer("abc")]
    assert texts(client(prompt_token_ids=[97, 98, 99], **GREEDY)) == expected
    array: Any = np.array([[97, 98, 99]])
    assert texts(client(prompt_token_ids=array, **GREEDY)) == expected
    chat = client(messages=[{"role": "user", "content": "hi"}], **GREEDY)
    assert texts(chat) == [answer("user: hi\nassistant: ")]


def test_the_answers_to_a_prompt_stand_together(client: MIIClient) -> None:
    responses = client(["a", "bcd"], n=2, **GREEDY)
    assert texts(responses) == [answer("a")] * 2 + [answer("bcd")] * 2


def test_log_probabilities_come_along(client: MIIClient) -> None:
    (response,) = client("abc", logprobs=2, **GREEDY) or []
    assert len(response.logprobs) == 12
    for token, logprobs in zip(response.token_ids, response.logprobs, strict=True):
        assert logprobs.top[0] == (token, logprobs.sampled)


def test_a_streaming_function_gets_lists_of_one(client: MIIClient) -> None:
    pieces: list[Response] = []

    def take(responses: list[Response]) -> None:
        (piece,) = responses
        pieces.append(piece)

    assert client("abc", streaming_fn=take, **GREEDY) is None
    assert "".join(map(str, pieces)) == answer("abc")
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons == ["none"] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].generated_length == 12 and pieces[0].prompt_length == 3
    with pytest.raises(InvalidArgument, match="exactly one prompt"):
        client(["a", "b"], streaming_fn=take, **GREEDY)


def test_a_streaming_function_that_fails_ends_the_call(gated: ServedWorker) -> None:
    def fail(responses: list[Response]) -> None:
        raise ZeroDivisionError("mine")

    gated.model.gate.release()
    with MIIClient(gated.address) as client, pytest.raises(ZeroDivisionError, match="mine"):
        client("abc", streaming_fn=fail, temperature=0)
    gated.model.open.set()
    gated.until_idle()
    assert gated.stats().generated_tokens < 100  # of 253


def test_a_stream_joins_to_the_whole_answer(client: MIIClient) -> None:
    pieces = list(client.stream("abc", **GREEDY))
    assert "".join(map(str, pieces)) == answer("abc")
    assert [token for piece in pieces for token in piece.token_ids] == continuation([*b"abc"], 12)
    by_ids = client.stream(prompt_token_ids=[97, 98, 99], **GREEDY)
    assert "".join(map(str, by_ids)) == answer("abc")


def test_a_stream_is_judged_before_it_is_iterated(client: MIIClient) -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        client.stream("abc", temperature=-1)


def test_closing_a_stream_ends_the_generation(gated: ServedWorker) -> None:
    with MIIClient(gated.address) as client:
        stream = client.stream("abc", temperature=0)
        gated.model.gate.release()
        assert str(next(stream)) == answer("abc", 1)
        stream.close()  # type: ignore[attr-defined]
        gated.model.open.set()
        gated.until_idle()
    assert gated.stats().generated_tokens < 100


def test_a_deadline_ends_the_call_on_both_sides(gated: ServedWorker) -> None:
    with MIIClient(gated.address) as client:
        with pytest.raises(DeadlineExceeded):
            client("abc", timeout=0.2, **GREEDY)
        with pytest.raises(DeadlineExceeded):
            list(client.stream("abc", timeout=0.2, **GREEDY))
        gated.model.open.set()
        gated.until_idle()
        assert texts(client("abc", timeout=1e300, **GREEDY)) == [answer("abc")]


def test_tokens_and_texts(client: MIIClient) -> None:
    assert client.tokenize("aé") == [97, 195, 169]
    array: Any = np.array([97, 195, 169])
    assert client.detokenize(array) == "aé"
    wrong: list[Any] = [[], [1.5], "a", 5]
    for value in wrong:
        with pytest.raises(InvalidArgument, match="ids"):
            client.detokenize(value)
    with pytest.raises(InvalidArgument, match="text = 5"):
        client.tokenize(wrong[-1])


def test_nothing_is_sent_that_is_known_to_be_wrong() -> None:
    client = MIIClient("192.0.2.1:1")  # where nobody is
    with pytest.raises(UnknownArgument, match="did you mean 'temperature'"):
        client("abc", temperatur=1)
    with pytest.raises(InvalidArgument, match="timeout"):
        client("abc", timeout=-1)
    with pytest.raises(InvalidArgument, match="exactly one of"):
        client()
    with pytest.raises(InvalidArgument, match="streaming_fn = 5"):
        client("abc", 5)  # type: ignore[arg-type]


def test_errors_of_the_server_arrive_as_what_they_are(client: MIIClient) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        client("x" * 256)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidArgument, match="stop_token_ids = 9999") as other:
        client("x", stop_token_ids=[9999])
    assert type(other.value) is InvalidArgument
    assert texts(client("abc", **GREEDY)) == [answer("abc")]


def test_a_full_engine_is_an_error_of_its_own(gated: ServedWorker) -> None:
    gated.model.open.set()
    with MIIClient(gated.address) as client, pytest.raises(Overloaded):
        client(["a"] * 5, **GREEDY)


def test_an_engine_that_fails_says_why(gated: ServedWorker) -> None:
    gated.model.failure = ZeroDivisionError("the last straw")
    gated.model.open.set()
    with MIIClient(gated.address) as client, pytest.raises(Unavailable, match="the last straw"):
        client("abc")


def test_nobody_there_is_said_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    client = MIIClient(address, deployment_name="acme")
    with pytest.raises(Unavailable, match=f"deployment 'acme' at {address} cannot be reached"):
        client("abc")
    assert repr(client) == f"MIIClient(deployment 'acme' at {address})"


@pytest.mark.parametrize(
    "address",
    ["localhost", "localhost:", ":50050", "localhost:http", "localhost:0", "localhost:65536"],
)
def test_an_address_has_a_port(address: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        MIIClient(address)


def test_many_threads_share_a_client(client: MIIClient) -> None:
    prompts = ["abcdefghijklmnop"[: 1 + index % 16] for index in range(64)]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: client(prompt, **GREEDY), prompts))
    assert [texts(each) for each in answers] == [[answer(prompt)] for prompt in prompts]


async def test_it_works_inside_a_running_loop(client: MIIClient) -> None:
    assert texts(client("abc", **GREEDY)) == [answer("abc")]
    assert texts(await asyncio.to_thread(client, "abc", **GREEDY)) == [answer("abc")]


def test_closing_ends_calls_of_other_threads_and_a_further_call_connects_again(
    gated: ServedWorker,
) -> None:
    client = MIIClient(gated.address)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        call = threads.submit(client, "abc", **GREEDY)
        gated.until_step(1)
        client.close()
        with pytest.raises(Cancelled):
            call.result(10)
    gated.model.open.set()
    gated.until_idle()
    assert texts(client("abc", **GREEDY)) == [answer("abc")]
    client.close()
    client.close()


FORKED = """
import os, sys
from mii.client import MIIClient
from mii.errors import ServiceError

def child(function):
    pid = os.fork()
    if pid == 0:
        os._exit(function())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def inherited():
    try:
        client("abc", max_new_tokens=1)
    except ServiceError as error:
        return 10 if "fork" in str(error) else 11

def fresh():
    with MIIClient(address) as other:
        return 20 + len(other("abc", max_new_tokens=3)[0].token_ids)

def unused():
    return 30 + len(untouched("abc", max_new_tokens=3)[0].token_ids)

address = sys.argv[1]
client, untouched = MIIClient(address), MIIClient(address)
client("abc", max_new_tokens=1)
print(child(inherited), child(fresh), child(unused))
print(len(client("abc", max_new_tokens=3)[0].token_ids))
"""


def test_a_forked_child_is_told_to_connect_by_itself(worker: ServedWorker) -> None:
    command = [sys.executable, "-c", FORKED, worker.address]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.stdout == "10 23 33\n3\n", finished.stderr


class Terminable(ModelResponseServicer):
    """A router, as far as its end goes."""

    def __init__(self, ends: bool = True, error: grpc.StatusCode | None = None) -> None:
        self._ends, self._error = ends, error
        self.asked = 0
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        add_ModelResponseServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def GeneratorReply(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    GeneratorReplyStream = GeneratorReply

    def Terminate(self, request: Empty, context: Any) -> Empty:
        self.asked += 1
        if self._error is not None:
            context.abort(self._error, "not I")
        if self._ends:
            threading.Thread(target=self.close).start()
        return Empty()

    def close(self) -> None:
        self._server.stop(1).wait()


@pytest.fixture
def router() -> Iterator[Terminable]:
    router = Terminable()
    yield router
    router.close()


def test_terminate_returns_when_nobody_listens_any_more(router: Terminable) -> None:
    client = MIIClient(router.address, deployment_name="acme")
    client.terminate_server()
    host, port = router.address.split(":")
    with pytest.raises(ConnectionError):
        socket.create_connection((host, int(port)))
    client.terminate_server()
    MIIClient(router.address).terminate_server()  # of another client: it is gone already
    assert router.asked == 1
    with pytest.raises(Unavailable, match="'acme' at .* has been terminated"):
        client("abc")


def test_terminate_waits_as_it_is_told(router: Terminable) -> None:
    waited: list[int] = []
    client = MIIClient(router.address, wait_until_gone=lambda: waited.append(router.asked))
    client.terminate_server()
    client.terminate_server()
    assert waited == [1]


def test_a_deployment_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mii.client"], "_TERMINATE_SECONDS", 0.5)
    router = Terminable(ends=False)
    client = MIIClient(router.address)
    for _ in range(2):  # it can be tried again
        with pytest.raises(DeploymentError, match="still listens"):
            client.terminate_server()
    assert router.asked == 2
    router.close()


def test_a_server_that_refuses_to_end_is_an_error() -> None:
    router = Terminable(error=grpc.StatusCode.INTERNAL)
    with MIIClient(router.address) as client, pytest.raises(InternalError):
        client.terminate_server()
    router.close()
