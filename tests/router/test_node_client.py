"""A client in another language, built from our .proto files alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.router_process import RouterProcess

PACKAGES = ("@grpc/grpc-js@1.14", "@grpc/proto-loader@0.8")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("npm") is None, reason="Node is not installed")
def test_a_node_client_streams_and_understands_errors(
    router: RouterProcess, workers: list[FakeWorker], tmp_path: Path
) -> None:
    install = ["npm", "install", "--silent", "--prefix", tmp_path, *PACKAGES]
    subprocess.run(install, check=True, timeout=200)
    script = Path(__file__).with_name("node_client.js")
    checkout = script.parents[2]
    output = subprocess.run(
        ["node", script, f"localhost:{router.port}", checkout],
        env={**os.environ, "NODE_PATH": str(tmp_path / "node_modules")},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    stream, refused = json.loads(output.stdout)
    assert stream == {
        "texts": {"0": "a b ", "1": "d e "},
        "ends": {"0": "length", "1": "stop"},
    }
    assert refused["code"] == 3 and "top_p" in refused["details"]
