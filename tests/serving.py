"""A worker in this process: the real server, loop and engine, over the fake model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import torch

from mii.attention.batch import RaggedBatch
from mii.channel import channel_options
from mii.config import DeploymentConfig, EngineConfig
from mii.control import Start
from mii.engine.metrics import EngineStats
from mii.proto.inference_pb2_grpc import InferenceStub
from mii.workers.loop import EngineLoop
from mii.workers.ranks import WorkerStatus, engine_counters
from mii.workers.server import LoopThread, WorkerServer
from mii.workers.servicer import Servicer
from tests.fakes import FakeModel, fake_generator

MODEL = "acme/fake-1"
SECONDS = 10.0  # within which what is waited for must happen


class GatedModel(FakeModel):
    """Computes a step only when it may, and fails when it is told to."""

    def __init__(self, max_length: int = 4096) -> None:
        super().__init__(max_length)
        self.gate = threading.Semaphore(0)
        self.open = threading.Event()
        self.failure: Exception | None = None
        self.begun = 0  # steps

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        self.begun += 1
        while not self.open.is_set() and not self.gate.acquire(timeout=0.01):
            pass
        if self.failure is not None:
            raise self.failure
        return super().forward(batch)


class ServedWorker:
    """Serves until `close`. Its engine's thread is `engine_thread`."""

    def __init__(self, gated: bool = False, max_length: int = 256, **options: Any) -> None:
        self.model = GatedModel(max_length)
        if not gated:
            self.model.open.set()
        generator = fake_generator(model=self.model, max_length=max_length, **options)
        self.stats: Callable[[], EngineStats] = generator.stats
        self.prompts = generator.prompts
        self._thread = LoopThread()
        self.engine = EngineLoop(generator, self._thread.loop)
        config = EngineConfig("/m", "/m", MODEL, dtype="float32")
        start = Start(DeploymentConfig("acme", config), "worker", replica=3)

        async def make() -> WorkerServer:
            return WorkerServer(
                WorkerStatus(start, lambda: engine_counters(generator.stats())),
                Servicer(self.engine, generator.prompts, config),
            )

        self.server = self._thread.do(make())
        self.port = self._thread.do(self.server.start(0))
        self.address = f"127.0.0.1:{self.port}"
        self.error: BaseException | None = None
        self.engine_thread = threading.Thread(target=self._run)
        self.engine_thread.start()
        self.channel = grpc.insecure_channel(self.address, channel_options())
        self.stub = InferenceStub(self.channel)

    def until(self, condition: Callable[[EngineStats], bool]) -> None:
        """Return as soon as the counters fulfil a condition."""
        deadline = time.monotonic() + SECONDS
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.002)

    def until_step(self, number: int) -> None:
        """Return when the engine is computing its `number`-th step."""
        self.until(lambda stats: self.model.begun >= number)

    def until_idle(self) -> None:
        """Return once no request is left and every block is free."""
        self.until(lambda s: s.running + s.waiting == 0 and s.free_blocks == s.total_blocks)

    def close(self) -> None:
        """End everything."""
        self.model.open.set()
        self.engine.stop()
        self.engine_thread.join(SECONDS)
        assert not self.engine_thread.is_alive()
        self.channel.close()
        self._thread.do(self.server.stop(0))
        self._thread.close()

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:
            self.error = error
