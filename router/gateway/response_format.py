"""`response_format`, and vLLM's `structured_outputs`: what an answer must match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mii.errors import InvalidArgument

FIELDS: Final = frozenset(("response_format", "structured_outputs"))

_KINDS: Final = ("json", "regex", "grammar", "choice")
_ANY_OBJECT: Final = {"type": "object"}


def guide_of(body: Mapping[str, Any]) -> dict[str, object]:
    """Return the sampling parameter that a request's fields ask for, if they ask for one.

    Raises:
        InvalidArgument: naming the field.
    """
    response_format = _object(body, "response_format")
    structured = _object(body, "structured_outputs")
    guides = {**_response_format(response_format), **_structured_outputs(structured)}
    if response_format and structured and len(guides) > 1:
        raise InvalidArgument("give response_format or structured_outputs", "structured_outputs")
    return guides


def _response_format(given: Mapping[str, Any]) -> dict[str, object]:
    if not given:
        return {}
    match given.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"guided_json": _ANY_OBJECT}
        case "json_schema":
            return {"guided_json": _schema(given.get("json_schema"))}
        case kind:
            allowed = "text, json_object or json_schema"
            raise InvalidArgument.of("response_format.type", kind, allowed)


def _schema(wrapped: object) -> Mapping[str, Any]:
    field = "response_format.json_schema"
    if not isinstance(wrapped, Mapping):
        raise InvalidArgument.of(field, wrapped, "an object with name and schema")
    schema = wrapped.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidArgument.of(f"{field}.schema", schema, "a JSON schema, which is an object")
    return schema


def _structured_outputs(given: Mapping[str, Any]) -> dict[str, object]:
    values = {name: value for name, value in given.items() if value is not None}
    unknown = values.keys() - set(_KINDS)
    if unknown or len(values) > 1:
        raise InvalidArgument.of(
            "structured_outputs", given, f"an object with one of {', '.join(_KINDS)}"
        )
    return {f"guided_{kind}": value for kind, value in values.items()}


def _object(body: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = body.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument.of(field, value, "an object")
    return value
