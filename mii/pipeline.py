"""The engine in the caller's own process: `mii.pipeline` and `mii.build_hf_engine`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mii.config import DeploymentConfig, EngineConfig
from mii.control import Failed, Message, Ready, Start
from mii.engine.build import build_engine as build_engine_of_rank
from mii.engine.build import build_generator
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.generator import Delta, Generator
from mii.engine.params import check_params
from mii.engine.prompts import ChatPrompt, Prompt
from mii.errors import DeploymentError, InvalidArgument, MIIError
from mii.launchers.local import Child, LocalLauncher, RankLinks
from mii.models.progress import Progress, silent
from mii.models.tokenizer import TokenizerLike
from mii.parallel.links import PlanSender
from mii.parallel.rank import Rank
from mii.response import Response


class OtherRanks:
    """Processes that hold the shares of ranks 1, 2, ... of an engine whose rank 0 is here."""

    def __init__(self, config: EngineConfig) -> None:
        self._links = RankLinks.create(config.tensor_parallel)
        self._children: list[Child] = []
        self._failed: MIIError | None = None
        self._ready = threading.Semaphore(0)
        deployment = DeploymentConfig(deployment_name="pipeline", engine=config)
        try:
            for rank in range(1, config.tensor_parallel):
                start = self._links.give(Start(deployment, "worker", rank=rank))
                child = LocalLauncher().start_worker(start)
                self._children.append(child)
                child.channel.listen(self._note, lambda c=child: self._ended(c))  # type: ignore[misc]
        except BaseException:
            self.end()
            raise
        for link in self._links.others:
            link.close()

    @property
    def rank0(self) -> Rank:
        """This process's place among the ranks."""
        return Rank(
            rank=0,
            size=1 + len(self._children),
            plans=PlanSender(self._links.rank0) if self._children else None,
            shared_memory=self._links.shared_memory_fd,
            peers_alive=self._all_alive,
        )

    def wait_until_ready(self) -> None:
        """Wait for every other rank.

        Raises:
            MIIError: what the first one that failed said.
        """
        for _ in self._children:
            self._ready.acquire()
            self.check()

    def check(self) -> None:
        """Raise what a rank that has failed said, if one has."""
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """Let the ranks end, and see to it that they do."""
        for child in self._children:
            child.killed = True
            child.channel.close()  # a child exits when its channel does
        for child in self._children:
            child.process.wait(timeout=10)
        self._links.close()

    def _all_alive(self) -> bool:
        return all(child.process.poll() is None for child in self._children)

    def _note(self, message: Message) -> None:
        if isinstance(message, Failed):
            self._failed = self._failed or message.to_error()
        if isinstance(message, Ready | Failed):
            self._ready.release()

    def _ended(self, child: Child) -> None:
        child.process.wait()
        if not child.killed:
            self._failed = self._failed or DeploymentError(child.how_it_ended())
        self._ready.release()


@dataclass(frozen=True)
class _Call:
    """One sequence of a call to the pipeline, as it grows."""

    prompt_length: int
    text: list[str]
    token_ids: list[int]
    logprobs: list[Any]


class MIIPipeline:
    """Answers prompts in this process. May be called from several threads; they take turns.

    Made by `mii.pipeline`. Free it with `destroy()`, or use it in a `with` block.
    """

    def __init__(self, generator: Generator, config: EngineConfig, others: OtherRanks) -> None:
        self._generator: Generator | None = generator
        self._config = config
        self._others = others
        self._lock = threading.Lock()

    @property
    def model_path(self) -> Path:
        """The folder that the model was loaded from."""
        return Path(self._config.model_path)

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer."""
        return self._running().prompts.tokenizer

    def __call__(
        self,
        prompts: str | Sequence[str] | None = None,
        streaming_fn: Callable[[list[Response]], None] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> list[Response] | None:
        """Answer prompts.

        Args:
            prompts: one prompt or several.
            streaming_fn: called with a list of one Response for each piece of the answer to the
                only prompt; then nothing is returned.
            prompt_token_ids: token ids in place of prompts.
            messages: a conversation in place of prompts.
            params: sampling parameters, see docs/parameters.md.

        Returns:
            One Response for each prompt (and each of its `n` answers), in order.

        Raises:
            InvalidArgument: for a prompt or parameter that is not allowed.
        """
        inputs = _inputs(prompts, prompt_token_ids, messages)
        if streaming_fn is not None:
            if len(inputs) != 1:
                raise InvalidArgument(
                    f"streaming_fn takes exactly one prompt, and there are {len(inputs)}: call "
                    "once for each",
                    "prompts",
                )
            for piece in self._stream(inputs[0], params):
                streaming_fn([piece])
            return None
        with self._lock:
            calls = self._add(inputs, params)
            finished = {h: r for h, r in self._run(calls) if r.finish_reason != "none"}
        return [finished[handle] for handle in calls]

    def stream(self, prompt: str | Sequence[int], **params: Any) -> Iterator[Response]:
        """Iterate over the pieces of the answer to one prompt; `str()` of each is its text."""
        return self._stream(prompt, params)

    def destroy(self) -> None:
        """Free the model, its cache, and the other ranks. Calls afterwards are errors."""
        with self._lock:
            generator, self._generator = self._generator, None
            if generator is not None:
                generator.close()
                self._others.end()

    def __enter__(self) -> MIIPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    def _stream(self, prompt: Prompt, params: Mapping[str, Any]) -> Iterator[Response]:
        if params.get("n", 1) != 1:
            raise InvalidArgument.of("n", params["n"], "1 when streaming")
        with self._lock:
            for _, response in self._run(self._add([prompt], params), pieces=True):
                yield response

    def _running(self) -> Generator:
        if self._generator is None:
            raise DeploymentError("this pipeline has been destroyed: make a new one")
        return self._generator

    def _add(self, inputs: Sequence[Prompt], params: Mapping[str, Any]) -> dict[int, _Call]:
        """Queue the prompts, all or none of them."""
        generator = self._running()
        checked = check_params(params, "the pipeline")
        requests = [
            request
            for index, prompt in enumerate(inputs)
            for request in generator.prompts.prepare(
                prompt, checked, request_id=f"pipeline-{index}"
            )
        ]
        calls: dict[int, _Call] = {}
        try:
            for request in requests:
                calls[generator.add(request)] = _Call(len(request.prompt_ids), [], [], [])
        except BaseException:
            for handle in calls:
                generator.abort(handle)
            raise
        return calls

    def _run(
        self, calls: Mapping[int, _Call], pieces: bool = False
    ) -> Iterator[tuple[int, Response]]:
        """Step the engine until all calls have ended; on the way out, leave none of them behind."""
        generator, open_calls = self._running(), set(calls)
        try:
            while open_calls:
                try:
                    deltas = generator.step()
                except MIIError:
                    self._others.check()  # a rank's own words say more
                    raise
                for delta in deltas:
                    if delta.failure:
                        raise InvalidArgument(f"an answer cannot go on: {delta.failure}")
                    response = _respond(calls[delta.handle], delta, pieces)
                    if delta.finish_reason is not None:
                        open_calls.discard(delta.handle)
                    if pieces or delta.finish_reason is not None:
                        yield delta.handle, response
        finally:
            for handle in open_calls:
                generator.abort(handle)


def _respond(call: _Call, delta: Delta, piece: bool) -> Response:
    call.text.append(delta.text)
    call.token_ids.extend(delta.token_ids)
    call.logprobs.extend(delta.logprobs)
    return Response(
        generated_text=delta.text if piece else "".join(call.text),
        prompt_length=call.prompt_length,
        generated_length=len(call.token_ids),
        finish_reason=delta.finish_reason or "none",
        token_ids=list(delta.token_ids) if piece else call.token_ids,
        logprobs=list(delta.logprobs) if piece else call.logprobs,
    )


def _inputs(
    prompts: str | Sequence[str] | None,
    prompt_token_ids: Sequence[Sequence[int]] | None,
    messages: Sequence[Mapping[str, Any]] | None,
) -> list[Prompt]:
    given = [x for x in (prompts, prompt_token_ids, messages) if x is not None]
    if len(given) != 1:
        raise InvalidArgument(
            "give exactly one of prompts, prompt_token_ids and messages", "prompts"
        )
    if messages is not None:
        return [ChatPrompt(messages)]
    inputs: list[Any]
    inputs = [prompts] if isinstance(prompts, str) else list(prompts or prompt_token_ids or ())
    if not inputs:
        raise InvalidArgument("the list of prompts is empty: give at least one", "prompts")
    for prompt in inputs:
        wanted, kind = (str, "a string") if prompts is not None else (Sequence, "a list of ids")
        if not isinstance(prompt, wanted):
            raise InvalidArgument.of("prompts", prompt, kind)
    return inputs


def build_pipeline(config: EngineConfig, progress: Progress = silent) -> MIIPipeline:
    """Build the engine of a configuration in which everything has been chosen.

    Raises:
        MIIError: what kept any of the ranks from starting.
    """
    others = OtherRanks(config)
    try:
        generator = build_generator(config, others.rank0, progress)
        others.wait_until_ready()
    except BaseException as error:
        _end_after(error, others)
        raise
    return MIIPipeline(generator, config, others)


def build_engine(config: EngineConfig, progress: Progress = silent) -> InferenceEngineV2:
    """Build the bare engine; its `destroy` ends the other ranks, too.

    Raises:
        MIIError: what kept any of the ranks from starting.
    """
    others = OtherRanks(config)
    try:
        engine = build_engine_of_rank(config, others.rank0, progress)
        others.wait_until_ready()
    except BaseException as error:
        _end_after(error, others)
        raise
    engine.on_destroy(others.end)
    return engine


def _end_after(error: BaseException, others: OtherRanks) -> None:
    """End the other ranks after a start that failed; what one of them said goes first."""
    try:
        if isinstance(error, MIIError):
            others.check()
    finally:
        others.end()
