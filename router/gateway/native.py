"""POST /generate and POST /mii/{deployment}: DeepSpeed-MII's own route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mii.engine.params import check_params
from mii.errors import DeploymentNotFoundError, InvalidArgument, shorten
from mii.messages import sampling_message
from mii.proto.inference_pb2 import DEFAULTS_MII, GenerateRequest, SequenceDelta
from mii.router.gateway.body import json_response, read_object
from mii.router.gateway.completions import prompts_of
from mii.router.gateway.events import EventStream, event_stream
from mii.router.gateway.fields import flag, text
from mii.router.relay import Generation, Relay
from mii.router.routing_headers import SESSION_KEY, explanation, session_of, timeout_of


class NativeRoutes:
    """Prompts in, a list of answers out."""

    def __init__(self, relay: Relay, deployment_name: str) -> None:
        self._relay = relay
        self._deployment_name = deployment_name

    async def generate(self, web_request: web.Request) -> web.StreamResponse:
        """POST /generate"""
        request = _request_of(await read_object(web_request), web_request["request_id"])
        session = session_of(web_request.headers.get(SESSION_KEY, ""))
        timeout = timeout_of(web_request.headers)
        async with self._relay.generate(request, timeout, session) as generation:
            if not request.stream:
                whole = await _whole(generation)
                told = explanation(web_request.headers, generation.routes)
                return json_response(whole, headers=told)
            await generation.accepted()
            told = explanation(web_request.headers, generation.routes)
            async with event_stream(web_request, request.request_id, told) as stream:
                await _send(stream, generation)
            return stream.response

    async def generate_for(self, web_request: web.Request) -> web.StreamResponse:
        """POST /mii/{deployment}"""
        name = web_request.match_info["deployment"]
        if name != self._deployment_name:
            raise DeploymentNotFoundError(
                f"there is no deployment {shorten(name)} here: this is {self._deployment_name!r}"
            )
        return await self.generate(web_request)


def _request_of(body: Mapping[str, Any], request_id: str) -> GenerateRequest:
    values = dict(body)
    given = values.pop("prompts", None)
    ids = values.pop("prompt_token_ids", None)
    if (given is None) == (ids is None):
        near = " (not prompt)" if "prompt" in values else ""
        raise InvalidArgument(
            f"prompts{near} is missing: send a string or a list of strings, or else "
            "prompt_token_ids, a list of lists of token ids",
            "prompts",
        )
    if ids is not None:
        prompts = prompts_of(ids, "prompt_token_ids")
    else:
        prompts = prompts_of(given, "prompts")
    values.pop("stream", None)
    values.pop("model", None)
    return GenerateRequest(
        request_id=request_id,
        model=text(body, "model", "default"),
        prompts=prompts,
        sampling=sampling_message(check_params(values, "/generate")),
        stream=flag(body, "stream"),
        defaults=DEFAULTS_MII,
    )


async def _whole(generation: Generation) -> list[dict[str, Any]]:
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    async for message in generation:
        for delta in message.deltas:
            answers[delta.prompt_index, delta.choice_index] = _object(delta)
    return [answers[key] for key in sorted(answers)]


async def _send(stream: EventStream, generation: Generation) -> None:
    async for message in generation:
        await stream.send(
            {
                "prompt_index": delta.prompt_index,
                "choice_index": delta.choice_index,
                **_object(delta),
            }
            for delta in message.deltas
        )


def _object(delta: SequenceDelta) -> dict[str, Any]:
    """Return an answer, or a piece of one: lengths are known where it ends."""
    if not delta.finish_reason:
        return {"generated_text": delta.text, "finish_reason": "none"}
    return {
        "generated_text": delta.text,
        "prompt_length": delta.usage.prompt_tokens,
        "generated_length": delta.usage.completion_tokens,
        "finish_reason": delta.finish_reason,
    }
