"""`modelresponse.ModelResponse`, called through the stubs of the deepspeed-mii 0.3.3 wheel."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii import control
from mii.router.legacy import shortest_decimal
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import RouterProcess

WHEEL = "deepspeed_mii-0.3.3-py3-none-any.whl"
WHEEL_SHA256 = "392fd7df5fe9f8dbbca3e27f99a0f56bd716c9ef4f4e4b8e58a0c86e69c82b2f"
STUBS = ("modelresponse_pb2.py", "modelresponse_pb2_grpc.py")

Call = tuple[str, list[str], dict[str, Any]]
Calls = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds, as package `mii`, nothing but DeepSpeed-MII's generated stubs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mii" / "tests"
    if not (cache / WHEEL).exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--quiet", "--dest", cache, "deepspeed-mii==0.3.3"], check=True)
    assert hashlib.sha256((cache / WHEEL).read_bytes()).hexdigest() == WHEEL_SHA256
    root = tmp_path_factory.mktemp("stubs")
    folder = root / "mii" / "grpc_related" / "proto"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    with zipfile.ZipFile(cache / WHEEL) as wheel:
        for name in STUBS:
            (folder / name).write_bytes(wheel.read(f"mii/grpc_related/proto/{name}"))
    return root


@pytest.fixture
def calls(stubs: Path) -> Calls:
    """Makes calls to a router with those stubs, in a process where `mii` is theirs."""

    def make(router: RouterProcess, *calls: Call) -> list[Any]:
        client = Path(__file__).with_name("deepspeed_mii_client.py")
        output = subprocess.run(
            [sys.executable, "-P", client, f"localhost:{router.port}"],
            input=json.dumps(calls).encode(),
            env={**os.environ, "PYTHONPATH": str(stubs)},
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        results: list[Any] = json.loads(output.stdout)
        return results

    return make


def test_prompts_are_answered_in_their_order(
    router: RouterProcess, workers: list[FakeWorker], calls: Calls
) -> None:
    arguments = {"max_new_tokens": 2, "do_sample": False}
    one, many = calls(
        router,
        ("GeneratorReply", ["a b c"], arguments),
        ("GeneratorReply", ["a b", "c d e", "f"], arguments),
    )
    assert one == [["a b ", "length", 3, 2, 1.0]]
    assert many == [
        ["a b ", "stop", 2, 2, 1.0],
        ["c d ", "length", 3, 2, 1.0],
        ["f ", "stop", 1, 1, 1.0],
    ]


def test_a_stream_ends_with_an_empty_piece_that_tells_why(
    router: RouterProcess, workers: list[FakeWorker], calls: Calls
) -> None:
    (pieces,) = calls(router, ("GeneratorReplyStream", ["a b c"], {"stream": True}))
    replies = [piece for (piece,) in pieces]
    assert [(text, reason) for text, reason, *_ in replies] == [
        ("a ", "none"),
        ("b ", "none"),
        ("c ", "none"),
        ("", "stop"),
    ]
    assert [generated for *_, generated, _ in replies] == [1, 2, 3, 3]
    assert replies[-1][2] == 3


def test_arguments_arrive_as_the_client_wrote_them(
    router: RouterProcess, workers: list[FakeWorker], calls: Calls
) -> None:
    arguments = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "max_length": 100,
        "ignore_eos": True,
        "return_full_text": False,
        "prompt_length": 5,
        "seed": 2**53 + 1,
        "stop": {"1": "y", "0": "x"},
        "logit_bias": {"0": 1.0, "7": -0.1},
    }
    calls(router, ("GeneratorReply", ["a"], arguments))
    (sent,) = [request.sampling for worker in workers for request in worker.requests]
    assert sent.temperature == 0.7
    assert sent.top_p == 0.9
    assert sent.top_k == 50
    assert sent.max_length == 100
    assert sent.ignore_eos is True
    assert sent.HasField("return_full_text") and sent.return_full_text is False
    assert sent.seed == 2**53 + 1
    assert list(sent.stop) == ["x", "y"]
    assert dict(sent.logit_bias) == {0: 1.0, 7: -0.1}
    assert not sent.HasField("max_new_tokens")


def test_one_stop_string_stays_one(
    router: RouterProcess, workers: list[FakeWorker], calls: Calls
) -> None:
    calls(router, ("GeneratorReply", ["a"], {"stop": "xyz"}))
    (sent,) = [request.sampling for worker in workers for request in worker.requests]
    assert list(sent.stop) == ["xyz"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("GeneratorReply", ["a"], {"top_p": 1.5}), ["top_p", "1.5", "0 to 1"]),
        (("GeneratorReply", ["a"], {"max_tokenz": 5}), ["max_tokenz", "max_tokens"]),
        (("GeneratorReply", ["a"], {"stop": {"a": "x"}}), ["stop"]),
        (("GeneratorReply", [], {}), ["prompts"]),
        (("GeneratorReply", ["a"] * 4097, {}), ["4097"]),
        (("GeneratorReply", ["a"], {"stop": "x" * 2**21}), ["bytes"]),
        (("GeneratorReplyStream", ["a", "b"], {}), ["exactly one prompt"]),
        (("GeneratorReplyStream", [], {}), ["exactly one prompt"]),
        (("GeneratorReplyStream", ["a"], {"temperature": -1}), ["temperature"]),
    ],
)
def test_bad_input_is_an_invalid_argument_that_says_what_is_wrong(
    router: RouterProcess, workers: list[FakeWorker], calls: Calls, call: Call, words: list[str]
) -> None:
    ((code, details),) = calls(router, call)
    assert code == "INVALID_ARGUMENT"
    assert all(word in details for word in words), details
    assert not any(worker.requests for worker in workers)


def test_terminate_is_answered_and_passed_to_the_supervisor(
    start_router: StartRouter, calls: Calls
) -> None:
    router = start_router(enable_rest=False)
    assert calls(router, ("Terminate", [], {})) == [[]]
    assert router.messages.get(timeout=10) == control.Terminate()
    assert router.process.poll() is None  # its end is the supervisor's decision


@given(st.decimals(-1000, 1000, places=4).map(float))
def test_a_decimal_that_was_cut_to_32_bits_is_read_as_it_was_written(number: float) -> None:
    (single,) = struct.unpack("f", struct.pack("f", number))
    read = shortest_decimal(single)
    assert struct.pack("f", read) == struct.pack("f", number)
    assert len(repr(float(read))) <= len(repr(number))


@given(st.floats(0, 2, width=32))
def test_every_32_bit_number_is_read_as_one_that_gives_it_again(single: float) -> None:
    assert struct.unpack("f", struct.pack("f", shortest_decimal(single)))[0] == single


def test_a_whole_number_is_an_integer_again() -> None:
    assert shortest_decimal(128.0) == 128
    assert isinstance(shortest_decimal(128.0), int)
