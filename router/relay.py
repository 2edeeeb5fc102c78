"""One request's way to the replicas and back.

GenerateRequest --split--> Submission per prompt --policy--> replica
Generation <--deltas of all submissions, as they come-- replicas

A submission whose replica dies goes on at another one, after the tokens that have come: a worker
that is given them has the same state as the one that made them (see `PartialAnswer`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol, TypeVar

from mii.errors import InternalError, SlowReader, Unavailable
from mii.messages import check_model, check_request, choices_of, new_request_id
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mii.router import request_record
from mii.router.balancer import Choice
from mii.router.limits import MAX_PROMPTS_IN_FLIGHT, RequestLimit
from mii.router.replicas import Answering, Replica, Replicas
from mii.router.request_record import PromptRecord, RequestRecord
from mii.router.requests import split
from mii.router.submission import Submission, begun_answers
from mii.router.transport import WorkerTransport

# Messages that wait for the client are merged up to this: well below the 4 MiB that clients accept
# unless they are told otherwise.
_MAX_MERGED_BYTES: Final = 2**20
# What may wait for the client of a stream, and for each answer in it besides.
_MAX_UNREAD_BYTES: Final = 2**22
_MAX_UNREAD_BYTES_PER_ANSWER: Final = 2**16

# That come before the estimates of what is still to be computed are told of them.
_COUNTED_TOKENS: Final = 16

_Answer = TypeVar("_Answer")


class Sink(Protocol):
    """Takes a generation's messages as they come."""

    @property
    def writable(self) -> bool:
        """Whether the client has room for another message."""

    def send(self, body: bytes) -> None:
        """Send a message, a serialised GenerateResponse."""


class Generation:
    """One request's answers, whose deltas come from all its prompts.

    They are taken by a sink (`send_to`), or by iterating over them. The first error cancels what
    the other prompts are doing, and is raised after the last message.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        deliver: Callable[[Submission, Generation], Awaitable[None]],
        session: str = "",
        max_unread_bytes: int | None = None,
    ) -> None:
        """Set out.

        Args:
            submissions: the request's prompts.
            deliver: sends one of them and passes what comes to `accept` and `put`.
            session: see `Replicas.pick`.
            max_unread_bytes: of messages that wait for the client; None: as many as there are.
        """
        self.session = session
        self.routes: list[Choice] = []  # where prompts went, moves included
        self._deliver = deliver
        self._sink: Sink | None = None
        self._waiting: deque[bytes] = deque()  # messages as they are on the wire
        self._waiting_bytes = 0
        self._max_unread_bytes = max_unread_bytes
        self._news = asyncio.Event()  # a message, an error, or the end
        self._all_accepted = asyncio.Event()
        self._unaccepted = min(len(submissions), MAX_PROMPTS_IN_FLIGHT)
        self._error: Exception | None = None
        self._in_flight = asyncio.Semaphore(MAX_PROMPTS_IN_FLIGHT)
        self._running = len(submissions)
        self._tasks = [asyncio.create_task(self._run(submission)) for submission in submissions]

    async def accepted(self) -> None:
        """Return once the workers have found the request valid, so that only faults can end it."""
        await self._all_accepted.wait()
        if self._error is not None:
            raise self._error

    async def send_to(self, sink: Sink) -> None:
        """Pass all messages on as they come; return when the sink has taken the last one.

        Where the sink has no room, they wait and are merged until `pass_on` is called.
        """
        self._sink = sink
        self.pass_on()
        while self._waiting or (self._running > 0 and self._error is None):
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error

    def pass_on(self) -> None:
        """Give the sink what waits for it, as far as it has room."""
        if self._sink is None:
            return
        while self._waiting and self._sink.writable:
            self._sink.send(self._take())
        if not self._waiting:
            self._news.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerateResponse:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._running == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return GenerateResponse.FromString(self._take())

    @property
    def error(self) -> Exception | None:
        """What has ended it early, if anything has."""
        return self._error

    def accept(self) -> None:
        """Count one more prompt as accepted by its worker."""
        self._unaccepted -= 1
        if self._unaccepted <= 0:
            self._all_accepted.set()

    def put(self, body: bytes) -> None:
        """Pass a message on to the client, or keep it until that has read the others.

        Args:
            body: a serialised GenerateResponse.

        Raises:
            SlowReader: if too much is kept.
        """
        if self._sink is not None:
            if not self._waiting and self._sink.writable:
                self._sink.send(body)
                return
        elif not self._waiting:
            self._news.set()
        self._waiting.append(body)
        self._waiting_bytes += len(body)
        if self._max_unread_bytes is not None and self._waiting_bytes > self._max_unread_bytes:
            self._waiting.clear()
            raise SlowReader(
                f"the client has left {self._waiting_bytes} bytes of its answer unread, and "
                f"{self._max_unread_bytes} are kept for it: read faster, or ask for less at a time"
            )

    async def close(self) -> None:
        """Cancel what is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, submission: Submission) -> None:
        try:
            async with self._in_flight:
                await self._deliver(submission, self)
        except Exception as error:
            self._fail(error)
        self._running -= 1
        if self._running == 0:
            self._news.set()

    def _fail(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._news.set()
        self._all_accepted.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _take(self) -> bytes:
        """Return messages that wait, merged: their fields are repeated, so that they only join."""
        merged: list[bytes] = []
        size = 0
        while self._waiting and (not merged or size + len(self._waiting[0]) <= _MAX_MERGED_BYTES):
            merged.append(self._waiting.popleft())
            size += len(merged[-1])
        self._waiting_bytes -= size
        return b"".join(merged)


class Relay:
    """Sends requests to replicas. What every surface of the router stands on."""

    def __init__(self, replicas: Replicas, model_name: str, limit: RequestLimit) -> None:
        self._replicas = replicas
        self._limit = limit
        self.model_name = model_name

    @property
    def serving(self) -> bool:
        """Whether a request would find a replica."""
        return self._replicas.serving

    @asynccontextmanager
    async def generate(
        self, request: GenerateRequest, timeout: float | None = None, session: str = ""
    ) -> AsyncIterator[Generation]:
        """Answer a request for as long as the block runs; leaving it early cancels the rest.

        It is counted for the client of the current `RequestRecord`.

        Args:
            request: of any number of prompts.
            timeout: seconds until nobody waits for the answer any more.
            session: whose requests all go to one replica while it is there; "": of none.

        Raises:
            InvalidArgument, Overloaded, Unavailable: at once.
        """
        record = request_record.here()
        record.identify(request.request_id or new_request_id())
        check_request(request, self.model_name)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        singles = split(request, record.request_id, record.client)
        submissions = [_submission(single, index, record) for index, single in singles.items()]
        tokens = sum(each.remaining_tokens for each in submissions)
        with self._limit.admit(tokens, record.client) as admitted:
            progressed = partial(self._limit.progress, admitted)
            if request.attempt > 1:
                await self._find_holders(submissions)
            record.begin(len(submissions))
            answers = choices_of(request) * len(submissions)
            generation = Generation(
                submissions,
                lambda submission, to: self._deliver(submission, to, deadline, progressed),
                session,
                # What is not streamed is kept to its end anyway.
                _MAX_UNREAD_BYTES + answers * _MAX_UNREAD_BYTES_PER_ANSWER
                if request.stream
                else None,
            )
            try:
                yield generation
            finally:
                record.end(generation.error)
                await generation.close()

    async def tokenize(self, request: TokenizeRequest, timeout: float | None) -> TokenizeResponse:
        """Have a worker tokenise a prompt."""
        check_model(request.model, self.model_name)
        return await self._ask(lambda worker: worker.tokenize(request, timeout))

    async def detokenize(
        self, request: DetokenizeRequest, timeout: float | None
    ) -> DetokenizeResponse:
        """Have a worker turn ids into text."""
        check_model(request.model, self.model_name)
        return await self._ask(lambda worker: worker.detokenize(request, timeout))

    async def list_models(self, timeout: float | None) -> ListModelsResponse:
        """Ask a worker what it serves."""
        return await self._ask(lambda worker: worker.list_models(timeout))

    async def _ask(self, question: Callable[[WorkerTransport], Awaitable[_Answer]]) -> _Answer:
        while True:
            replica = self._replicas.any()
            try:
                return await question(replica.transport)
            except Unavailable as error:
                self._replicas.mark_down(replica, str(error))

    async def _find_holders(self, submissions: Sequence[Submission]) -> None:
        """Note which replicas have been at these prompts already, for a router before this one."""
        holders = await self._replicas.holders([each.request.request_id for each in submissions])
        for each in submissions:
            each.holder = holders.get(each.request.request_id)

    async def _deliver(
        self,
        submission: Submission,
        to: Generation,
        deadline: float | None,
        progressed: Callable[[float], None],
    ) -> None:
        record = request_record.here()
        while not submission.finished:
            holder = submission.holder if not submission.moves else None
            replica, choice = await self._replicas.pick(
                submission.request.prompts[0], to.session, deadline, holder
            )
            to.routes.append(choice)
            with (
                replica.answering(submission.remaining_tokens) as answering,
                record.attempt(choice) as attempt,
            ):

                def computed(tokens: float, answering: Answering = answering) -> None:
                    answering.computed(tokens)
                    progressed(tokens)

                try:
                    await self._converse(replica, submission, to, deadline, computed)
                except Unavailable as error:
                    self._replicas.mark_down(replica, str(error))
                    blame = 0.0
                    if submission.is_suspect(error):
                        request_id = submission.request.request_id
                        blame = await self._replicas.blame(replica, request_id)
                    attempt.failed(error.code)
                    submission.lose(replica.number, error, blame)
                    record.move(replica.number, error)
                    continue
            if not submission.finished:
                raise InternalError(f"a worker ended {submission} before its answers were whole")

    async def _converse(
        self,
        replica: Replica,
        submission: Submission,
        to: Generation,
        deadline: float | None,
        computed: Callable[[float], None],
    ) -> None:
        now = asyncio.get_running_loop().time()
        timeout = None if deadline is None else max(0.0, deadline - now)
        counted = submission.remaining_tokens

        def accepted() -> None:
            if submission.accept():
                to.accept()

        def received(body: bytes) -> None:
            nonlocal counted
            news = submission.record(body)
            remaining = submission.remaining_tokens
            if counted - remaining >= _COUNTED_TOKENS or not remaining:
                computed(counted - remaining)
                counted = remaining
            if news:
                to.put(news)

        request = submission.next_request()
        await replica.transport.generate(request, timeout, accepted, received)


def _submission(single: GenerateRequest, index: int, record: RequestRecord) -> Submission:
    answers = begun_answers(single)
    awaited = sum(not answer.finish_reason for answer in answers)
    seen = PromptRecord(record, len(answers), awaited, single.stream)
    return Submission(single, index, answers, seen)
