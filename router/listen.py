"""Where a server listens: host names to addresses, and ports that are free."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from collections.abc import Sequence
from typing import Final

from mii.errors import InvalidArgument, PortInUse, shorten

_BACKLOG: Final = 1024
_MAX_FILES: Final = 2**17
_TRIES: Final = 20  # to find a port that is free on every address


def addresses_of(host: str) -> list[str]:
    """Return the IP addresses that a host name means; "localhost" is 127.0.0.1, and ::1 if any.

    Raises:
        InvalidArgument: if the name is not this machine's, or unknown.
    """
    if host == "localhost":
        return ["127.0.0.1", "::1"] if _can_bind("::1") else ["127.0.0.1"]
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"host {shorten(host)} is unknown: {error}", "host") from None
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    usable = [address for address in addresses if _can_bind(address)]
    if not usable:
        raise InvalidArgument(f"host {shorten(host)} is no address of this machine", "host")
    return usable


def allow_connections() -> None:
    """Let the process have as many open files, and so connections, as the system allows it.

    Shells allow 1,024 unless they are told otherwise, which idle connections alone could use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def join(address: str, port: int) -> str:
    """Return address and port as one string, IPv6 addresses in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def listen(
    addresses: Sequence[str], port: int, *, fall_back: bool, field: str
) -> list[socket.socket]:
    """Return one listening socket for each address, all on one port.

    Args:
        addresses: as `addresses_of` returns them.
        port: the port; 0 for any that is free on all addresses.
        fall_back: take any port if this one is taken.
        field: the argument that gave the port, for the error.

    Raises:
        PortInUse: if the port is taken.
        InvalidArgument: if it cannot be used at all.
    """
    if port != 0:
        try:
            return _listen(addresses, port)
        except OSError as error:
            if not fall_back or error.errno != errno.EADDRINUSE:
                raise _port_error(addresses, port, error, field) from None
    for _ in range(_TRIES - 1):
        try:
            return _listen(addresses, 0)
        except OSError:
            continue  # free on the first address, taken on another
    return _listen(addresses, 0)


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            listener = socket.create_server(
                (address, port),
                family=_family(address),
                backlog=_BACKLOG,
                dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
            )
            sockets.append(listener)
            port = listener.getsockname()[1]
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    return sockets


def _port_error(
    addresses: Sequence[str], port: int, error: OSError, field: str
) -> PortInUse | InvalidArgument:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"{field} {port} is in use on {', '.join(addresses)}: choose another {field}, or stop "
            "what listens there"
        )
    return InvalidArgument(f"{field} {port} cannot be used: {error.strerror}", field)


def _can_bind(address: str) -> bool:
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
