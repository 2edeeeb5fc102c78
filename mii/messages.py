"""Between protobuf messages of mii.v1 and what they stand for; used on both ends of the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mii.engine.params import Defaults
from mii.errors import InvalidArgument, shorten
from mii.proto import inference_pb2
from mii.proto.inference_pb2 import SamplingParams


def sampling_values(sampling: SamplingParams) -> dict[str, object]:
    """Return the parameters that a message carries, as `check_params` takes them."""
    values: dict[str, object] = {}
    for field, value in sampling.ListFields():
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        elif field.name in ("stop", "stop_token_ids"):
            values[field.name] = list(value)
        else:
            values[field.name] = value
    return values


def sampling_message(checked: Mapping[str, Any]) -> SamplingParams:
    """Return the message for parameters that `check_params` has returned."""
    values = dict(checked)
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams(**values)


def defaults_of(value: int) -> Defaults:
    """Return what stands in for parameters left out.

    Raises:
        InvalidArgument: for a number that means nothing.
    """
    if value not in inference_pb2.Defaults.values():
        raise InvalidArgument.of("defaults", value, "0 (MII) or 1 (MODEL)")
    return Defaults(value)


def json_field(text: str, kind: type[list[Any]] | type[dict[str, Any]], field: str) -> Any:
    """Return the JSON list or object in a message's string; "" stands for an empty one.

    Raises:
        InvalidArgument: naming the field, if it is something else.
    """
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field) from None
    if not isinstance(value, kind) or (
        kind is list and not all(isinstance(v, dict) for v in value)
    ):
        wanted = "a JSON list of objects" if kind is list else "a JSON object"
        raise InvalidArgument(f"{field} = {shorten(text)} is not {wanted}", field)
    return value
