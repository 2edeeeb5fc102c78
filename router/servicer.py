"""The gRPC service `mii.v1.Inference` on the router: translates between gRPC and the relay."""

from __future__ import annotations

from collections.abc import Mapping

from mii.http2.server_call import Handler, ServerCall
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
from mii.router.relay import Relay
from mii.router.routing_headers import SESSION_KEY, explanation, session_of
from mii.rpc.methods import answered_by_stream, answered_once, errors_as_status


class Servicer:
    """`mii.v1.Inference`, answered by the replicas."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        return {
            "/mii.v1.Inference/Generate": answered_by_stream(GenerateRequest, self._generate),
            "/mii.v1.Inference/Tokenize": answered_once(TokenizeRequest, self._tokenize),
            "/mii.v1.Inference/Detokenize": answered_once(DetokenizeRequest, self._detokenize),
            "/mii.v1.Inference/ListModels": answered_once(ListModelsRequest, self._list_models),
        }

    async def _generate(self, request: GenerateRequest, call: ServerCall) -> None:
        request_id = new_request_id()
        with errors_as_status(request_id):
            check_request_id(request.request_id)
            request.request_id = request.request_id or request_id
            session = session_of(call.headers.get(SESSION_KEY, ""))
            async with self._relay.generate(request, call.time_remaining(), session) as generation:
                if request.stream:
                    await generation.accepted()
                    call.send_initial_metadata(((ACCEPTED_KEY, request.request_id),))
                call.on_writable(generation.pass_on)
                await generation.send_to(call)
                told = explanation(call.headers, generation.routes)
                call.trailing_metadata = tuple(told.items())

    async def _tokenize(self, request: TokenizeRequest, call: ServerCall) -> TokenizeResponse:
        return await self._relay.tokenize(request, call.time_remaining())

    async def _detokenize(self, request: DetokenizeRequest, call: ServerCall) -> DetokenizeResponse:
        return await self._relay.detokenize(request, call.time_remaining())

    async def _list_models(
        self, request: ListModelsRequest, call: ServerCall
    ) -> ListModelsResponse:
        return await self._relay.list_models(call.time_remaining())
