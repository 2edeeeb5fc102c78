"""Calls of tools: found in whatever portions their text comes, in each family's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.errors import InvalidArgument
from mii.router.gateway.tool_calls import CallBegins, CallGoesOn, Event, Text, ToolCallParser
from mii.router.gateway.tools import Tools, tools_of
from tests.router.fake_worker import MODEL, FakeWorker
from tests.router.router_process import RouterProcess

NAMES = ("get_weather", "add")
WEATHER = {"city": 'S\u00e3o "P" {1}', "days": [1, {"a": "]}"}]}
SUM = {"a": 1, "b": 2}

Read = tuple[str, list[tuple[str, object]]]  # the text, and the calls


def call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)


BOTH = [("get_weather", WEATHER), ("add", SUM)]
ANSWERS: dict[str, tuple[str, str, Read]] = {
    "hermes, one": ("hermes", hermes(call("add", SUM)), ("", [("add", SUM)])),
    "hermes, text before and two": (
        "hermes",
        "Let me see.\n" + hermes(call("get_weather", WEATHER), call("add", SUM)),
        ("Let me see.\n", BOTH),
    ),
    "hermes, arguments first": (
        "hermes",
        hermes('{"arguments": {"a": 1, "b": 2}, "name": "add"}'),
        ("", [("add", SUM)]),
    ),
    "hermes, arguments as a string": (
        "hermes",
        hermes(call("add", json.dumps(SUM))),
        ("", [("add", SUM)]),
    ),
    "hermes, without blanks": (
        "hermes",
        '<tool_call>{"name":"add","arguments":{}}</tool_call>',
        ("", [("add", {})]),
    ),
    "hermes, no call": ("hermes", "a < b <tool and {x}", ("a < b <tool and {x}", [])),
    "hermes, an unknown function": (
        "hermes",
        hermes(call("rm", {})),
        (hermes(call("rm", {})), []),
    ),
    "hermes, no JSON": (
        "hermes",
        "<tool_call>add(1)</tool_call>",
        ("<tool_call>add(1)</tool_call>", []),
    ),
    "llama3": ("llama3", call("add", SUM, "parameters"), ("", [("add", SUM)])),
    "llama3, its marker and two": (
        "llama3",
        "<|python_tag|>" + "; ".join(call(n, a, "parameters") for n, a in BOTH),
        ("", BOTH),
    ),
    "llama3, JSON that is no call": ("llama3", '{"city": "Rome"}', ('{"city": "Rome"}', [])),
    "llama3, text": ("llama3", "The sum is {3}.", ("The sum is {3}.", [])),
    "mistral": (
        "mistral",
        "[" + ", ".join(call(n, a) for n, a in BOTH) + "]",
        ("", BOTH),
    ),
    "mistral, its marker": (
        "mistral",
        "[TOOL_CALLS] [" + call("add", SUM) + "]",
        ("", [("add", SUM)]),
    ),
    "mistral, a name and arguments": (
        "mistral",
        "add[ARGS]" + json.dumps(SUM),
        ("", [("add", SUM)]),
    ),
    "mistral, text": ("mistral", "add them yourself", ("add them yourself", [])),
    "json": ("json", " " + call("add", SUM), ("", [("add", SUM)])),
}


def read(tool_format: str, portions: list[str]) -> Read:
    parser = ToolCallParser(tool_format, NAMES)
    events: list[Event] = [event for portion in portions for event in parser.feed(portion)]
    events += parser.finish()
    text = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Text(piece):
                text += piece
            case CallBegins(name, number):
                assert number == len(calls)
                calls.append((name, ""))
            case CallGoesOn(piece, number):
                assert number == len(calls) - 1
                calls[-1] = calls[-1][0], calls[-1][1] + piece
    assert parser.calls == len(calls)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_found_whole_and_character_by_character(case: str) -> None:
    tool_format, answer, expected = ANSWERS[case]
    assert read(tool_format, [answer]) == expected
    assert read(tool_format, list(answer)) == expected


@settings(max_examples=200)
@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(0, 500), max_size=6))
def test_portions_make_no_difference(case: str, cuts: list[int]) -> None:
    tool_format, answer, expected = ANSWERS[case]
    places = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    portions = [answer[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert read(tool_format, portions) == expected


@settings(max_examples=300)
@given(
    st.sampled_from(["hermes", "llama3", "mistral", "json"]),
    st.text('{}[]"\\<>/ add:,name_tolc', max_size=60),
)
def test_any_text_is_read_without_loss(tool_format: str, answer: str) -> None:
    parser = ToolCallParser(tool_format, NAMES)
    events = [event for character in answer for event in parser.feed(character)]
    events += parser.finish()
    if not parser.calls:
        said = "".join(event.text for event in events if isinstance(event, Text))
        assert said == answer


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolCallParser("hermes", NAMES)
    begun = parser.feed('<tool_call>\n{"name": "add", "arguments": {"a": 1')
    assert begun == [CallBegins("add", 0), CallGoesOn('{"a": 1', 0)]
    assert parser.feed(', "b"') == [CallGoesOn(', "b"', 0)]
    assert parser.finish() == []


def function(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ADD = function("add", a={"type": "integer"}, b={"type": "integer"})
TOOLS = [ADD, function("get_weather", city={"type": "string"})]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD] * 600}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_bad_tools_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tools_of(fields)
    assert caught.value.field == field


def test_tools_that_may_not_be_called_are_none() -> None:
    assert tools_of({"tools": TOOLS, "tool_choice": "none"}) is None
    assert tools_of({"tools": []}) is None and tools_of({}) is None


def required(choice: object, *, parallel: bool = True) -> Tools:
    tools = tools_of({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel})
    assert tools is not None
    return tools


def test_a_required_call_is_guided_by_the_schemas_of_the_functions() -> None:
    guide = required("required").guide("llama3")["guided_json"]
    assert isinstance(guide, dict)
    for good in (call("add", SUM, "parameters"), call("get_weather", {"city": "x"}, "parameters")):
        jsonschema.validate(json.loads(good), guide)
    for bad in (call("rm", {}, "parameters"), call("add", {"a": "1"}, "parameters")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(bad), guide)
    named = required({"type": "function", "function": {"name": "add"}})
    guide = named.guide("mistral")["guided_json"]
    assert isinstance(guide, dict)
    jsonschema.validate([json.loads(call("add", SUM))], guide)
    for worse in ([], [json.loads(call("add", SUM))] * 2, [json.loads(call("get_weather", {}))]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(worse, guide)
    assert required("auto").guide("hermes") == {}


# Through the gateway: the fake worker answers with the conversation's own words.


@pytest.fixture
def client(router: RouterProcess, workers: list[FakeWorker]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        yield client


def ask(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def test_calls_come_as_the_api_writes_them(
    client: openai.OpenAI, workers: list[FakeWorker]
) -> None:
    tools: Any = TOOLS
    answer = client.chat.completions.create(
        model=MODEL, messages=ask(hermes(call("add", SUM))), tools=tools
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "user:"
    assert choice.message.tool_calls is not None
    (made,) = choice.message.tool_calls
    assert made.type == "function" and made.function.name == "add" and len(made.id) == 9
    assert json.loads(made.function.arguments) == SUM
    ((request,),) = [worker.requests for worker in workers if worker.requests]
    assert json.loads(request.prompts[0].chat.tools_json) == TOOLS


def test_streamed_calls_add_up(client: openai.OpenAI, workers: list[FakeWorker]) -> None:
    tools: Any = TOOLS
    content = hermes(call("get_weather", {"city": "New York"}), call("add", SUM))
    with client.chat.completions.stream(model=MODEL, messages=ask(content), tools=tools) as stream:
        completion = stream.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    calls = [
        (c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()
    ]
    assert calls == [("get_weather", {"city": "New York"}), ("add", SUM)]


def test_an_answer_without_calls_is_text(client: openai.OpenAI, workers: list[FakeWorker]) -> None:
    tools: Any = TOOLS
    answer = client.chat.completions.create(model=MODEL, messages=ask("hello"), tools=tools)
    assert answer.choices[0].message.content == "user: hello "
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_past_calls_reach_the_template_as_objects(
    client: openai.OpenAI, workers: list[FakeWorker]
) -> None:
    past: list[Any] = [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "123456789",
                    "type": "function",
                    "function": {"name": "add", "arguments": json.dumps(SUM)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "123456789", "content": "3"},
    ]
    tools: Any = TOOLS
    client.chat.completions.create(model=MODEL, messages=past, tools=tools)
    ((request,),) = [worker.requests for worker in workers if worker.requests]
    messages = json.loads(request.prompts[0].chat.messages_json)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == SUM
    assert messages[2]["tool_call_id"] == "123456789"


def test_a_required_call_is_guided_in_the_models_form(
    client: openai.OpenAI, workers: list[FakeWorker]
) -> None:
    tools: Any = TOOLS
    client.chat.completions.create(
        model=MODEL, messages=ask("hi"), tools=tools, tool_choice="required"
    )
    ((request,),) = [worker.requests for worker in workers if worker.requests]
    assert "<tool_call>" in request.sampling.guided_grammar
