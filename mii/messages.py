"""Messages of mii.v1 and what they stand for, on both ends of the wire; and their limits."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mii.engine.params import Defaults, check_params
from mii.errors import InvalidArgument, ModelNotFound, shorten
from mii.proto import inference_pb2
from mii.proto.inference_pb2 import GenerateRequest, GuidedChoice, Prompt, SamplingParams

MAX_SEQUENCES: Final = 4096  # of one request: prompts times answers to each
MAX_NAME: Final = 256  # characters of a request id or a model's name
# Bytes of sampling parameters: more than all of them at their limits take. And of one JSON text,
# which takes a second to read: a million tokens' text is well below it.
MAX_SAMPLING_BYTES: Final = 2**21
MAX_JSON_BYTES: Final = 2**24
# Bytes of the sampling parameters of one request's prompts together: each takes a copy along.
MAX_COPIED_BYTES: Final = 2**27

# How models write calls of tools (see `router/gateway/tool_calls.py`); and how a model writes them
# whose chat template knows no tools, but which is made to.
TOOL_FORMATS: Final = ("hermes", "llama3", "mistral")
JSON_CALLS: Final = "json"

# Initial metadata by which a server says that a request is valid and queued. Without it (or from a
# server that never sends it before its first message), that message says so.
ACCEPTED_KEY: Final = "mii-request-id"


def new_request_id() -> str:
    """Draw an id for a request that brings none."""
    return secrets.token_hex(16)


def check_model(name: str, served: str) -> None:
    """Refuse the name of a model that is not `served`.

    Raises:
        ModelNotFound: unless the name is that model's, "default" or empty.
    """
    if name not in ("", "default", served):
        raise ModelNotFound(
            f"model {shorten(name)} is not served here: ask for {shorten(served)} or 'default'",
            "model",
        )


def check_request(request: GenerateRequest, served: str) -> None:
    """Refuse a request that no worker could answer, as far as that is seen without a tokenizer.

    Raises:
        ModelNotFound: see `check_model`.
        InvalidArgument: naming the field, its value and what is allowed.
    """
    check_model(request.model, served)
    check_request_id(request.request_id)
    defaults_of(request.defaults)
    check_sampling_size(request.sampling.ByteSize())
    params = check_params(sampling_values(request.sampling), "SamplingParams")
    answers = params.get("n", 1)
    if not 1 <= len(request.prompts) * answers <= MAX_SEQUENCES:
        raise InvalidArgument(
            f"a request has 1 to {MAX_SEQUENCES} answers (prompts x n): this one has "
            f"{len(request.prompts)} prompts x {answers}",
            "n" if answers > 1 else "prompts",
        )
    _check_seeds(request)
    partial_answers(request)
    copied = len(request.prompts) * request.sampling.ByteSize()
    if copied > MAX_COPIED_BYTES:
        raise InvalidArgument(
            f"{len(request.prompts)} prompts, each with a copy of the sampling parameters, take "
            f"{copied} bytes, and {MAX_COPIED_BYTES} is the most: send fewer prompts at once",
            "prompts",
        )
    for index, prompt in enumerate(request.prompts):
        check_prompt(f"prompts[{index}]", prompt)


def _check_seeds(request: GenerateRequest) -> None:
    if not request.seeds:
        return
    if len(request.seeds) != len(request.prompts) or request.sampling.HasField("seed"):
        raise InvalidArgument(
            f"seeds has {len(request.seeds)} entries: it must have one for each of the "
            f"{len(request.prompts)} prompts, and stands in place of seed",
            "seeds",
        )
    if min(request.seeds) < 0:
        raise InvalidArgument.of("seeds", min(request.seeds), "from 0 to 2^63 - 1")


def seed_of(request: GenerateRequest, prompt: int) -> int | None:
    """Return the seed of a prompt's answers; None: the request gives none."""
    if request.seeds:
        return request.seeds[prompt]
    return request.sampling.seed if request.sampling.HasField("seed") else None


def choices_of(request: GenerateRequest) -> int:
    """Return how many answers each prompt is to have."""
    return request.sampling.n if request.sampling.HasField("n") else 1


def partial_answers(request: GenerateRequest) -> dict[int, dict[int, Sequence[int]]] | None:
    """Return the answers to go on with, by prompt and choice; None: begin all of them.

    Raises:
        InvalidArgument: if it is not clear which they are, or how they go on.
    """
    if not request.resume:
        return None
    if not request.seeds and not request.sampling.HasField("seed"):
        raise InvalidArgument("resume goes with a seed for each prompt", "resume")
    prompts, choices = len(request.prompts), choices_of(request)
    partial: dict[int, dict[int, Sequence[int]]] = {}
    for answer in request.resume:
        of_prompt = partial.setdefault(answer.prompt_index, {})
        known = 0 <= answer.prompt_index < prompts and 0 <= answer.choice_index < choices
        if not known or answer.choice_index in of_prompt:
            allowed = f"once each of {prompts} prompts x {choices} answers at most"
            which = (answer.prompt_index, answer.choice_index)
            raise InvalidArgument.of("resume", which, allowed)
        of_prompt[answer.choice_index] = tuple(answer.token_ids)
    return partial


def check_prompt(field: str, prompt: Prompt) -> None:
    """Refuse a prompt that says nothing.

    Raises:
        InvalidArgument: naming `field`.
    """
    content = prompt.WhichOneof("content")
    if content is None:
        raise InvalidArgument(f"{field} has none of text, token_ids and chat", field)
    if content == "token_ids":
        if not prompt.token_ids.ids:
            raise InvalidArgument(f"{field} has no token ids", field)
        if min(prompt.token_ids.ids) < 0:
            raise InvalidArgument(f"{field} has a negative token id", field)
    if content == "chat":
        if not prompt.chat.messages_json:
            raise InvalidArgument(f"{field} has no messages", field)
        size = prompt.chat.ByteSize()
        if size > MAX_JSON_BYTES:
            raise InvalidArgument(
                f"{field} has {size} bytes of JSON: it must have at most {MAX_JSON_BYTES}", field
            )


def check_sampling_size(size: int) -> None:
    """Refuse sampling parameters so large that to unpack them would keep others waiting.

    Raises:
        InvalidArgument: see above.
    """
    if size > MAX_SAMPLING_BYTES:
        raise InvalidArgument(
            f"the sampling parameters have {size} bytes: they must have at most "
            f"{MAX_SAMPLING_BYTES}"
        )


def check_request_id(request_id: str) -> None:
    """Refuse an id that cannot be logged and sent in a header.

    Raises:
        InvalidArgument: naming `request_id`.
    """
    if len(request_id) > MAX_NAME or not request_id.isascii() or not request_id.isprintable():
        allowed = f"up to {MAX_NAME} printable ASCII characters"
        raise InvalidArgument.of("request_id", request_id, allowed)


def sampling_values(sampling: SamplingParams) -> dict[str, object]:
    """Return the parameters that a message carries, as `check_params` takes them."""
    values: dict[str, object] = {}
    for field, value in sampling.ListFields():
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        elif field.name in ("stop", "stop_token_ids"):
            values[field.name] = list(value)
        elif field.name == "guided_choice":
            values[field.name] = list(value.texts)
        else:
            values[field.name] = value
    return values


def sampling_message(checked: Mapping[str, Any]) -> SamplingParams:
    """Return the message for parameters that `check_params` has returned."""
    values = dict(checked)
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    if "guided_choice" in values:
        values["guided_choice"] = GuidedChoice(texts=values["guided_choice"])
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
    except RecursionError:
        raise InvalidArgument(f"{field} is nested too deeply", field) from None
    except ValueError as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field) from None
    if not isinstance(value, kind) or (
        kind is list and not all(isinstance(v, dict) for v in value)
    ):
        wanted = "a JSON list of objects" if kind is list else "a JSON object"
        raise InvalidArgument(f"{field} = {shorten(text)} is not {wanted}", field)
    return value
