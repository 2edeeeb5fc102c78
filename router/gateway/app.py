"""The gateway's routes, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from mii.messages import check_model, check_request_id, new_request_id
from mii.proto.inference_pb2 import ListModelsResponse, Model
from mii.router import request_record
from mii.router.access import Access
from mii.router.exposition import Exposition
from mii.router.gateway import chat, completions
from mii.router.gateway.answer import respond
from mii.router.gateway.body import MAX_BODY_BYTES, json_response, read_object
from mii.router.gateway.errors import error_response, http_error_response
from mii.router.gateway.native import NativeRoutes
from mii.router.gateway.openapi import openapi
from mii.router.gateway.page_routes import PageRoutes, wants_page
from mii.router.gateway.tool_writer import CallWriter
from mii.router.gateway.tools import format_to_read, tools_of
from mii.router.observer import Observer
from mii.router.relay import Relay
from mii.status import known_error

_MODELS_TIMEOUT = 5.0  # seconds
_OPEN_PATHS = ("/health", "/live")  # which tell nothing but whether requests are answered


class OpenAIRoutes:
    """The routes under /v1."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._models: ListModelsResponse | None = None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        body = await read_object(request)
        tools = tools_of(body)
        form = "" if tools is None else format_to_read(await self._tool_format(), tools)
        asked = chat.asked_of(body, tools, form)
        asked.request.request_id = request["request_id"]
        writer = None
        if tools is not None and form:
            writer = partial(CallWriter, form, tuple(tools.offered))
        elif tools is not None:  # the model's template does not show them to it
            asked = replace(asked, ignored=(*asked.ignored, "tools"))
        return await respond(request, self._relay, asked, chat.ChatShape(asked, writer))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        asked = completions.asked_of(await read_object(request))
        asked.request.request_id = request["request_id"]
        return await respond(request, self._relay, asked, completions.CompletionShape(asked))

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models"""
        return json_response({"object": "list", "data": await self._model_objects()})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}"""
        check_model(request.match_info["id"], self._relay.model_name)
        return json_response((await self._model_objects())[0])

    async def _tool_format(self) -> str:
        return (await self._known_models())[0].tool_format

    async def _known_models(self) -> Sequence[Model]:
        if self._models is None:
            self._models = await self._relay.list_models(_MODELS_TIMEOUT)
        return self._models.models

    async def _model_objects(self) -> list[dict[str, Any]]:
        return [
            {
                "id": model.id,
                "object": "model",
                "created": model.created,
                "owned_by": "mii",
                "engine": model.engine,
                "dtype": model.dtype,
                "max_model_len": model.max_length,
            }
            for model in await self._known_models()
        ]


class StateRoutes:
    """Routes that tell how the deployment is."""

    def __init__(self, relay: Relay, deployment_name: str, page: PageRoutes) -> None:
        self._relay = relay
        self._deployment_name = deployment_name
        self._page = page

    async def description(self, request: web.Request) -> web.Response:
        """GET /openapi.json"""
        return json_response(openapi(self._deployment_name, self._relay.model_name))

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request would be answered, else 503."""
        if self._relay.serving:
            return json_response({"status": "ok"})
        return json_response({"status": "no replica can answer"}, 503, {"Retry-After": "1"})

    async def live(self, request: web.Request) -> web.Response:
        """GET /live: 200 while the router runs."""
        return json_response({"status": "ok"})

    async def index(self, request: web.Request) -> web.Response:
        """GET /: the page, or for programs what is served here."""
        if wants_page(request):
            return self._page.index()
        routes = request.app.router.resources()
        return json_response(
            {
                "deployment": self._deployment_name,
                "model": self._relay.model_name,
                "serving": self._relay.serving,
                "routes": [resource.canonical for resource in routes],
            }
        )


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give each request an id, and each error an answer of one shape."""
    request["request_id"] = new_request_id()
    try:
        given = request.headers.get("x-request-id", "")
        check_request_id(given)
        request["request_id"] = given or request["request_id"]
        return await handler(request)
    except web.HTTPException as error:
        return http_error_response(error, request)
    except ConnectionError:
        raise  # the client has gone; aiohttp knows what that means
    except Exception as error:
        return error_response(known_error(error, request["request_id"]))


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client its request's id."""
    response.headers["x-request-id"] = request.get("request_id", "")


def only_known(access: Access) -> Any:
    """Return the middleware that lets nobody in without a key where one is needed."""

    @web.middleware
    async def let_in(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        is_page = wants_page(request) or request.path.startswith("/page/")
        if request.path not in _OPEN_PATHS and not is_page:
            headers = {name.lower(): value for name, value in request.headers.items()}
            request_record.here().client = access.check(headers).name
        return await handler(request)

    return let_in


def make_app(
    relay: Relay,
    deployment_name: str,
    access: Access,
    observer: Observer,
    exposition: Exposition,
) -> web.Application:
    """Return the gateway of a deployment.

    Args:
        relay: answers.
        deployment_name: what the deployment is called.
        access: says who may ask.
        observer: sees the requests.
        exposition: tells what was counted.
    """
    app = web.Application(
        middlewares=[observer.middleware, answer_errors, only_known(access)],
        client_max_size=MAX_BODY_BYTES,
    )
    app.on_response_prepare.append(name_request)
    native = NativeRoutes(relay, deployment_name)
    openai = OpenAIRoutes(relay)
    page = PageRoutes()
    state = StateRoutes(relay, deployment_name, page)
    app.add_routes(
        [
            web.get("/", state.index),
            web.get("/page/{name}", page.file),
            web.get("/openapi.json", state.description),
            web.get("/health", state.health),
            web.get("/live", state.live),
            web.get("/metrics", exposition.metrics),
            web.post("/generate", native.generate),
            web.post("/mii/{deployment:.+}", native.generate_for),
            web.get("/v1/models", openai.models),
            web.get("/v1/models/{id:.+}", openai.model),
            web.post("/v1/chat/completions", openai.chat),
            web.post("/v1/completions", openai.complete),
        ]
    )
    return app
