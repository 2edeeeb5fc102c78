"""The gateway as plain HTTP: bodies, statuses, routes of DeepSpeed-MII, health."""

from __future__ import annotations

import gzip
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


# bodies


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b"{} x",
        b'{"prompts": NaN}',
        b'{"temperature": 1e999}',
        b'{"prompts": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b"a=b&c=d",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object_is_a_bad_request(
    router: RouterProcess, workers: list[FakeWorker], path: str, body: bytes
) -> None:
    answer = call(router, "POST", path, body, {"Content-Type": "application/json"})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert total(workers) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": "application/json; charset=UTF-8"},
    ],
)
def test_json_is_read_whatever_it_is_called(router: RouterProcess, headers: dict[str, str]) -> None:
    assert call(router, "POST", GENERATE, b'{"prompts": "a"}', headers).status == 200


def test_another_charset_is_refused(router: RouterProcess) -> None:
    headers = {"Content-Type": "application/json; charset=latin-1"}
    answer = call(router, "POST", GENERATE, b'{"prompts": "a"}', headers)
    assert answer.status == 400
    assert "UTF-8" in answer.error["message"]


def test_a_body_in_gzip_is_read(router: RouterProcess) -> None:
    data = gzip.compress(b'{"prompts": "a"}')
    assert call(router, "POST", GENERATE, data, {"Content-Encoding": "gzip"}).status == 200


def test_a_body_that_says_gzip_and_is_not_is_a_bad_request(router: RouterProcess) -> None:
    answer = call(router, "POST", GENERATE, b"junk", {"Content-Encoding": "gzip"})
    assert answer.status == 400


def test_a_body_in_chunks_is_read(router: RouterProcess) -> None:
    with closing(connect(router)) as connection:
        connection.request("POST", GENERATE, iter([b'{"prompts"', b': "a"}']), encode_chunked=True)
        assert connection.getresponse().status == 200


def test_a_body_beyond_the_limit_is_refused_unread(router: RouterProcess) -> None:
    with closing(connect(router)) as connection:
        connection.putrequest("POST", GENERATE)
        connection.putheader("Content-Length", str(2**27 + 1))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "request_too_large"


def test_a_body_of_many_megabytes_is_read(router: RouterProcess) -> None:
    answer = post(router, GENERATE, {"prompts": "x" * 10_000_000})
    assert len(answer.json[0]["generated_text"]) == 10_000_001


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("cut", [b"a\\ud83d b", b"\\udbc0", b"\\\\\\ud83d"])
def test_a_lone_surrogate_is_read_as_the_replacement_character(
    router: RouterProcess, cut: bytes, stream: bytes
) -> None:
    body = b'{"prompt": "%b", "stop": "\\ud83d", "stream": %b}' % (cut, stream)
    answer = call(router, "POST", COMPLETIONS, body)
    assert answer.status == 200
    assert b"\\ufffd" in answer.body


def test_a_lone_surrogate_in_a_model_name_is_just_an_unknown_model(router: RouterProcess) -> None:
    answer = call(router, "POST", COMPLETIONS, b'{"prompt": "a", "model": "\\ud83d"}')
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"


@pytest.mark.parametrize(
    "text", ["\u00e9", "\U0001f600", "a\u2028b\u2029c\u0085d", "\x00", '"\\'], ids=ascii
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_comes_back_as_it_went_in_and_as_ascii(
    router: RouterProcess, text: str, stream: bool
) -> None:
    answer = post(router, COMPLETIONS, {"prompt": text, "stream": stream})
    whole = answer.events[0] if stream else answer.json
    assert whole["choices"][0]["text"] == text + " "


# the OpenAI API's fields


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "model": 5}, "model"),
        (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": 1}, "stream_options"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": {"role": "user"}}, "messages"),
        (CHAT, {"messages": ["a"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, messages(5), "messages[0].content"),
        (CHAT, messages([{"type": "image_url", "image_url": {}}]), "messages[0].content[0]"),
        (CHAT, messages([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
        (CHAT, {**messages(), "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**messages(), "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**messages(), "logprobs": 1}, "logprobs"),
        (CHAT, {**messages(), "chat_template_kwargs": 1}, "chat_template_kwargs"),
        (
            CHAT,
            {**messages(), "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (CHAT, {**messages(), "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {**messages(), "functions": [{}]}, "functions"),
        (CHAT, {**messages(), "guided_regex": "a+"}, "guided_regex"),
        *[
            (COMPLETIONS, {"prompt": "a", name: value}, name)
            for name, values in {
                "temperature": [-1, 999999, "1", True],
                "top_p": [-0.1, 1.1],
                "top_k": [-5, 2**63, 1.5],
                "min_p": [2],
                "repetition_penalty": [0, -1],
                "presence_penalty": [2.5],
                "seed": [-1, 2**64, 1.5],
                "n": [0, -1, 129, True],
                "max_tokens": [0, -1, 2**63, 1.5, "10", True],
                "stop": [5, [""], ["x"] * 5000, "x" * 5000],
                "stop_token_ids": [[-1], 5],
                "logit_bias": [{"-1": 5}, {"abc": 1}, {"5": "x"}, {"5": 1000}, [1]],
            }.items()
            for value in values
        ],
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_refused_by_name_before_the_stream_begins(
    router: RouterProcess,
    workers: list[FakeWorker],
    path: str,
    body: dict[str, Any],
    param: str,
    stream: bool,
) -> None:
    if stream and "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": True}
    answer = post(router, path, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert param in answer.error["message"]
    assert len(answer.body) < 1000
    assert total(workers) == 0


def test_null_fields_count_as_left_out(router: RouterProcess) -> None:
    names = ["max_tokens", "temperature", "top_k", "seed", "stop", "n", "logit_bias", "logprobs"]
    body = {"prompt": "a", "stream": None, "model": None, **dict.fromkeys(names)}
    assert post(router, COMPLETIONS, body).status == 200


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
def test_a_stream_without_usage_has_no_usage(router: RouterProcess, options: Any) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": options}
    events = post(router, COMPLETIONS, body).events
    assert len(events) == 2 and "usage" not in events[0]


def test_integers_of_any_size_pass_through_messages(router: RouterProcess) -> None:
    body = {**messages(), "chat_template_kwargs": {"big": 2**70}}
    assert post(router, CHAT, body).status == 200


def test_the_last_message_can_be_continued(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    post(router, CHAT, {**messages(), "continue_final_message": True})
    post(router, CHAT, messages())
    chats = [r.prompts[0].chat for worker in workers for r in worker.requests]
    assert sorted((c.continue_final_message, c.add_generation_prompt) for c in chats) == [
        (False, True),
        (True, False),
    ]


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
            worker_thread.do(lambda worker=worker: worker.until(lambda w: w.running == 1))
    for worker in workers:
        worker_thread.do(lambda worker=worker: worker.until(lambda w: w.ended["cancelled"] == 1))


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
