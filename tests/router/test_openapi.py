"""/openapi.json says what the gateway takes: no more, and no less."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from typing import Any

import jsonschema
import pytest

from mii.engine.params import PARAMETER_SCHEMAS, check_params
from mii.errors import InvalidArgument
from mii.router.gateway.openapi import openapi
from tests.router.fake_worker import FakeWorker
from tests.router.http_calls import post
from tests.router.router_process import RouterProcess

DOCUMENT = openapi("d", "m")
BODIES = {
    path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, operations in DOCUMENT["paths"].items()
    if "post" in operations
}


def test_it_is_served_and_names_every_route(router: RouterProcess) -> None:
    with urllib.request.urlopen(f"{router.url}/openapi.json", timeout=10) as response:
        served = json.load(response)
    assert served["openapi"] == "3.1.0" and served["paths"].keys() == DOCUMENT["paths"].keys()
    with urllib.request.urlopen(f"{router.url}/", timeout=10) as response:
        routes = set(json.load(response)["routes"])
    described = routes - {"/", "/page/{name}", "/openapi.json", "/v1/models/{id}"}
    assert described - {"/mii/{deployment}"} == served["paths"].keys()


@pytest.mark.parametrize("path", BODIES)
def test_its_schemas_are_schemas(path: str) -> None:
    jsonschema.Draft202012Validator.check_schema(BODIES[path])


def edges(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return values at the edges of a number's range, and beyond."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema["maximum"]
    step = 1 if schema["type"] == "integer" else 0.001
    inside = low if "minimum" in schema else low + step
    beyond = low - step if "minimum" in schema else low
    return [inside, high], [beyond, high + step, "1", True, []]


@pytest.mark.parametrize(
    "name", [name for name, schema in PARAMETER_SCHEMAS.items() if "maximum" in schema]
)
def test_numbers_are_taken_and_refused_as_it_says(name: str) -> None:
    good, bad = edges(PARAMETER_SCHEMAS[name])
    for value in good:
        assert check_params({name: value})
    for value in bad:
        with pytest.raises(InvalidArgument):
            check_params({name: value})


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "logit_bias": {"5": -1.5},
            "stop": ["x"],
            "stream_options": None,
            "max_completion_tokens": 3,
        },
    ),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "logprobs": 2, "n": 2, "seed": 1}),
    ("/generate", {"prompts": ["a", "b"], "max_length": 50, "return_full_text": True}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}),
    ("/v1/completions", {"prompt": "a", "stop": [""]}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}),
    ("/v1/completions", {"prompt": []}),
    ("/generate", {"prompts": "a", "temperatur": 1}),
    ("/generate", {"prompts": 5}),
]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_it_allows_is_answered(
    router: RouterProcess, workers: list[FakeWorker], path: str, body: dict[str, Any]
) -> None:
    jsonschema.validate(body, BODIES[path])
    assert post(router, path, body).status == 200


@pytest.mark.parametrize(("path", "body"), BAD)
def test_what_it_forbids_is_refused(
    router: RouterProcess, workers: list[FakeWorker], path: str, body: dict[str, Any]
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, BODIES[path])
    answer = post(router, path, body)
    assert answer.status == 400
    jsonschema.validate(answer.json, DOCUMENT["components"]["schemas"]["Error"])


@pytest.mark.full
def test_nothing_that_fits_it_is_answered_otherwise_than_it_says(router: RouterProcess) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{router.url}/openapi.json"]
    command += ["-n", "150", "--checks", "not_a_server_error,status_code_conformance"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout
