"""A router process started through its main, with the test as its supervisor."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import time
from collections.abc import Callable

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from mii import control
from mii.channel import channel_options
from mii.config import DeploymentConfig, EngineConfig
from mii.proto.inference_pb2_grpc import InferenceStub
from tests.router.fake_worker import MODEL, FakeWorker

DEPLOYMENT = "acme/echo-1-mii-deployment"


class RouterProcess:
    """A router and its control channel, of which the test is the supervisor's end."""

    def __init__(self, **config: object) -> None:
        self.config = DeploymentConfig(
            deployment_name=DEPLOYMENT,
            engine=EngineConfig(model_path="/m", tokenizer_path="/m", model_name=MODEL),
            **{"port": 0, "rest_port": 0, "enable_rest": True, **config},  # type: ignore[arg-type]
        )
        self.control, theirs = control.ControlChannel.pair()
        self.messages: queue.Queue[control.Message | None] = queue.Queue()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "mii.router.main",
                    "--control-fd",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                cwd="/",
            )
        self.control.send(control.Start(self.config, "router"))
        self._listener = self.control.listen(self.messages.put, lambda: self.messages.put(None))
        self.first = self.messages.get(timeout=30)
        if isinstance(self.first, control.Ready):
            self.channel = grpc.insecure_channel(f"127.0.0.1:{self.first.port}", channel_options())
            self.url = f"http://127.0.0.1:{self.first.rest_port}"
            self.inference = InferenceStub(self.channel)
            self.health = HealthStub(self.channel)

    @property
    def port(self) -> int:
        assert isinstance(self.first, control.Ready)
        return self.first.port

    def tell(self, *workers: FakeWorker | str) -> None:
        """Say that these, numbered in this order, are the ready replicas."""
        addresses = [worker if isinstance(worker, str) else worker.address for worker in workers]
        replicas = (control.Replica(i, address, True) for i, address in enumerate(addresses))
        self.control.send(control.Replicas(tuple(replicas)))

    def wait_for(self, status: HealthCheckResponse.ServingStatus, service: str = "") -> None:
        """Return once the health check says so."""
        watch = self.health.Watch(HealthCheckRequest(service=service), timeout=30)
        next(answer for answer in watch if answer.status == status)
        watch.cancel()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once something of the process holds that it does not tell."""
        until = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        """Let the router find its supervisor gone."""
        if isinstance(self.first, control.Ready):
            self.channel.close()
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError("the router outlived its control channel")
