"""Keys, roles, TLS and workers that answer nobody but their router, on real deployments."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.empty_pb2 import Empty

import mii
from mii.errors import InvalidArgument, PermissionDenied, Unauthenticated
from mii.proto.deployment_pb2 import ScaleRequest
from mii.proto.deployment_pb2_grpc import DeploymentStub
from mii.proto.inference_pb2 import ListModelsRequest
from mii.proto.inference_pb2_grpc import InferenceStub
from mii.proto.modelresponse_pb2_grpc import ModelResponseStub
from mii.registry import DeploymentRecord, Registry
from mii.status import error_of_call
from tests.certificates import certificate

USER, ADMIN = "user-key-12345", "admin-key-12345"


@pytest.fixture(scope="module")
def guarded(cache: Path, tiny_model: Path) -> Iterator[DeploymentRecord]:
    """A deployment with a key for users and one for admins."""
    client = mii.serve(
        str(tiny_model), deployment_name="guarded", port=0, enable_rest=True, rest_port=0,
        api_keys=[USER], admin_keys=[ADMIN],
    )  # fmt: skip
    yield Registry(cache).get("guarded")
    client.terminate_server()


def ask_over_http(url: str, headers: dict[str, str], context: Any = None) -> tuple[int, Any]:
    body = json.dumps({"prompts": ["a"], "max_new_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, {**json.load(error), "asked": error.headers["WWW-Authenticate"]}


def test_the_access_log_tells_callers_apart_and_no_key(
    guarded: DeploymentRecord, cache: Path
) -> None:
    log = Registry(cache).logs("guarded") / "router.log"
    before = log.read_text()
    url = f"http://{guarded.rest_address}"
    for key in (USER, ADMIN, USER):
        assert ask_over_http(url, {"x-api-key": key})[0] == 200
    stub = InferenceStub(grpc.insecure_channel(guarded.address))
    stub.ListModels(ListModelsRequest(), metadata=(("x-api-key", USER),))
    added = log.read_text().removeprefix(before)
    while "ListModels" not in added:  # the line comes when the client has its answer
        added = log.read_text().removeprefix(before)
    first, second, third, fourth = re.findall(r" client=(\w+) ", added)
    assert first == third == fourth != second
    assert USER not in log.read_text() and ADMIN not in log.read_text()


def test_http_needs_a_key_but_for_health(guarded: DeploymentRecord) -> None:
    url = f"http://{guarded.rest_address}"
    for headers in ({}, {"Authorization": "Bearer wrong-key-123"}, {"x-api-key": "x"}):
        status, answer = ask_over_http(url, headers)
        assert status == 401 and answer["error"]["type"] == "authentication_error"
        assert answer["asked"] == "Bearer"
    for headers in ({"Authorization": f"Bearer {USER}"}, {"x-api-key": ADMIN}):
        assert ask_over_http(url, headers)[0] == 200
    on_the_grpc_port = f"http://{guarded.address}"
    assert ask_over_http(on_the_grpc_port, {})[0] == 401
    for path in ("/health", "/live"):
        with urllib.request.urlopen(url + path, timeout=30) as response:
            assert response.status == 200
    for path in ("/", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url + path, timeout=30)


def test_the_openai_client_shows_its_key(guarded: DeploymentRecord) -> None:
    base = f"http://{guarded.rest_address}/v1"
    with openai.OpenAI(base_url=base, api_key=USER) as client:
        assert client.models.list().data
    with (
        openai.OpenAI(base_url=base, api_key="wrong-key-123") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def error_of(call: Any) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_of_call(caught.value)


def test_grpc_needs_a_key_and_an_admins_to_change_anything(guarded: DeploymentRecord) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        ask, operate = InferenceStub(channel).ListModels, DeploymentStub(channel).Scale
        end = ModelResponseStub(channel).Terminate

        def shown(key: str) -> Any:
            return (("authorization", f"Bearer {key}"),)

        assert isinstance(error_of(lambda: ask(ListModelsRequest())), Unauthenticated)
        wrong = shown("wrong-key-123")
        assert isinstance(
            error_of(lambda: ask(ListModelsRequest(), metadata=wrong)), Unauthenticated
        )
        assert ask(ListModelsRequest(), metadata=shown(USER)).models
        for call in (
            lambda: operate(ScaleRequest(replicas=1), metadata=shown(USER)),
            lambda: end(Empty(), metadata=shown(USER)),
        ):
            assert isinstance(error_of(call), PermissionDenied)
        assert isinstance(error_of(lambda: end(Empty())), Unauthenticated)
        operate(ScaleRequest(replicas=1), metadata=shown(ADMIN))
        assert ask(ListModelsRequest(), metadata=shown(USER)).models  # it still serves


def test_clients_show_the_key_that_they_are_given(
    guarded: DeploymentRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mii.client("guarded") as client:  # this user's own: it finds the token
        assert client("a", max_new_tokens=2)
    with mii.client(guarded.address, api_key=USER) as client:
        assert client("a", max_new_tokens=2)
        with pytest.raises(PermissionDenied):
            client.terminate_server()
    with mii.client(guarded.address) as client, pytest.raises(Unauthenticated):
        client("a", max_new_tokens=2)
    monkeypatch.setenv("MII_API_KEY", USER)
    with mii.client(guarded.address) as client:
        assert client("a", max_new_tokens=2)


def test_a_worker_answers_nobody_but_its_router(guarded: DeploymentRecord) -> None:
    port = next(process.port for process in guarded.processes if process.role == "worker")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = InferenceStub(channel).ListModels
        admins = (("authorization", f"Bearer {ADMIN}"),)
        for call in (
            lambda: ask(ListModelsRequest()),
            lambda: ask(ListModelsRequest(), metadata=admins),
        ):
            assert isinstance(error_of(call), Unauthenticated)


def test_keys_are_in_no_file_and_in_no_process_list(guarded: DeploymentRecord, cache: Path) -> None:
    kept = [path for path in cache.rglob("*") if path.suffix in (".json", ".log")]
    assert any(path.name == "guarded.json" for path in kept)
    for path in kept:
        text = path.read_text(errors="replace")
        assert USER not in text and ADMIN not in text, path
        if guarded.config.token in text:
            assert path.stat().st_mode & 0o077 == 0, path
    for process in [guarded.supervisor.pid, *(each.pid for each in guarded.processes)]:
        for name in ("cmdline", "environ"):
            shown = Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace")
            assert USER not in shown and guarded.config.token not in shown


def test_both_ports_speak_tls(cache: Path, tiny_model: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "good")
    client = mii.serve(
        str(tiny_model), deployment_name="sealed", port=0, enable_rest=True, rest_port=0,
        tls_certificate=cert, tls_key=key,
    )  # fmt: skip
    try:
        record = Registry(cache).get("sealed")
        assert client("a", max_new_tokens=2)
        with mii.client(record.address, tls_ca=cert) as other:
            assert other("a", max_new_tokens=2)
        with mii.client(record.address) as plain, pytest.raises(mii.MIIError):
            plain("a", max_new_tokens=2, timeout=3)
        trusting = ssl.create_default_context(cafile=cert)
        for address in (record.rest_address, record.address):
            assert ask_over_http(f"https://{address}", {}, trusting)[0] == 200
        with pytest.raises(urllib.error.URLError, match="self-signed|self signed"):
            ask_over_http(f"https://{record.rest_address}", {})
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            ask_over_http(f"http://{record.rest_address}", {})
    finally:
        client.terminate_server()


def test_bad_certificates_are_known_before_anything_starts(
    cache: Path, tiny_model: Path, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, "one")
    _, other_key = certificate(tmp_path, "other")
    expired, expired_key = certificate(tmp_path, "expired", days=-1)
    for options, words in [
        ({"tls_certificate": cert}, "tls_key is missing"),
        ({"tls_certificate": cert, "tls_key": other_key}, "do not go together"),
        ({"tls_certificate": str(tmp_path / "none"), "tls_key": key}, "is no file"),
        ({"tls_certificate": key, "tls_key": key}, "tls_certificate"),
        ({"tls_certificate": expired, "tls_key": expired_key}, "expired"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            mii.serve(str(tiny_model), **options)
    assert not [record for record in Registry(cache).all() if record.name.startswith("tiny")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_other_machines_are_not_let_in_without_a_key(
    cache: Path, tiny_model: Path, host: str
) -> None:
    with pytest.raises(InvalidArgument, match="allow_open_access"):
        mii.serve(str(tiny_model), host=host)
    with pytest.raises(InvalidArgument, match="allow_open_access"):
        mii.serve(str(tiny_model), rest_host=host, enable_rest=True)
