"""The gateway as plain HTTP: DeepSpeed-MII's routes, streams and their ends, health."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from tests.router.conftest import StartRouter
from tests.router.fake_worker import CONTEXT, MODEL, FakeWorker, WorkerThread
from tests.router.http_calls import call, connect, get, post
from tests.router.router_process import DEPLOYMENT, RouterProcess

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def _fresh_workers(workers: list[FakeWorker]) -> None:
    """Every test of this module counts requests from zero."""


def messages(content: Any = "a") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def total(workers: list[FakeWorker]) -> int:
    return sum(len(worker.requests) for worker in workers)


# DeepSpeed-MII's routes


def test_generate_answers_every_prompt_in_order(router: RouterProcess) -> None:
    answer = post(router, GENERATE, {"prompts": ["a b", "c"], "max_new_tokens": 128})
    assert answer.status == 200
    assert answer.json == [
        {
            "generated_text": "a b ",
            "prompt_length": 2,
            "generated_length": 2,
            "finish_reason": "stop",
        },
        {
            "generated_text": "c ",
            "prompt_length": 1,
            "generated_length": 1,
            "finish_reason": "stop",
        },
    ]


def test_generate_answers_one_prompt_with_a_list_too(router: RouterProcess) -> None:
    assert [each["generated_text"] for each in post(router, GENERATE, {"prompts": "a"}).json] == [
        "a "
    ]


def test_generate_takes_token_ids(router: RouterProcess) -> None:
    answer = post(router, GENERATE, {"prompt_token_ids": [[4, 5], [6]]})
    assert [each["generated_text"] for each in answer.json] == ["id4 id5 ", "id6 "]


def test_generate_streams(router: RouterProcess) -> None:
    events = post(router, GENERATE, {"prompts": ["a b", "c"], "stream": True}).events
    assert events.pop() == "[DONE]"
    first = [event for event in events if event["prompt_index"] == 0]
    assert [event["generated_text"] for event in first] == ["a ", "b "]
    assert [event["finish_reason"] for event in first] == ["none", "stop"]
    assert first[-1]["prompt_length"] == 2 and first[-1]["generated_length"] == 2


def test_generate_sends_deepspeed_miis_defaults(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    post(router, GENERATE, {"prompts": "a"})
    (request,) = [request for worker in workers for request in worker.requests]
    assert request.defaults == 0
    assert not request.sampling.HasField("max_new_tokens")


@pytest.mark.parametrize("path", [f"/mii/{DEPLOYMENT}", f"/mii/{DEPLOYMENT.replace('/', '%2F')}"])
def test_a_deployment_answers_under_its_name(router: RouterProcess, path: str) -> None:
    assert post(router, path, {"prompts": ["a"]}).json[0]["generated_text"] == "a "


def test_another_deployment_is_not_found(router: RouterProcess) -> None:
    answer = post(router, "/mii/other", {"prompts": ["a"]})
    assert answer.status == 404
    assert answer.error["code"] == "deployment_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"request": {"query": ["a"]}}, "prompts"),
        ({"prompt": "a"}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": None}, "prompts"),
        ({"prompts": ["a", 5]}, "prompts"),
        ({"prompts": {"a": "b"}}, "prompts"),
        ({"prompts": ["a"], "prompt_token_ids": [[1]]}, "prompts"),
        ({"prompt_token_ids": [[]]}, "prompt_token_ids[0]"),
        ({"prompt_token_ids": [[-1]]}, "prompt_token_ids[0]"),
        ({"prompt_token_ids": [[2**40]]}, "prompt_token_ids[0]"),
        ({"prompts": ["a"] * 4097}, "prompts"),
        ({"prompts": "a", "max_new_tokenz": 5}, "max_new_tokenz"),
        ({"prompts": "a", "stream": "yes"}, "stream"),
        ({"prompts": "a", "top_p": 0.5, "temperature": "hot"}, "temperature"),
    ],
)
def test_a_generate_body_of_another_shape_is_refused_by_name(
    router: RouterProcess, workers: list[FakeWorker], body: Any, param: str
) -> None:
    answer = post(router, GENERATE, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert param in answer.error["message"]
    assert total(workers) == 0


# streams and their ends


def test_an_error_in_mid_stream_is_an_event_and_no_end_mark(router: RouterProcess) -> None:
    answer = post(router, COMPLETIONS, {"prompt": "a <bug> b", "stream": True})
    assert answer.status == 200
    *pieces, last = answer.events
    assert [piece["choices"][0]["text"] for piece in pieces] == ["a "]
    assert last["error"]["type"] == "server_error"
    assert "secret" not in last["error"]["message"]


def test_an_error_before_the_first_piece_is_a_status_if_the_worker_has_not_accepted_yet(
    router: RouterProcess,
) -> None:
    answer = post(router, COMPLETIONS, {"prompt": "<bug> <lazy>", "stream": True})
    assert answer.status == 500
    assert answer.error["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_no_longer_worked_for(
    router: RouterProcess, workers: list[FakeWorker], worker_thread: WorkerThread, stream: bool
) -> None:
    body = json.dumps({"prompts": ["a <hold>", "b <hold>"], "stream": stream})
    with closing(connect(router)) as connection:
        connection.request("POST", GENERATE, body)
        for worker in workers:
            worker_thread.until(worker, lambda w: w.running == 1)
    for worker in workers:
        worker_thread.until(worker, lambda w: w.ended["cancelled"] == 1)


def test_a_stream_is_not_to_be_cached(router: RouterProcess) -> None:
    answer = post(router, COMPLETIONS, {"prompt": "a", "stream": True})
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers


# what is served, and how it is


def test_health_follows_the_replicas(start_router: StartRouter, workers: list[FakeWorker]) -> None:
    router = start_router()
    down = get(router, "/health")
    assert down.status == 503 and down.headers["retry-after"]
    assert get(router, "/live").status == 200
    router.tell(workers[0])
    router.wait_for(1)
    assert get(router, "/health").status == 200
    head = call(router, "HEAD", "/health")
    assert head.status == 200 and head.body == b""


def test_requests_without_a_replica_are_unavailable(start_router: StartRouter) -> None:
    router = start_router()
    for path, body in [
        (GENERATE, {"prompts": "a"}),
        (GENERATE, {"prompts": "a", "stream": True}),
        (COMPLETIONS, {"prompt": "a", "stream": True}),
        (CHAT, messages()),
    ]:
        answer = post(router, path, body)
        assert answer.status == 503
        assert answer.headers["retry-after"] and answer.error["code"] == "unavailable"
    assert get(router, "/v1/models").status == 503


@pytest.mark.parametrize("name", [MODEL, MODEL.replace("/", "%2F"), "default"])
def test_a_model_is_found_by_its_names(router: RouterProcess, name: str) -> None:
    model = get(router, f"/v1/models/{name}").json
    assert model["id"] == MODEL and model["engine"] == "v2" and model["max_model_len"] == CONTEXT


def test_the_root_tells_what_is_served(router: RouterProcess) -> None:
    root = get(router, "/").json
    assert root["model"] == MODEL and root["deployment"] == DEPLOYMENT and root["serving"]
    assert {GENERATE, CHAT, COMPLETIONS, "/v1/models", "/health"} <= set(root["routes"])


def test_a_path_that_is_nothing_is_not_found(router: RouterProcess) -> None:
    for path in ("/nothing", "/%ff%fe", "/" + "x" * 2000):
        answer = get(router, path)
        assert answer.status == 404
        assert answer.error["code"] == "not_found"


def test_a_wrong_method_is_told_the_right_one(router: RouterProcess) -> None:
    answer = get(router, GENERATE)
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    assert answer.error["code"] == "method_not_allowed"


def test_every_answer_has_a_request_id(router: RouterProcess) -> None:
    answers = [
        get(router, "/nothing"),
        post(router, COMPLETIONS, {}),
        post(router, COMPLETIONS, {"prompt": "a", "stream": True}),
    ]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


def test_a_clients_request_id_is_kept(router: RouterProcess, workers: list[FakeWorker]) -> None:
    answer = call(router, "POST", GENERATE, b'{"prompts": "a"}', {"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert [r.request_id for worker in workers for r in worker.requests] == ["mine-1"]


def test_a_request_id_that_is_too_long_is_refused(router: RouterProcess) -> None:
    answer = call(router, "POST", GENERATE, b'{"prompts": "a"}', {"X-Request-Id": "x" * 300})
    assert answer.status == 400
    assert answer.error["param"] == "request_id"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_where_a_request_went_is_told_when_asked(
    router: RouterProcess, path: str, stream: bool
) -> None:
    body = {"stream": stream, **({"prompts": ["a"]} if path == GENERATE else messages())}
    headers = {"Content-Type": "application/json", "X-Session-Id": "s-1"}
    plain = call(router, "POST", path, json.dumps(body).encode(), headers)
    assert "x-mii-route" not in plain.headers
    headers["X-MII-Explain-Route"] = "yes"
    told = call(router, "POST", path, json.dumps(body).encode(), headers).headers["x-mii-route"]
    assert told in ("replica 0 (session)", "replica 1 (session)")
    headers["X-Session-Id"] = "s" * 1000
    assert call(router, "POST", path, json.dumps(body).encode(), headers).status == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_a_request_ends_at_its_timeout_and_is_cancelled_at_the_worker(
    router: RouterProcess,
    workers: list[FakeWorker],
    worker_thread: WorkerThread,
    path: str,
    stream: bool,
) -> None:
    prompt = {"prompts": ["a <hold>"]} if path == GENERATE else {"prompt": "a <hold>"}
    body = json.dumps({"stream": stream, **prompt}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Timeout": "0.2"}
    answer = call(router, "POST", path, body, headers)
    if stream:
        assert answer.status == 200 and answer.events[-1]["error"]["code"] == "deadline_exceeded"
    else:
        assert answer.status == 504 and answer.error["code"] == "deadline_exceeded"
    (worker,) = [each for each in workers if each.requests]
    worker_thread.until(worker, lambda w: w.running == 0)
    for wrong in ("soon", "0", "-1", "nan"):
        assert (
            call(router, "POST", path, body, {**headers, "X-Request-Timeout": wrong}).status == 400
        )
