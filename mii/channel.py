"""Channels to our servers: their options, and what a client shows and trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mii.errors import InvalidArgument
from mii.keys import key_headers

MAX_MESSAGE_BYTES: Final = 128 * 2**20

Options = list[tuple[str, int | str]]

# Environment variable with a PEM file: the authorities that clients trust, where the deployment's
# own certificate does not say it.
TLS_CA_VARIABLE: Final = "MII_TLS_CA"

_MESSAGE_SIZES: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]


@dataclass(frozen=True)
class ClientSecurity:
    """What a client shows and trusts.

    Args:
        api_key: the key; None: the environment's, if there is one.
        tls_ca: a PEM file with the authorities of the server's certificate; "": those that this
            machine trusts; None: no TLS.
        tls_name: the name in the server's certificate, if the server is reached by another.
        tls_certificate, tls_key: PEM files by which the client itself is known, if it must be.
    """

    api_key: str | None = None
    tls_ca: str | None = None
    tls_name: str = ""
    tls_certificate: str | None = None
    tls_key: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return key_headers(self.api_key)

    def open_channel(self, library: Any, address: str) -> Any:
        """Return a channel.

        Args:
            library: `grpc` or `grpc.aio`.
            address: host:port.

        Raises:
            InvalidArgument: if a file cannot be read.
        """
        options: Options = channel_options()
        if self.tls_ca is None:
            return library.insecure_channel(address, options)
        import grpc

        if self.tls_name:
            options.append(("grpc.ssl_target_name_override", self.tls_name))
        credentials = grpc.ssl_channel_credentials(
            _read("tls_ca", self.tls_ca or None),
            _read("tls_key", self.tls_key),
            _read("tls_certificate", self.tls_certificate),
        )
        return library.secure_channel(address, credentials, options)


def _read(name: str, path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name} = {path!r} cannot be read: {error}", name) from None


def channel_options() -> Options:
    """Return the options of a channel.

    It pings while a call waits, which a server with C-core's own options would refuse after
    minutes. The ping timeout is set by itself because C-core's keepalive timeout does not find a
    peer that hangs under a busy stream.
    """
    return [
        *_MESSAGE_SIZES,
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", 30000),
        ("grpc.keepalive_timeout_ms", 10000),
        ("grpc.http2.ping_timeout_ms", 10000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
