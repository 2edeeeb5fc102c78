"""What the gateway reads: bodies of every kind, and the fields of the OpenAI API."""

from __future__ import annotations

import gzip
import json
from contextlib import closing
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.http_calls import call, connect, post
from tests.router.router_process import RouterProcess

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def _fresh_workers(workers: list[FakeWorker]) -> None:
    """Every test of this module counts requests from zero."""


def messages(content: Any = "a") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def total(workers: list[FakeWorker]) -> int:
    return sum(len(worker.requests) for worker in workers)


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
        connection.putheader("Content-Length", str(2**24 + 1))
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
        (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "best_of": 129}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
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
        *[
            (CHAT, {**messages(), **fields}, field)
            for fields, field in [
                ({"guided_regex": 5}, "guided_regex"),
                ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
                ({"response_format": "json"}, "response_format"),
                ({"response_format": {"type": "xml"}}, "response_format.type"),
                (
                    {"response_format": {"type": "json_schema"}},
                    "response_format.json_schema",
                ),
                (
                    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
                    "response_format.json_schema.schema",
                ),
                (
                    {"response_format": {"type": "json_object"}, "guided_json": {}},
                    "guided_json",
                ),
                (
                    {"response_format": {"type": "json_object"}, "guided_regex": "a"},
                    "guided_json",
                ),
                ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
                ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ]
        ],
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
