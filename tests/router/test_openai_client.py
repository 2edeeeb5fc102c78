"""The gateway through the official Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.router.conftest import StartRouter
from tests.router.fake_worker import CONTEXT, MODEL, FakeWorker
from tests.router.router_process import RouterProcess


@pytest.fixture
def client(router: RouterProcess, workers: list[FakeWorker]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        yield client


def ask(content: str = "a b c") -> list[Any]:
    return [{"role": "user", "content": content}]


def requests_of(workers: list[FakeWorker]) -> int:
    return sum(len(worker.requests) for worker in workers)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "mii")
    assert model.model_dump()["engine"] == "v2"


@pytest.mark.parametrize("name", [MODEL, "default"])
def test_a_model_is_retrieved_by_its_names(client: openai.OpenAI, name: str) -> None:
    assert client.models.retrieve(name).id == MODEL


def test_an_unknown_model_is_not_retrieved(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt/4")
    assert caught.value.code == "model_not_found"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask())
    (choice,) = answer.choices
    assert choice.message.content == "user: a b c "
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4)
    assert answer.usage.total_tokens == 8


def test_chat_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=ask(), stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "user: a b c "
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_of_several_choices_begins_and_ends_each_once(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=ask(), stream=True, n=3)
    by_index: dict[int, list[Any]] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        by_index.setdefault(choice.index, []).append(choice)
    assert sorted(by_index) == [0, 1, 2]
    for index, choices in by_index.items():
        assert choices[0].delta.role == "assistant"
        assert [choice.delta.role for choice in choices[1:]] == [None] * (len(choices) - 1)
        assert [choice.finish_reason is not None for choice in choices].count(True) == 1
        text = "".join(choice.delta.content or "" for choice in choices)
        assert text.split()[-1] == ("c" if index == 0 else f"c/{index}")


def test_the_stream_helper_understands_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ask(), n=2) as stream:
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == [
        "user: a b c ",
        "user:/1 a/1 b/1 c/1 ",
    ]
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_the_usage_comes_last_when_it_is_asked_for(client: openai.OpenAI, route: str) -> None:
    options: Any = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    if route == "chat":
        chunks: list[Any] = list(client.chat.completions.create(messages=ask(), n=2, **options))
        usage = client.chat.completions.create(model=MODEL, messages=ask(), n=2).usage
    else:
        chunks = list(client.completions.create(prompt=["a b", "c"], n=2, **options))
        usage = client.completions.create(model=MODEL, prompt=["a b", "c"], n=2).usage
    assert chunks[-1].choices == [] and chunks[-1].usage == usage
    assert all(chunk.choices and chunk.usage is None for chunk in chunks[:-1])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ask(), "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [entry.token for entry in whole.content] == ["user: ", "a ", "b ", "c "]
    first = whole.content[0]
    assert first.logprob == -0.5 and first.bytes == list(b"user: ")
    assert [top.token for top in first.top_logprobs] == ["t0", "t1"]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert streamed == whole.content


def test_completion_logprobs(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "\u00e9\u00e9 b", "logprobs": 1}
    logprobs = client.completions.create(**asked).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["\u00e9\u00e9 ", "b "]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"t0": -1.0, "\u00e9\u00e9 ": -0.5}, {"t0": -1.0, "b ": -0.5}]
    assert logprobs.text_offset == [0, 3]
    chunks = [c.choices[0].logprobs for c in client.completions.create(**asked, stream=True)]
    assert [offset for chunk in chunks if chunk for offset in chunk.text_offset or []] == [0, 3]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a b", ["a b "]),
        (["a b", "c"], ["a b ", "c "]),
        ([7, 8], ["id7 id8 "]),
        ([[7, 8], [9]], ["id7 id8 ", "id9 "]),
    ],
)
def test_completion_prompts_of_every_kind(
    client: openai.OpenAI, prompt: Any, texts: list[str]
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.object == "text_completion"


def test_choices_are_numbered_by_prompt_first(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [choice.text for choice in answer.choices] == ["a ", "a/1 ", "b ", "b/1 "]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)


def test_a_completion_has_16_tokens_and_a_chat_what_the_context_holds(
    client: openai.OpenAI, workers: list[FakeWorker]
) -> None:
    words = " ".join("w" for _ in range(40))
    completion = client.completions.create(model=MODEL, prompt=words).choices[0]
    assert len(completion.text.split()) == 16 and completion.finish_reason == "length"
    chat = client.chat.completions.create(model=MODEL, messages=ask(words)).choices[0]
    assert len((chat.message.content or "").split()) == 41


def test_max_completion_tokens_wins_over_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ask(), max_tokens=9, max_completion_tokens=2
    )
    assert answer.choices[0].message.content == "user: a "
    assert answer.choices[0].finish_reason == "length"


def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a b", echo=True)
    assert answer.choices[0].text == "a b|a b "


def test_parameters_reach_the_worker(client: openai.OpenAI, workers: list[FakeWorker]) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=ask(),
        temperature=0.7,
        top_p=0.9,
        seed=5,
        stop=["x"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": 2},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    (request,) = [request for worker in workers for request in worker.requests]
    sent = request.sampling
    assert (sent.temperature, sent.top_p, sent.seed, list(sent.stop)) == (0.7, 0.9, 5, ["x"])
    assert (sent.presence_penalty, sent.frequency_penalty) == (0.5, -0.5)
    assert (sent.top_k, sent.min_p, sent.repetition_penalty) == (4, 0.1, 1.1)
    assert dict(sent.logit_bias) == {3: 2.0} and sent.ignore_eos
    assert request.defaults == 1  # the model's own, and strict lengths


def test_messages_reach_the_template_in_one_form(
    client: openai.OpenAI, workers: list[FakeWorker]
) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == (
        "system: be brief user: a\nb assistant:  tool: 42 "
    )


def test_what_clients_send_along_is_tolerated(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=ask(),
        user="someone",
        metadata={"a": "b"},
        logit_bias={},
        tools=[],
        store=False,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        extra_body={"new_field": {"a": [1]}},
    )
    assert answer.http_response.status_code == 200
    ignored = answer.headers["x-mii-ignored"].split(", ")
    assert "new_field" in ignored and "user" in ignored and "tools" not in ignored


@pytest.mark.parametrize(
    "unsupported",
    [
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"modalities": ["audio"]},
    ],
)
def test_what_is_not_built_is_refused_by_name(
    client: openai.OpenAI, workers: list[FakeWorker], unsupported: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask(), **unsupported)
    assert caught.value.param == next(iter(unsupported))
    assert requests_of(workers) == 0


def test_the_best_of_several_answers_are_returned(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    # The fake worker's words have a log-probability of -0.5 each, but for a choice's own word.
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        answer = client.completions.create(
            model=MODEL, prompt=["<worse-first> b", "c d"], best_of=3, n=2, max_tokens=5
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("<worse-first>/1")
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None and answer.usage.completion_tokens == 2 * 3 * 2
    requests = [request for worker in workers for request in worker.requests]
    assert {request.sampling.n for request in requests} == {3}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "guide", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "guided_json", {"type": "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "guided_json",
            SCHEMA,
        ),
        ({"extra_body": {"guided_json": SCHEMA}}, "guided_json", SCHEMA),
        ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, "guided_json", SCHEMA),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, "guided_json", SCHEMA),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "guided_regex", "a+"),
        ({"extra_body": {"guided_grammar": "start: A"}}, "guided_grammar", "start: A"),
        ({"extra_body": {"guided_choice": ["a", "b"]}}, "guided_choice", ["a", "b"]),
    ],
)
def test_what_the_answer_must_match_reaches_the_worker(
    client: openai.OpenAI, workers: list[FakeWorker], fields: Any, guide: str, value: object
) -> None:
    client.chat.completions.create(model=MODEL, messages=ask(), **fields)
    ((request,),) = [worker.requests for worker in workers if worker.requests]
    got: Any = getattr(request.sampling, guide)
    if guide == "guided_json":
        got = json.loads(got)
    assert (list(got.texts) if guide == "guided_choice" else got) == value


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=ask(), stream=stream)
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_before_the_stream_begins(
    client: openai.OpenAI, workers: list[FakeWorker], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="w " * CONTEXT, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert str(CONTEXT) in caught.value.message
    assert requests_of(workers) == 1  # a client repeats what it believes may work


def test_an_error_in_mid_stream_is_raised(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model=MODEL, prompt="a b <bug>", stream=True)
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="internal error"):
        pieces.extend(chunk.choices[0].text for chunk in chunks)
    assert "".join(pieces) == "a b "


def test_a_full_queue_is_a_rate_limit_with_a_hint(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        client.with_options(max_retries=0).completions.create(model=MODEL, prompt="<full>")
    assert caught.value.response.headers["retry-after"] == "7"


def test_without_a_replica_the_service_is_unavailable(start_router: StartRouter) -> None:
    router = start_router()
    with (
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(model=MODEL, prompt="a", stream=True)
    assert caught.value.status_code == 503
    assert "retry-after" in caught.value.response.headers
