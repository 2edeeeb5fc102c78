"""GET /openapi.json: what the gateway takes, out of the checks that judge it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mii.engine.params import ALIASES, MAX_CHOICES, MAX_LOGPROBS, PARAMETER_SCHEMAS
from mii.messages import MAX_SEQUENCES
from mii.router.gateway.chat import ROLES
from mii.router.gateway.tools import MAX_TOOLS

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_ANY_OBJECT: Final[Schema] = {"type": "object"}
_OWN: Final = ("logprobs", "return_full_text", "max_length")  # of the native route alone

_ERRORS: Final = {
    "400": "A field is not allowed; `param` names it.",
    "401": "No key, or an unknown one.",
    "404": "The model is not served here, or there is no such path.",
    "413": "The body is too large.",
    "429": "A queue is full: see Retry-After.",
    "503": "No replica can answer: see Retry-After.",
    "504": "The deadline of x-request-timeout has passed.",
}


def openapi(deployment: str, model: str) -> Schema:
    """Return the description of a deployment's gateway (OpenAPI 3.1)."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"mii: {deployment}",
            "version": "1",
            "description": f"Serves {model}. Fields that nothing reads are named in the answer's "
            "header x-mii-ignored.",
        },
        "paths": {
            "/v1/chat/completions": _post("Answer a conversation", _chat(), streams=True),
            "/v1/completions": _post("Go on with texts", _completions(), streams=True),
            "/generate": _post("Answer prompts, as DeepSpeed-MII", _native(), streams=True),
            "/v1/models": _get("What is served"),
            "/health": _get("Whether a request would be answered", {"503": "It would not."}),
            "/live": _get("Whether the router runs"),
            "/metrics": _get("Figures for Prometheus", kind="text/plain"),
        },
        "components": {
            "schemas": {"Error": _error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _sampling(*, native: bool = False) -> Schema:
    """Return the sampling parameters as properties; null counts as left out."""
    names = {name: name for name in PARAMETER_SCHEMAS if native or name not in _OWN}
    names |= dict(ALIASES)
    return {name: _or_null(PARAMETER_SCHEMAS[own]) for name, own in names.items()}


def _shared() -> Schema:
    return {
        **_sampling(),
        "model": _or_null(_TEXT),
        "stream": _or_null(_FLAG),
        "stream_options": _or_null(
            {"type": "object", "properties": {"include_usage": _or_null(_FLAG)}}
        ),
        "response_format": _or_null(
            {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            }
        ),
    }


def _chat() -> Schema:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _TEXT},
    }
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": part}]},
        },
    }
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
            "description": _TEXT,
            "parameters": _or_null(_ANY_OBJECT),
        },
    }
    tool = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }
    return {
        "type": "object",
        "required": ["messages"],
        "properties": {
            **_shared(),
            "messages": {"type": "array", "items": message, "minItems": 1},
            "logprobs": _or_null(_FLAG),
            "top_logprobs": _or_null(_count(MAX_LOGPROBS)),
            "tools": _or_null({"type": "array", "items": tool, "maxItems": MAX_TOOLS}),
            "tool_choice": _or_null({"anyOf": [{"enum": ["none", "auto", "required"]}, tool]}),
            "parallel_tool_calls": _or_null(_FLAG),
            "add_generation_prompt": _or_null(_FLAG),
            "continue_final_message": _or_null(_FLAG),
            "chat_template_kwargs": _or_null(_ANY_OBJECT),
        },
    }


def _completions() -> Schema:
    return {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            **_shared(),
            "prompt": _prompts(),
            "echo": _or_null(_FLAG),
            "best_of": _or_null({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}),
            "logprobs": _or_null(_count(MAX_LOGPROBS)),
        },
    }


def _native() -> Schema:
    return {
        "type": "object",
        "properties": {
            **_sampling(native=True),
            "prompts": _prompts(),
            "prompt_token_ids": _prompts(),
            "model": _or_null(_TEXT),
            "stream": _or_null(_FLAG),
        },
        "additionalProperties": False,
    }


def _prompts() -> Schema:
    ids = {"type": "array", "items": _count(2**31 - 1), "minItems": 1}
    texts = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_SEQUENCES}
    several = {"type": "array", "items": ids, "minItems": 1, "maxItems": MAX_SEQUENCES}
    return {"anyOf": [_TEXT, texts, ids, several]}


def _error() -> Schema:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _or_null(_TEXT),
                    "code": _or_null(_TEXT),
                },
            }
        },
    }


def _post(summary: str, body: Schema, *, streams: bool) -> Schema:
    kinds = ["application/json", *(["text/event-stream"] if streams else [])]
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "The answer.", "content": {kind: {} for kind in kinds}},
                **_failures(_ERRORS),
            },
        }
    }


def _get(
    summary: str, failures: Mapping[str, str] | None = None, kind: str = "application/json"
) -> Schema:
    told = {number: _ERRORS[number] for number in ("401", "503")} | dict(failures or {})
    return {
        "get": {
            "summary": summary,
            "responses": {
                "200": {"description": "The answer.", "content": {kind: {}}},
                **_failures(told),
            },
        }
    }


def _failures(told: Mapping[str, str]) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {number: {"description": words, "content": content} for number, words in told.items()}


def _count(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _or_null(schema: Mapping[str, Any]) -> Schema:
    return {"anyOf": [dict(schema), {"type": "null"}]}
