"""The gRPC service `mii.v1.Inference` on the router: translates between gRPC and the relay."""

from __future__ import annotations

from typing import Any

import grpc

from mii.messages import ACCEPTED_KEY, check_request_id, new_request_id
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mii.proto.inference_pb2_grpc import InferenceServicer
from mii.router.relay import Relay
from mii.router.routing_headers import SESSION_KEY, explanation, session_of
from mii.status import errors_as_status

Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(InferenceServicer):
    """`mii.v1.Inference`, answered by the replicas."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    # A coroutine that writes, not a generator: a cancelled one is cleaned up at once.
    async def Generate(self, request: GenerateRequest, context: Context) -> None:  # type: ignore[override]
        request_id = new_request_id()
        async with errors_as_status(context, request_id):
            check_request_id(request.request_id)
            request.request_id = request.request_id or request_id
            asked = dict(context.invocation_metadata() or ())
            session = session_of(asked.get(SESSION_KEY, ""))
            timeout = context.time_remaining()
            async with self._relay.generate(request, timeout, session) as generation:
                if request.stream:
                    await generation.accepted()
                    await context.send_initial_metadata(((ACCEPTED_KEY, request.request_id),))
                async for message in generation:
                    await context.write(message)
                told = explanation(asked, generation.routes)
                context.set_trailing_metadata(tuple(told.items()))

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        async with errors_as_status(context, new_request_id()):
            return await self._relay.tokenize(request, context.time_remaining())

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        async with errors_as_status(context, new_request_id()):
            return await self._relay.detokenize(request, context.time_remaining())

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        async with errors_as_status(context, new_request_id()):
            return await self._relay.list_models(context.time_remaining())
