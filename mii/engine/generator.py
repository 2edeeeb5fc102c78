"""Generation as users see it: requests in, pieces of text out, over the engine's ids."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass

from mii.engine.detokenizer import Detokenizer
from mii.engine.engine_v2 import InferenceEngineV2
from mii.engine.metrics import EngineStats
from mii.engine.plan import TokenLogprobs
from mii.engine.prompts import GenerationRequest, PromptProcessor
from mii.engine.sampler import SamplingState
from mii.engine.scheduler import ScheduledRequest, TokenUpdate
from mii.engine.stopping import StopMatcher
from mii.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Usage:
    """What one sequence took, when it has ended."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, out of the prefix cache
    queue_seconds: float  # from arrival to the first computed token
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one sequence."""

    handle: int
    text: str  # safe to show: whole characters, no part of a possible stop string
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one for each token id, if asked for
    finish_reason: str | None  # "stop" or "length" in the last delta
    stop_match: str | None  # the stop string that ended the sequence
    usage: Usage | None  # in the last delta
    failure: str = ""  # why the sequence cannot go on, if it cannot: then all else says nothing


@dataclass(slots=True)
class _Sequence:
    """One sequence under way."""

    request: GenerationRequest
    scheduled: ScheduledRequest
    sampling: SamplingState
    arrived: float
    detokenizer: Detokenizer | None
    stops: StopMatcher
    text: str = ""  # what the next delta begins with
    first_token: float | None = None
    num_generated: int = 0


class Generator:
    """An engine with its text side. Driven from one thread.

    Args:
        engine: computes ids.
        prompts: prepares requests; its tokenizer turns ids back into text.
        max_requests: requests known at one time, waiting ones included.
    """

    def __init__(
        self, engine: InferenceEngineV2, prompts: PromptProcessor, max_requests: int
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self._max_requests = max_requests
        self._sequences: dict[int, _Sequence] = {}
        self._held = Counter[str]()  # of them, by each client
        self._handles = itertools.count(1)

    def add(self, request: GenerationRequest) -> int:
        """Queue a request; return the handle that its deltas carry.

        Raises:
            InvalidArgument: if the engine could never hold it.
            Overloaded: if too many requests are known already, of all or of its client.
        """
        self._check_room(request)
        handle = next(self._handles)
        scheduled = ScheduledRequest(
            uid=handle,
            prompt_ids=request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            stop_ids=request.stop_ids,
            answer_ids=request.answer_ids,
            client=request.client,
        )
        sampling = SamplingState.of(request)
        self.engine.add_request(scheduled, sampling)
        tokenizer = self.prompts.optional_tokenizer
        self._held[request.client] += 1
        sequence = self._sequences[handle] = _Sequence(
            request=request,
            scheduled=scheduled,
            sampling=sampling,
            arrived=time.monotonic(),
            detokenizer=Detokenizer(tokenizer) if tokenizer is not None else None,
            stops=StopMatcher(request.stop_strings),
            text=request.prefix_text,
            num_generated=len(request.answer_ids),
        )
        if sequence.detokenizer is not None:
            for token in request.answer_ids:  # one at a time, as they came: the same is held back
                sequence.stops.push(sequence.detokenizer.push((token,)))
        return handle

    def abort(self, handle: int) -> None:
        """Stop a request and free its blocks at once. Unknown handles are ignored."""
        self._forget(handle)
        self.engine.remove_request(handle)

    def step(self) -> list[Delta]:
        """Run one engine step and return what it added, one delta for each sequence."""
        deltas = []
        for update, logprobs in self.engine.step():
            sequence = self._sequences[update.uid]
            delta = self._advance(sequence, update, logprobs)
            if delta.finish_reason is not None or delta.failure:
                self._forget(update.uid)
                if update.finish_reason is None:  # a stop string ended it, not the engine
                    self.engine.remove_request(update.uid)
            deltas.append(delta)
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.engine.has_work

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters. May be called from any thread."""
        return self.engine.stats()

    def close(self) -> None:
        """Let the other ranks end. The generator cannot be used afterwards."""
        self.engine.destroy()

    def _check_room(self, request: GenerationRequest) -> None:
        room = self._max_requests - len(self._sequences)
        if room <= 0:
            raise Overloaded(f"{self._max_requests} requests are running or waiting: try later")
        # As the router shares out what it takes (see its RequestLimit), which counts requests and
        # not their prompts and answers. One that was taken once is not refused when it is moved.
        client, held = request.client, self._held[request.client]
        if client and held and not request.moved and held + 1 > room - 1:
            raise Overloaded(
                f"the client of this key, {client!r}, has {held} answers running or waiting in "
                f"this replica, which is its share of {self._max_requests} "
                "(max_tracked_sequences); the rest is kept for other clients: try later"
            )

    def _forget(self, handle: int) -> None:
        sequence = self._sequences.pop(handle, None)
        if sequence is None:
            return
        client = sequence.request.client
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def _advance(
        self, sequence: _Sequence, update: TokenUpdate, logprobs: TokenLogprobs | None
    ) -> Delta:
        failure = sequence.sampling.failure
        if failure:
            return Delta(update.uid, "", (), (), None, None, None, failure)
        sequence.num_generated += 1
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
        reason = update.finish_reason
        piece, match = self._text_of(sequence, update)
        if match is not None:
            reason = "stop"
        text, sequence.text = sequence.text + piece, ""
        return Delta(
            handle=update.uid,
            text=text,
            token_ids=(update.token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            stop_match=match,
            usage=self._usage(sequence) if reason is not None else None,
        )

    def _text_of(self, sequence: _Sequence, update: TokenUpdate) -> tuple[str, str | None]:
        """Return the text that the token makes safe to show, and the stop string it completes."""
        if sequence.detokenizer is None:
            return "", None
        piece = ""
        if update.finish_reason != "stop":  # the text of a token that ends the answer is not shown
            piece = sequence.detokenizer.push((update.token_id,))
        if update.finish_reason is not None:
            piece += sequence.detokenizer.flush()
        text, match = sequence.stops.push(piece)
        if update.finish_reason is not None and match is None:
            rest, match = sequence.stops.flush()
            text += rest
        return text, match

    def _usage(self, sequence: _Sequence) -> Usage:
        now, arrived = time.monotonic(), sequence.arrived
        admitted = sequence.scheduled.admitted_at or now
        return Usage(
            prompt_tokens=len(sequence.request.prompt_ids),
            completion_tokens=sequence.num_generated,
            cached_tokens=sequence.scheduled.num_cached,
            queue_seconds=admitted - arrived,
            time_to_first_token_seconds=(sequence.first_token or now) - arrived,
            total_seconds=now - arrived,
        )
