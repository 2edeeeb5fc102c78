"""A worker without an engine: a server of `grpc.aio`'s that answers a prompt with its own words.

Each word is one token. Words in angle brackets make it misbehave, see `FakeWorker._act`.
Run as a program it serves until it is killed, and prints its port first.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from mii.errors import ContextLengthExceeded, InvalidArgument, Overloaded, Unavailable
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Prompt,
    SequenceDelta,
    TokenizeRequest,
    TokenizeResponse,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from mii.proto.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from mii.proto.worker_pb2 import HoldingRequest, HoldingResponse
from mii.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from mii.status import known_error, status_of

MODEL = "acme/echo-1"
CONTEXT = 1000  # words
_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 2**27)]

Context = grpc.aio.ServicerContext[Any, Any]


@asynccontextmanager
async def errors_as_status(context: Context, request_id: str) -> AsyncIterator[None]:
    """End the call of `context` with the right status when the block raises."""
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        status = status_of(known_error(error, request_id))
        await context.abort(status.code, status.message, status.metadata)


def words_of(prompt: Prompt) -> list[str]:
    """The words that a prompt is answered with."""
    if prompt.HasField("token_ids"):
        return [f"id{token}" for token in prompt.token_ids.ids]
    if prompt.HasField("chat"):
        messages = json.loads(prompt.chat.messages_json)
        return " ".join(f"{each['role']}: {each['content']}" for each in messages).split(" ")
    return prompt.text.split(" ")


class FakeWorker(InferenceServicer, WorkerServicer):
    """See the module. Its attributes may be read from any thread."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[GenerateRequest] = []
        self.held: set[str] = set()  # ids of requests that it says it has answers of
        self.deadlines: list[float | None] = []
        self.running = 0
        self.ended = Counter[str]()  # how calls ended: whole, cancelled, failed
        self.release = asyncio.Event()  # lets <hold> go on
        self.release_again = asyncio.Event()  # lets <hold-again> go on
        self._changed = asyncio.Condition()
        self.health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Serve, on the port of last time if there was one."""
        self._server = grpc.aio.server(options=_OPTIONS)
        add_InferenceServicer_to_server(self, self._server)
        add_WorkerServicer_to_server(self, self._server)
        add_HealthServicer_to_server(self.health, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port or self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Cut all connections."""
        assert self._server is not None
        await self._server.stop(0)

    async def until(self, condition: Callable[[FakeWorker], bool]) -> None:
        """Return once `condition` of this worker holds; looks again whenever a call begins or ends.

        Raises:
            TimeoutError: if it does not come to hold.
        """
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def set_serving(self, serving: bool) -> None:
        """Say so in the health check."""
        states = HealthCheckResponse.ServingStatus
        await self.health.set("", states.SERVING if serving else states.NOT_SERVING)

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.running += 1
        await self._notify()
        end = "failed"
        try:
            async with errors_as_status(context, request.request_id):
                async for delta in self._deltas(request, context):
                    yield GenerateResponse(deltas=[delta])
                end = "whole"
        except (asyncio.CancelledError, GeneratorExit):
            end = "cancelled"
            raise
        finally:
            self.running -= 1
            self.ended[end] += 1
            self._notifying = asyncio.create_task(self._notify())

    async def _deltas(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[SequenceDelta]:
        words = words_of(request.prompts[0])
        if len(words) >= CONTEXT:
            message = f"the prompt has {len(words)} tokens, and the context is {CONTEXT} tokens"
            raise ContextLengthExceeded(message, "prompt")
        if "<refuse>" in words:
            raise InvalidArgument("top_k = 9 is not allowed", "top_k")
        if request.stream and "<lazy>" not in words:
            await context.send_initial_metadata((("mii-request-id", request.request_id),))
        choices = request.sampling.n if request.sampling.HasField("n") else 1
        begun = {answer.choice_index: len(answer.token_ids) for answer in request.resume}
        for choice in begun or range(choices):
            whole: SequenceDelta | None = None
            async for delta in self._sequence(request, words, choice, begun.get(choice, 0)):
                if request.stream:
                    yield delta
                elif whole is None:
                    whole = delta
                else:
                    delta.text = whole.text + delta.text
                    whole.MergeFrom(delta)
            if whole is not None:
                yield whole

    async def _sequence(
        self, request: GenerateRequest, words: list[str], choice: int, begun: int
    ) -> AsyncIterator[SequenceDelta]:
        sampling = request.sampling
        limit = sampling.max_new_tokens if sampling.HasField("max_new_tokens") else len(words)
        answer = words[:limit]
        for index, word in list(enumerate(answer))[begun:]:
            await self._act(word, choice)
            text = word + " " if choice == 0 else f"{word}/{choice} "
            if index == 0 and sampling.return_full_text:
                text = " ".join(words) + "|" + text
            delta = SequenceDelta(choice_index=choice, text=text, token_ids=[index])
            if sampling.HasField("logprobs"):
                delta.logprobs.append(_logprobs(index, text, sampling.logprobs))
                if "<worse-first>" in words:  # the later a choice, the more probable
                    delta.logprobs[0].sampled.logprob = -1.0 / (choice + 1) if choice < 2 else -2.0
            if index == len(answer) - 1 and "<truncate>" not in words:
                delta.finish_reason = "length" if len(answer) < len(words) else "stop"
                delta.usage.CopyFrom(
                    Usage(
                        prompt_tokens=len(words),
                        completion_tokens=len(answer),
                        queue_seconds=0.25,
                        total_seconds=1.0,
                    )
                )
            yield delta

    async def _act(self, word: str, choice: int) -> None:
        match word:
            case "<hold>":
                await self.release.wait()
            case "<hold-second>" if choice == 1:
                await self.release.wait()
            case "<hold-again>":
                await self.release_again.wait()
            case "<bug>":
                raise ZeroDivisionError("secret words")
            case "<full>":
                raise Overloaded("the queue is full", 7.0)
            case "<gone>":
                raise Unavailable("the engine is dead")

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        ids = [len(word) for word in words_of(request.prompt)]
        return TokenizeResponse(ids=ids, max_length=CONTEXT)

    async def Holding(self, request: HoldingRequest, context: Context) -> HoldingResponse:
        return HoldingResponse(request_ids=self.held.intersection(request.request_ids))

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        return DetokenizeResponse(text=" ".join(f"id{token}" for token in request.ids))

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        model = Model(id=MODEL, engine="v2", created=7, max_length=CONTEXT, dtype="float32")
        model.tool_format = "hermes"
        return ListModelsResponse(models=[model])


def _logprobs(index: int, text: str, top: int) -> TokenLogprobs:
    sampled = TokenLogprob(token_id=index, logprob=-0.5, token=text.encode())
    others = [
        TokenLogprob(token_id=100 + k, logprob=-1.0 - k, token=b"t%d" % k) for k in range(top)
    ]
    return TokenLogprobs(sampled=sampled, top=others)


class WorkerThread:
    """Fake workers in a thread of their own, so that any test in any loop may talk to them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], Any]) -> Any:
        """Call `work` in the thread, await what it returns if that can be awaited."""
        done: Future[Any] = asyncio.run_coroutine_threadsafe(_call(work), self._loop)
        return done.result(20)

    def start_worker(self) -> FakeWorker:
        worker: FakeWorker = self.do(FakeWorker)
        self.do(worker.start)
        return worker

    def until(self, worker: FakeWorker, condition: Callable[[FakeWorker], bool]) -> None:
        """See `FakeWorker.until`."""
        self.do(lambda: worker.until(condition))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


async def _call(work: Callable[[], Any]) -> Any:
    result = work()
    return await result if asyncio.iscoroutine(result) else result


async def _serve(port: int) -> None:
    worker = FakeWorker()
    await worker.start(port)
    print(worker.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
