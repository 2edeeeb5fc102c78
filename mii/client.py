"""The Python client of a deployment."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from mii.channel import ClientSecurity
from mii.errors import (
    Cancelled,
    DeploymentError,
    InvalidArgument,
    Overloaded,
    ServiceError,
    Unavailable,
)
from mii.generation import (
    Messages,
    Prompts,
    StreamedAnswer,
    TokenIds,
    WholeAnswers,
    check_streaming_fn,
    check_timeout,
    generation_request,
    text_prompt,
    token_ids,
)
from mii.proto.inference_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    TokenizeRequest,
)
from mii.response import Response
from mii.retries import (
    REMOTE_RETRY_SECONDS,
    RETRY_SECONDS,
    Attempts,
    BrokenOff,
    Patience,
    deadline_of,
)

if TYPE_CHECKING:
    import grpc

# gRPC is imported with the first connection: it takes as long as all the rest of `import mii`.

_TERMINATE_SECONDS: Final = 10.0  # until a deployment that was told to end must be gone
_POLL_SECONDS: Final = 0.05
_NO_CONNECTION: Final = "failed to connect"  # C-core's words, by which alone it tells that

StreamingFunction = Callable[[list[Response]], object]


class DeploymentClient:
    """What clients of both kinds know of the deployment that they ask."""

    def __init__(
        self,
        address: str,
        *,
        deployment_name: str | None = None,
        rest_address: str | None = None,
        wait_until_gone: Callable[[], None] | None = None,
        is_gone: Callable[[], bool] | None = None,
        retry_seconds: float | None = None,
        api_key: str | None = None,
        tls_ca: str | None = None,
        tls_name: str = "",
        tls_certificate: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        """Connect at the first call.

        Args:
            address: host:port of the router.
            deployment_name: for messages.
            rest_address: host:port of the REST gateway, if there is one.
            wait_until_gone: called by `terminate_server`; returns when nothing is left. Without it,
                the deployment counts as gone when nobody listens at the address any more.
            is_gone: whether there is nothing to wait for any more; None: nobody knows.
            retry_seconds: for which a request is sent again while the deployment cannot be reached,
                once it could; 0: never; None: a minute if it runs on this machine, else 10 s. Where
                its queue is full, a request waits as long as it is told to, and tries twice more.
            api_key, tls_ca, tls_name, tls_certificate, tls_key: see `mii.channel.ClientSecurity`.

        Raises:
            InvalidArgument: if the address has no port.
        """
        host, _, port = address.rpartition(":")
        if not host or not _is_port(port):
            raise InvalidArgument.of("address", address, "host:port, such as localhost:50050")
        self.address = address
        self.deployment_name = deployment_name
        self.rest_address = rest_address
        self.wait_until_gone = wait_until_gone or self._wait_until_closed
        self.terminated = False
        self._is_gone = is_gone
        if retry_seconds is None:
            retry_seconds = REMOTE_RETRY_SECONDS if is_gone is None else RETRY_SECONDS
        self._retry_seconds = retry_seconds
        self.reached = False  # the deployment has answered
        self.security = ClientSecurity(api_key, tls_ca, tls_name, tls_certificate, tls_key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name})"

    @property
    def _name(self) -> str:
        name = f"deployment {self.deployment_name!r} at " if self.deployment_name else ""
        return name + self.address

    def refuse_if_terminated(self) -> None:
        """Refuse a call to a deployment that this client has ended."""
        if self.terminated:
            raise Unavailable(f"{self._name} has been terminated")

    def error_of(self, error: grpc.RpcError) -> Exception:
        """Return the error of ours that a failed call tells of."""
        from mii.status import ERROR_KEY, error_of_call

        call: Any = error
        failure = error_of_call(error)
        ours = any(key == ERROR_KEY for key, _ in call.trailing_metadata() or ())
        if isinstance(failure, Unavailable) and not ours:  # gRPC's own words
            if _NO_CONNECTION in str(failure):
                return Unavailable(f"{self._name} cannot be reached: {failure}")
            return BrokenOff(f"the connection to {self._name} broke off: {failure}")
        return failure

    def patience(self, timeout: float | None) -> Patience:
        """Return how long a call that begins now is tried."""
        return Patience(self._retry_seconds, deadline_of(timeout))

    def pause_after(self, error: Exception, patience: Patience) -> float:
        """Return the seconds until a call that has failed is tried again.

        Raises:
            Exception: the error itself, if that is of no use.
        """
        if isinstance(error, Unavailable):
            gone = self._is_gone() if self._is_gone is not None else not self.reached
            if self.terminated or gone:
                raise error
        return patience.pause_after(error)

    def _wait_until_closed(self) -> None:
        host, _, port = self.address.rpartition(":")
        deadline = time.monotonic() + _TERMINATE_SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
            except OSError:
                return
            time.sleep(_POLL_SECONDS)
        raise DeploymentError(
            f"{self._name} was told to end, and still listens after {_TERMINATE_SECONDS:g} seconds"
        )


class MIIClient(DeploymentClient):
    """Asks a deployment. May be used from several threads at once, and inside an event loop, which
    it blocks while it waits (AsyncMIIClient does not). A forked process makes a client of its own;
    gRPC does not survive a fork in the middle of a call, so fork before or after it, or spawn."""

    _channel: grpc.Channel | None = None
    _process: int | None = None  # that has made the channel

    def __init__(self, address: str, **facts: Any) -> None:
        super().__init__(address, **facts)
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompts | None = None,
        streaming_fn: StreamingFunction | None = None,
        *,
        prompt_token_ids: TokenIds | None = None,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> list[Response] | None:
        """Answer prompts.

        Args:
            prompts: one prompt or several.
            streaming_fn: called with a list of one Response for each piece of the answer to the
                only prompt; then nothing is returned.
            prompt_token_ids: in place of prompts: ids of one prompt, or of several.
            messages: in place of prompts: a conversation, [{"role": "user", "content": ...}, ...].
            timeout: seconds after which the call is given up, here and in the deployment.
            params: sampling parameters, such as max_new_tokens, temperature and stop.

        Returns:
            One Response for each prompt (and each of its `n` answers), in order.

        Raises:
            InvalidArgument: for a prompt or parameter that is not allowed.
            ServiceError: if no answer came: Unavailable, DeadlineExceeded, ...
        """
        streams = streaming_fn is not None
        check_streaming_fn(streaming_fn)
        request = generation_request(prompts, prompt_token_ids, messages, params, stream=streams)
        seconds = check_timeout(timeout)
        if streaming_fn is not None:
            for piece in self._stream(request, seconds):
                streaming_fn([piece])
            return None
        answers = WholeAnswers(request)
        for message in self._messages(request, seconds):
            answers.add(message)
        return answers.responses()

    __call__ = generate

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: TokenIds | None = None,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Iterator[Response]:
        """Iterate over the pieces of the answer to one prompt; `str()` of each is its text.

        The last one has the finish reason, and the answer's length as `generated_length`. Closing
        the iterator early ends the generation. Arguments and errors are those of `generate`.
        """
        request = generation_request(prompt, prompt_token_ids, messages, params, stream=True)
        return self._stream(request, check_timeout(timeout))

    def tokenize(
        self, text: str, add_special_tokens: bool = True, *, timeout: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, by default with the special tokens of a prompt."""
        request = tokenize_request(text, add_special_tokens)
        return list(self._ask("Tokenize", request, timeout).ids)

    def detokenize(
        self,
        ids: Sequence[int],
        keep_special_tokens: bool = False,
        *,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = detokenize_request(ids, keep_special_tokens)
        return str(self._ask("Detokenize", request, timeout).text)

    def terminate_server(self) -> None:
        """End the deployment; return when it is gone. If it is gone already, nothing happens.

        Raises:
            DeploymentError: if something of it does not end.
        """
        if self.terminated:
            return
        import grpc
        from google.protobuf.empty_pb2 import Empty

        from mii.proto.modelresponse_pb2_grpc import ModelResponseStub

        stub = ModelResponseStub(self._open_channel())
        patience = self.patience(None)
        while True:
            try:
                stub.Terminate(Empty(), timeout=_TERMINATE_SECONDS, metadata=self.security.metadata)
                break
            except grpc.RpcError as error:
                failure = self.error_of(error)
                if not isinstance(failure, Unavailable):
                    raise failure from None
                if self._is_gone is None or self._is_gone():
                    break
                time.sleep(patience.pause_after(failure))  # its router is being started again
        self.wait_until_gone()
        self.terminated = True
        self.close()

    def close(self) -> None:
        """Close the connection. The deployment lives on, and a further call connects again."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None and self._process == os.getpid():
            channel.close()

    def __enter__(self) -> MIIClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, request: GenerateRequest, timeout: float | None) -> Iterator[Response]:
        answer = StreamedAnswer()
        with contextlib.closing(self._messages(request, timeout)) as messages:
            for message in messages:
                yield from answer.pieces(message)

    def _messages(
        self, request: GenerateRequest, timeout: float | None
    ) -> Generator[GenerateResponse]:
        """Iterate over the messages of a request, however often it has to be sent."""
        attempts, patience = Attempts(request), self.patience(timeout)
        while True:
            try:
                call = self._call(attempts.next_request(), patience.remaining)
                with contextlib.closing(call) as messages:
                    for message in messages:
                        self.reached = True
                        patience.worked()
                        attempts.take(message)
                        yield message
                return
            except (Unavailable, Overloaded) as error:
                if attempts.finished:  # only the end of the call was lost
                    return
                time.sleep(self.pause_after(error, patience))

    def _call(self, request: GenerateRequest, timeout: float | None) -> Generator[GenerateResponse]:
        """Iterate over the messages of a Generate call."""
        import grpc

        from mii.proto.inference_pb2_grpc import InferenceStub

        with self._connected():
            call: Any = InferenceStub(self._open_channel()).Generate(
                request, timeout=timeout, metadata=self.security.metadata
            )
        try:
            yield from call
        except grpc.RpcError as error:
            raise self.error_of(error) from None
        finally:
            call.cancel()

    def _ask(self, method: str, request: Any, timeout: float | None) -> Any:
        """Call a method that has one answer."""
        import grpc

        from mii.proto.inference_pb2_grpc import InferenceStub

        patience = self.patience(check_timeout(timeout))
        while True:
            try:
                with self._connected():
                    answer = getattr(InferenceStub(self._open_channel()), method)(
                        request, timeout=patience.remaining, metadata=self.security.metadata
                    )
                self.reached = True
                return answer
            except grpc.RpcError as error:
                time.sleep(self.pause_after(self.error_of(error), patience))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        self.refuse_if_terminated()
        try:
            yield
        except ValueError as error:  # what gRPC says of a channel that another thread has closed
            if "closed channel" not in str(error):
                raise
            raise Cancelled("this client has been closed") from None

    def _open_channel(self) -> grpc.Channel:
        if self._channel is not None and self._process != os.getpid():
            raise ServiceError(
                f"this client of {self._name} is connected by process {self._process}, and "
                f"connections do not survive a fork: make a client of its own in process "
                f"{os.getpid()}, with mii.client({self.deployment_name or self.address!r})"
            )
        with self._lock:
            if self._channel is None:
                import grpc

                self._process = os.getpid()
                self._channel = self.security.open_channel(grpc, self.address)
            return self._channel


def tokenize_request(text: str, add_special_tokens: bool) -> TokenizeRequest:
    """Return the request for a text's ids."""
    return TokenizeRequest(prompt=text_prompt("text", text), add_special_tokens=add_special_tokens)


def detokenize_request(ids: Sequence[int], keep_special_tokens: bool) -> DetokenizeRequest:
    """Return the request for the text of ids."""
    return DetokenizeRequest(ids=token_ids("ids", ids), keep_special_tokens=keep_special_tokens)


def _is_port(text: str) -> bool:
    """Whether text is the number of a TCP port. gRPC would take larger ones modulo 2**16."""
    return text.isdecimal() and len(text) <= 5 and 0 < int(text) < 2**16
