"""`mii.v1.Inference` on the router: one request's way to the replicas and back."""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from mii.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    MIIError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from mii.messages import MAX_JSON_BYTES, MAX_SAMPLING_BYTES, MAX_SEQUENCES
from mii.proto.inference_pb2 import (
    Chat,
    DetokenizeRequest,
    GenerateRequest,
    ListModelsRequest,
    Prompt,
    SamplingParams,
    SequenceDelta,
    TokenizeRequest,
)
from mii.status import error_of_call
from tests.router.fake_worker import CONTEXT, MODEL, FakeWorker, WorkerThread
from tests.router.router_process import RouterProcess


def request_of(*prompts: str, stream: bool = False, **sampling: Any) -> GenerateRequest:
    request = GenerateRequest(prompts=[Prompt(text=prompt) for prompt in prompts], stream=stream)
    ParseDict(sampling, request.sampling)
    return request


def deltas_of(
    router: RouterProcess, request: GenerateRequest, timeout: float = 20
) -> list[SequenceDelta]:
    messages = router.inference.Generate(request, timeout=timeout)
    return [delta for message in messages for delta in message.deltas]


def error_of(router: RouterProcess, request: GenerateRequest, timeout: float = 20) -> MIIError:
    with pytest.raises(grpc.RpcError) as caught:
        deltas_of(router, request, timeout)
    return error_of_call(caught.value)


def test_without_stream_each_answer_is_one_whole_delta(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    deltas = deltas_of(router, request_of("a b c", "d e", n=2))
    assert {(d.prompt_index, d.choice_index): d.text for d in deltas} == {
        (0, 0): "a b c ",
        (0, 1): "a/1 b/1 c/1 ",
        (1, 0): "d e ",
        (1, 1): "d/1 e/1 ",
    }
    assert len(deltas) == 4
    assert all(d.finish_reason == "stop" and d.usage.prompt_tokens for d in deltas)


def test_streamed_deltas_keep_their_order_and_end_each_answer_once(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    prompts = [" ".join(f"p{p}w{w}" for w in range(p + 1)) for p in range(20)]
    texts: dict[int, str] = defaultdict(str)
    ends: list[int] = []
    for delta in deltas_of(router, request_of(*prompts, stream=True)):
        assert delta.prompt_index not in ends
        texts[delta.prompt_index] += delta.text
        if delta.finish_reason:
            ends.append(delta.prompt_index)
    assert texts == {p: prompt + " " for p, prompt in enumerate(prompts)}
    assert sorted(ends) == list(range(20))


def test_prompts_of_one_request_spread_over_the_replicas(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    deltas_of(router, request_of(*["w"] * 10))
    assert [len(worker.requests) for worker in workers] == [5, 5]
    assert all(len(request.prompts) == 1 for worker in workers for request in worker.requests)


def test_requests_take_turns_on_the_replicas(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    for _ in range(6):
        deltas_of(router, request_of("w"))
    assert [len(worker.requests) for worker in workers] == [3, 3]


def test_requests_of_one_session_go_to_one_replica_and_say_so_when_asked(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    metadata = (("x-session-id", "s-1"), ("x-mii-explain-route", "1"))
    for _ in range(5):
        call = router.inference.Generate(request_of("a"), timeout=20, metadata=metadata)
        list(call)
        told = dict(call.trailing_metadata())["x-mii-route"]
        assert told.endswith("(session)")
    assert sorted(len(worker.requests) for worker in workers) == [0, 5]


def test_an_explicit_seed_is_every_prompts_seed(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    deltas_of(router, request_of("a", "b", "c", seed=7))
    assert [r.sampling.seed for worker in workers for r in worker.requests] == [7, 7, 7]


def test_without_a_seed_every_prompt_gets_its_own(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    deltas_of(router, request_of("a", "a", "a", "a"))
    seeds = {r.sampling.seed for worker in workers for r in worker.requests}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_what_is_asked_reaches_the_worker_unchanged(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    request = request_of("a", stream=True, temperature=0.7, topK=0, stop=["x", "y"], seed=1, n=3)
    request.sampling.logit_bias[5] = -1.5
    request.request_id = "my-id"
    deltas_of(router, request)
    (sent,) = [r for worker in workers for r in worker.requests]
    assert sent == request


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "NaN"}, "temperature"),
        ({"topP": 1.5}, "top_p"),
        ({"topP": "Infinity"}, "top_p"),
        ({"maxNewTokens": 0}, "max_new_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 10000}, "stop"),
        ({"stopTokenIds": [-1]}, "stop_token_ids"),
        ({"logitBias": {"-1": 1.0}}, "logit_bias"),
        ({"logitBias": {"1": 1000.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"minNewTokens": 5, "maxNewTokens": 4}, "min_new_tokens"),
    ],
)
def test_a_bad_parameter_is_refused_by_name_and_reaches_no_worker(
    router: RouterProcess, workers: list[FakeWorker], sampling: dict[str, Any], field: str
) -> None:
    error = error_of(router, request_of("a", **sampling))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert field in str(error)
    assert not any(worker.requests for worker in workers)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([], "prompts"),
        ([{}], "prompts[0]"),
        ([{"text": "a"}, {"tokenIds": {}}], "prompts[1]"),
        ([{"tokenIds": {"ids": [5, -5]}}], "prompts[0]"),
        ([{"chat": {}}], "prompts[0]"),
        ([{"text": "a"}] * (MAX_SEQUENCES + 1), "prompts"),
    ],
)
def test_bad_prompts_are_refused(
    router: RouterProcess, workers: list[FakeWorker], prompts: list[Any], field: str
) -> None:
    error = error_of(router, ParseDict({"prompts": prompts}, GenerateRequest()))
    assert isinstance(error, InvalidArgument)
    assert error.field == field


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompts=[Prompt(chat=Chat(messages_json=" " * MAX_JSON_BYTES))]),
        GenerateRequest(
            prompts=[Prompt(text="a")], sampling=SamplingParams(stop=["x" * MAX_SAMPLING_BYTES])
        ),
        GenerateRequest(
            prompts=[Prompt(text="a")] * MAX_SEQUENCES,
            sampling=SamplingParams(stop=[f"{i:02}" + "x" * 1000 for i in range(64)]),
        ),
    ],
    ids=["conversation", "sampling parameters", "copies of sampling parameters"],
)
def test_what_would_take_long_to_unpack_is_refused_before_that(
    router: RouterProcess, workers: list[FakeWorker], request_: GenerateRequest
) -> None:
    error = error_of(router, request_)
    assert isinstance(error, InvalidArgument)
    assert "bytes" in str(error)


def test_too_many_answers_to_too_many_prompts_are_refused(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    error = error_of(router, request_of(*["a"] * 100, n=100))
    assert isinstance(error, InvalidArgument)
    assert error.field == "n"


@pytest.mark.parametrize("request_id", ["x" * 257, "a\nb", "\u00e9"])
def test_a_request_id_that_is_no_header_is_refused(
    router: RouterProcess, workers: list[FakeWorker], request_id: str
) -> None:
    request = request_of("a")
    request.request_id = request_id
    error = error_of(router, request)
    assert isinstance(error, InvalidArgument)
    assert error.field == "request_id"


@pytest.mark.parametrize("model", ["", "default", MODEL])
def test_the_served_model_is_known_by_its_names(
    router: RouterProcess, workers: list[FakeWorker], model: str
) -> None:
    request = request_of("a")
    request.model = model
    assert deltas_of(router, request)[0].text == "a "


def test_another_model_is_not_found(router: RouterProcess, workers: list[FakeWorker]) -> None:
    request = request_of("a")
    request.model = "gpt-4"
    error = error_of(router, request)
    assert isinstance(error, ModelNotFound)
    assert "gpt-4" in str(error) and MODEL in str(error)


@pytest.mark.parametrize("stream", [False, True])
def test_a_workers_refusal_arrives_as_it_was_said(
    router: RouterProcess, workers: list[FakeWorker], stream: bool
) -> None:
    error = error_of(router, request_of("w " * CONTEXT, stream=stream))
    assert type(error) is ContextLengthExceeded
    assert error.field == "prompt"
    assert f"context is {CONTEXT} tokens" in str(error)


def test_a_full_queue_comes_with_its_hint(router: RouterProcess, workers: list[FakeWorker]) -> None:
    error = error_of(router, request_of("<full>"))
    assert isinstance(error, Overloaded)
    assert error.retry_after == 7.0


def test_a_workers_bug_is_internal_and_keeps_its_words_to_itself(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    request = request_of("<bug>")
    request.request_id = uuid.uuid4().hex
    error = error_of(router, request)
    assert isinstance(error, InternalError)
    assert "secret" not in str(error) and request.request_id in str(error)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_stops_without_an_end_is_an_error(
    router: RouterProcess, workers: list[FakeWorker], stream: bool
) -> None:
    error = error_of(router, request_of("a <truncate>", stream=stream))
    assert isinstance(error, InternalError)
    assert "before its answers were whole" in str(error)


def test_the_first_error_cancels_the_other_prompts(
    router: RouterProcess, workers: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    error = error_of(router, request_of(*["a <hold>"] * 9, "a <full>", stream=True))
    assert isinstance(error, Overloaded)
    for worker in workers:
        worker_thread.until(worker, lambda w: w.running == 0)
    assert sum(worker.ended["cancelled"] for worker in workers) == 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_is_cancelled_at_the_workers(
    router: RouterProcess, workers: list[FakeWorker], worker_thread: WorkerThread, stream: bool
) -> None:
    call = router.inference.Generate(request_of(*["a <hold>"] * 4, stream=stream), timeout=20)
    for worker in workers:
        worker_thread.until(worker, lambda w: w.running == 2)
    call.cancel()
    for worker in workers:
        worker_thread.until(worker, lambda w: w.ended["cancelled"] == 2)


def test_a_deadline_is_passed_on(
    router: RouterProcess, workers: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    error = error_of(router, request_of("a <hold>", "b <hold>"), timeout=1.0)
    assert isinstance(error, DeadlineExceeded)
    for worker in workers:
        (seconds,) = worker.deadlines
        assert seconds is not None and 0 < seconds < 2.0  # gRPC rounds up
        worker_thread.until(worker, lambda w: w.running == 0)


def test_a_request_without_a_deadline_has_none_at_the_worker(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    list(router.inference.Generate(request_of("a")))
    assert [d for worker in workers for d in worker.deadlines] == [None]


def test_a_stream_tells_that_it_is_accepted_before_its_first_token(
    router: RouterProcess, workers: list[FakeWorker], worker_thread: WorkerThread
) -> None:
    request = request_of("<hold> a", "<hold> b", stream=True)
    request.request_id = "id-1"
    call = router.inference.Generate(request, timeout=20)
    assert ("mii-request-id", "id-1") in [tuple(pair) for pair in call.initial_metadata()]
    for worker in workers:
        worker_thread.do(worker.release.set)
    assert len([d for m in call for d in m.deltas if d.finish_reason]) == 2


def test_a_worker_that_does_not_tell_so_is_answered_from_all_the_same(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    deltas = deltas_of(router, request_of("<lazy> a b", stream=True))
    assert "".join(d.text for d in deltas) == "<lazy> a b "


def test_more_prompts_than_may_be_in_flight_are_all_answered(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    prompts = [f"{index} {'x' * 3000}" for index in range(2000)]
    deltas = deltas_of(router, request_of(*prompts), timeout=100)
    assert {d.prompt_index: d.text for d in deltas} == {
        index: prompt + " " for index, prompt in enumerate(prompts)
    }


def test_messages_of_many_megabytes_pass(router: RouterProcess, workers: list[FakeWorker]) -> None:
    prompt = "x" * 20_000_000
    assert deltas_of(router, request_of(prompt))[0].text == prompt + " "


def test_questions_to_the_tokenizer_are_passed_on(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    answer = router.inference.Tokenize(TokenizeRequest(prompt=Prompt(text="a bb")), timeout=20)
    assert list(answer.ids) == [1, 2]
    text = router.inference.Detokenize(DetokenizeRequest(ids=[1, 2]), timeout=20).text
    assert text == "id1 id2"
    models = router.inference.ListModels(ListModelsRequest(), timeout=20).models
    assert [(model.id, model.engine) for model in models] == [(MODEL, "v2")]


def test_without_any_replica_the_answer_is_unavailable_at_once(start_router: Any) -> None:
    router = start_router(enable_rest=False)
    error = error_of(router, request_of("a"))
    assert isinstance(error, Unavailable)
    assert "starting" in str(error)
