"""TLS of a deployment's surfaces: contexts, and certificates judged before anything starts."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from mii.errors import InvalidArgument, shorten

ALPN: Final = ("h2", "http/1.1")
_PORTIONS: Final = 10  # of a handshake between two ends in memory, which takes four


def server_context(
    certificate: str, key: str, client_authorities: str | None = None
) -> ssl.SSLContext:
    """Return the context of a server.

    Args:
        certificate: a PEM file with the certificate, and those between it and the authority's.
        key: a PEM file with its private key.
        client_authorities: a PEM file; clients must then show a certificate of one of these.

    Raises:
        InvalidArgument: naming the option, if a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(ALPN))
    for option, path in (("tls_certificate", certificate), ("tls_key", key)):
        if not Path(path).is_file():
            raise InvalidArgument(f"{option} = {shorten(path)} is no file", option)
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            f"tls_certificate = {shorten(certificate)} and tls_key = {shorten(key)} do not go "
            f"together: {error}",
            "tls_certificate",
        ) from None
    if client_authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_authorities)
        except (ssl.SSLError, OSError) as error:
            message = f"tls_client_ca = {shorten(client_authorities)} cannot be read: {error}"
            raise InvalidArgument(message, "tls_client_ca") from None
    return context


def check_certificate(certificate: str, key: str) -> str:
    """Return the first host name that a certificate is for, once it is known to be good today.

    Raises:
        InvalidArgument: naming the option, if it cannot be used, or has expired.
    """
    server = server_context(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its authority need not be in the file
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_PORTIONS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise InvalidArgument(
                    f"tls_certificate = {shorten(certificate)}: {error.verify_message}",
                    "tls_certificate",
                ) from None
    facts: Any = ends[0].getpeercert() or {}
    names = [str(name) for _, name in facts.get("subjectAltName", ())]
    return names[0].removeprefix("*.") if names else ""
