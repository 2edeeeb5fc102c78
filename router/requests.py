"""Judging a request before any replica sees it, and splitting it into its prompts."""

from __future__ import annotations

import secrets

from mii.engine.params import check_params
from mii.errors import InvalidArgument, ModelNotFound, shorten
from mii.messages import defaults_of, sampling_values
from mii.proto.inference_pb2 import GenerateRequest, Prompt
from mii.router.limits import MAX_NAME, MAX_SEQUENCES


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
    params = check_params(sampling_values(request.sampling), "SamplingParams")
    answers = params.get("n", 1)
    if not 1 <= len(request.prompts) * answers <= MAX_SEQUENCES:
        raise InvalidArgument(
            f"a request has 1 to {MAX_SEQUENCES} answers (prompts x n): this one has "
            f"{len(request.prompts)} prompts x {answers}",
            "n" if answers > 1 else "prompts",
        )
    for index, prompt in enumerate(request.prompts):
        _check_prompt(f"prompts[{index}]", prompt)


def check_request_id(request_id: str) -> None:
    """Refuse an id that cannot be logged and sent in a header.

    Raises:
        InvalidArgument: naming `request_id`.
    """
    if len(request_id) > MAX_NAME or not request_id.isascii() or not request_id.isprintable():
        allowed = f"up to {MAX_NAME} printable ASCII characters"
        raise InvalidArgument.of("request_id", request_id, allowed)


def split(request: GenerateRequest, request_id: str) -> list[GenerateRequest]:
    """Return one request for each prompt, each of them whole: it can be sent to any replica, again.

    An explicit seed is every prompt's, so that answers do not depend on the order of prompts.
    Without one each prompt gets its own, drawn here: sent again, it has the same answer.
    """
    singles = []
    for index, prompt in enumerate(request.prompts):
        single = GenerateRequest(
            request_id=request_id if len(request.prompts) == 1 else f"{request_id}-{index}",
            prompts=[prompt],
            sampling=request.sampling,
            stream=request.stream,
            defaults=request.defaults,
        )
        if not single.sampling.HasField("seed"):
            single.sampling.seed = secrets.randbits(63)
        singles.append(single)
    return singles


def _check_prompt(field: str, prompt: Prompt) -> None:
    content = prompt.WhichOneof("content")
    if content is None:
        raise InvalidArgument(f"{field} has none of text, token_ids and chat", field)
    if content == "token_ids":
        if not prompt.token_ids.ids:
            raise InvalidArgument(f"{field} has no token ids", field)
        if min(prompt.token_ids.ids) < 0:
            raise InvalidArgument(f"{field} has a negative token id", field)
    if content == "chat" and not prompt.chat.messages_json:
        raise InvalidArgument(f"{field} has no messages", field)
