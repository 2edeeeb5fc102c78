"""Errors on their way through gRPC statuses, over a real connection where C-core has its say."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii import errors
from mii.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    MIIError,
    Overloaded,
    ServiceError,
    Unavailable,
)
from mii.http2.limits import Limits
from mii.http2.server import Server
from mii.http2.server_call import ServerCall
from mii.proto.inference_pb2 import TokenizeRequest, TokenizeResponse
from mii.proto.inference_pb2_grpc import (
    InferenceStub,
)
from mii.rpc.methods import answered_once, errors_as_status, fault_of
from mii.status import error_of, error_of_call, known_error, status_of

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MIIError) and kind is not MIIError
]
FOREIGN = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_is_itself_again(kind: type[MIIError]) -> None:
    status = status_of(kind("what went wrong"))
    again = error_of(status.code, status.message, status.metadata)
    assert type(again) is kind
    assert str(again) == "what went wrong"
    assert status.code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_a_new_class_of_errors_has_a_word_of_its_own() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)


@given(st.text(max_size=60))
def test_a_field_is_itself_again(field: str) -> None:
    status = status_of(InvalidArgument("no", field))
    for _, value in status.metadata:
        assert value.isascii() and value.isprintable()
    again = error_of(status.code, status.message, status.metadata)
    assert isinstance(again, InvalidArgument)
    assert again.field == field.encode("utf-8", "replace").decode()


def test_a_hint_to_retry_is_itself_again() -> None:
    status = status_of(Overloaded("full", 2.5))
    again = error_of(status.code, status.message, status.metadata)
    assert isinstance(again, Overloaded)
    assert again.retry_after == 2.5


@pytest.mark.parametrize("hint", ["", "soon", "-1", "nan", "inf"])
def test_a_hint_that_is_no_time_is_no_hint(hint: str) -> None:
    again = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("retry-after", hint)])
    assert isinstance(again, Overloaded)
    assert again.retry_after is None


@pytest.mark.parametrize("code", FOREIGN, ids=lambda code: code.name)
def test_a_status_of_another_server_is_one_of_our_errors(code: grpc.StatusCode) -> None:
    error = error_of(code, "")
    assert isinstance(error, ServiceError | InvalidArgument)
    assert code.name in str(error)


def test_a_message_beyond_the_limit_is_the_callers_mistake() -> None:
    words = "CLIENT: Sent message larger than max (200000000 vs. 134217728)"
    assert isinstance(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, words), InvalidArgument)


def test_what_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        error = known_error(ZeroDivisionError("secret"), "id-1")
    assert isinstance(error, InternalError)
    assert "id-1" in str(error) and "secret" not in str(error)
    assert "id-1" in caplog.text and "secret" in caplog.text


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (asyncio.CancelledError(), Cancelled),
        (TimeoutError(), DeadlineExceeded),
        (Unavailable("gone"), Unavailable),
    ],
)
def test_what_python_raises_by_itself_is_known(raised: BaseException, kind: type[MIIError]) -> None:
    assert type(known_error(raised, "id-1")) is kind


class Raiser:
    """Answers every Tokenize with the error at hand."""

    def __init__(self) -> None:
        self.error: Exception = InternalError("none yet")

    async def tokenize(self, request: TokenizeRequest, call: ServerCall) -> TokenizeResponse:
        with errors_as_status("id-1"):
            raise self.error


@pytest.fixture
async def raiser() -> AsyncIterator[tuple[Raiser, InferenceStub]]:
    servicer = Raiser()
    handlers = {"/mii.v1.Inference/Tokenize": answered_once(TokenizeRequest, servicer.tokenize)}
    server = Server(handlers, limits=Limits(), fault_of=fault_of)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.listen(listener)
    port = listener.getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, InferenceStub(channel)
    await server.stop(0)


@pytest.mark.parametrize(
    "message",
    ["x" * 5000, "%\x00\n" * 5000, "\U0001f600" * 5000, "\ud83d", "d\u00e9j\u00e0 vu"],
    ids=lambda message: ascii(message[:6]),
)
async def test_any_message_passes_the_wire(
    raiser: tuple[Raiser, InferenceStub], message: str
) -> None:
    servicer, stub = raiser
    servicer.error = InvalidArgument(message, message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(TokenizeRequest())
    error = error_of_call(caught.value)
    assert isinstance(error, InvalidArgument)
    expected = message.encode("utf-8", "replace").decode()
    assert expected.startswith(str(error).removesuffix("..."))
    assert len(str(error)) >= min(len(message), 500)


async def test_an_unforeseen_error_is_internal_on_the_wire(
    raiser: tuple[Raiser, InferenceStub],
) -> None:
    servicer, stub = raiser
    servicer.error = ZeroDivisionError("secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(TokenizeRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
