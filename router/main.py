"""The router process: `python -P -m mii.router.main --control-fd N`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from aiohttp import web

from mii import control, logs, traces
from mii.channel import MAX_MESSAGE_BYTES
from mii.config import DeploymentConfig
from mii.errors import MIIError
from mii.http2.limits import Limits
from mii.http2.listener import Switch
from mii.http2.server import Server
from mii.http2.server_call import ServerCall
from mii.keys import key_headers
from mii.proto import deployment_pb2, inference_pb2, modelresponse_pb2
from mii.pulse import Pulse
from mii.router.access import Access
from mii.router.balancer import POLICIES
from mii.router.exposition import Exposition
from mii.router.gateway.app import make_app
from mii.router.legacy import LegacyServicer
from mii.router.limits import RequestLimit
from mii.router.listen import addresses_of, allow_connections, listen
from mii.router.observer import Observer
from mii.router.operator import OperatorServicer
from mii.router.relay import Relay
from mii.router.replicas import Replicas
from mii.router.servicer import Servicer
from mii.router.transport import Http2Transport
from mii.rpc import health, reflection
from mii.rpc.health import Health
from mii.rpc.methods import fault_of
from mii.surfaces import describe_surfaces
from mii.tls import server_context

_SERVICES: Final = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    modelresponse_pb2.DESCRIPTOR.services_by_name["ModelResponse"].full_name,
    deployment_pb2.DESCRIPTOR.services_by_name["Deployment"].full_name,
)
_NO_REST: Final = b"This port speaks gRPC; REST is served with enable_rest=True.\n"
_STOP_GRACE: Final = 1.0  # seconds for calls under way, of the three that a Stop allows
# Before they end, which would cancel them in the workers, too.
_PARTING_SECONDS: Final = 0.1
_TICK_SECONDS: Final = 0.2
_TERMINATE_SECONDS: Final = 1.0  # until a client is told that the deployment will end, at most

_logger = logging.getLogger("mii.router")
_silent = logging.getLogger("mii.router.aiohttp")
_silent.disabled = True


class Router:
    """The servers of one deployment. Belongs to one event loop."""

    def __init__(
        self,
        config: DeploymentConfig,
        terminate: Callable[[], Awaitable[None]],
        operate: Callable[[control.Operation], None],
    ) -> None:
        """Make everything, and listen on nothing yet.

        Args:
            config: of the deployment.
            terminate: asks for the deployment's end; the client is answered when it returns.
            operate: passes on what an operator asks for.
        """
        self._config = config
        self._observer = Observer(config.engine.model_name)
        self._access = Access(config.api_keys, config.admin_keys, config.token)
        self._tls = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self._tls = server_context(config.tls_certificate, config.tls_key, config.tls_client_ca)
        self._replicas = Replicas(
            partial(Http2Transport, metadata=key_headers(config.token, {})),
            POLICIES[config.routing_policy](),
            lambda: self._health.changed(),
            weights=config.replica_weights,
        )
        relay = Relay(
            self._replicas,
            config.engine.model_name,
            RequestLimit(config.max_requests, config.max_queued_tokens),
        )
        self._health = Health([*_SERVICES, *reflection.SERVICES], lambda: relay.serving)
        self._operator = OperatorServicer(config.deployment_name, self._replicas, operate)
        self._server = Server(
            self._observer.handlers(
                {
                    **Servicer(relay).handlers,
                    **LegacyServicer(relay, terminate).handlers,
                    **self._operator.handlers,
                    **self._health.handlers,
                    **reflection.reflection_handlers([*_SERVICES, health.SERVICE]),
                }
            ),
            limits=Limits(max_message_bytes=MAX_MESSAGE_BYTES),
            authorise=self._observer.judged(self._authorise),
            fault_of=fault_of,
        )
        self._gateway = web.AppRunner(
            make_app(
                relay,
                config.deployment_name,
                self._access,
                self._observer,
                Exposition(self._observer, self._replicas),
            ),
            handler_cancellation=True,  # a client that has gone cancels what is done for it
            access_log=None,
            logger=_silent,  # what a client sends that is no HTTP is nobody's error but its own
            shutdown_timeout=_STOP_GRACE,
        )

    async def start(self) -> control.Ready:
        """Listen on the deployment's ports, and return which they are.

        Raises:
            PortInUse, InvalidArgument: if that is not possible.
        """
        await self._gateway.setup()
        port = await self._start_grpc()
        rest_port = await self._start_rest() if self._config.enable_rest else None
        for line in describe_surfaces(self._config, port, rest_port):
            _logger.info("%s", line)
        return control.Ready(port=port, rest_port=rest_port)

    def update(self, told: control.Message) -> None:
        """Take the supervisor's word on the replicas."""
        self._observer.history.take(told)
        match told:
            case control.Replicas():
                self._replicas.update(told.replicas)
            case control.Died():
                self._replicas.died(told)
            case control.OperationEnded():
                self._operator.ended(told)

    async def stop(self) -> None:
        """Take no more requests, give those under way a moment, and end them."""
        loop = asyncio.get_running_loop()
        parting = loop.call_later(_STOP_GRACE - _PARTING_SECONDS, self._replicas.part)
        await asyncio.gather(self._server.stop(_STOP_GRACE), self._gateway.cleanup())
        parting.cancel()
        await self._replicas.close()

    async def _start_grpc(self) -> int:
        config = self._config
        sockets = listen(
            addresses_of(config.host), config.port, fall_back=config.port_is_default, field="port"
        )
        for listener in sockets:
            await self._server.listen(listener, self._tls, protocol=self._switch)
        port: int = sockets[0].getsockname()[1]
        return port

    def _authorise(self, call: ServerCall) -> None:
        call.identity = self._access.check_call(call.path, call.headers)

    def _switch(self) -> asyncio.Protocol:
        """Return what begins a connection: REST is served on gRPC's port, too."""
        rest = self._gateway.server if self._config.enable_rest else None
        return Switch(self._server.protocol, rest, _NO_REST)

    async def _start_rest(self) -> int:
        config = self._config
        sockets = listen(
            addresses_of(config.rest_host),
            config.rest_port,
            fall_back=config.rest_port_is_default,
            field="rest_port",
        )
        for listener in sockets:
            await web.SockSite(self._gateway, listener, ssl_context=self._tls).start()
        port: int = sockets[0].getsockname()[1]
        return port


async def _tick(pulse: Pulse) -> None:
    """Show the supervisor that the event loop runs."""
    while True:
        pulse.tick()
        await asyncio.sleep(_TICK_SECONDS)


async def run(channel: control.ControlChannel, start: control.Start) -> None:
    """Serve until told to stop. The end of the control channel ends the process at once."""
    config = start.config
    loop = asyncio.get_running_loop()
    pulse = Pulse.create() if start.pulse_fd is None else Pulse(start.pulse_fd)
    ticking = asyncio.create_task(_tick(pulse))
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)

    async def terminate() -> None:
        """Ask for the end, and wait for it to begin: the deployment's name is then free again."""
        channel.send(control.Terminate())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _TERMINATE_SECONDS)

    router = Router(config, terminate, channel.send)

    def on_message(message: control.Message) -> None:
        if isinstance(message, control.Stop):
            loop.call_soon_threadsafe(stopped.set)
        else:
            loop.call_soon_threadsafe(router.update, message)

    channel.listen(on_message)
    channel.send(await router.start())
    await stopped.wait()
    await router.stop()
    ticking.cancel()
    traces.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def main() -> None:
    """Run the process."""
    # Ctrl-C in a terminal reaches every process of its group; the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = control.ControlChannel.from_arguments(sys.argv[1:])
    start = channel.receive_start()
    logs.set_up("router", start.config)
    traces.set_up("router", start.config.deployment_name)
    allow_connections()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(channel, start))
    except Exception as error:
        foreseen = isinstance(error, MIIError)
        _logger.error("the router cannot go on: %s", error, exc_info=None if foreseen else error)
        channel.send(control.Failed.of(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
