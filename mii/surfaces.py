"""What a deployment listens on, and who may use it: one line for each surface."""

from __future__ import annotations

from mii.config import DeploymentConfig
from mii.registry import address_of


def describe_surfaces(config: DeploymentConfig, port: int, rest_port: int | None) -> list[str]:
    """Return a line for each surface that is open."""
    secure = config.tls_certificate is not None
    traits = [
        f"listens on {config.host}",
        ("TLS" if config.tls_client_ca is None else "TLS with client certificates")
        if secure
        else "no TLS",
        f"{len(config.api_keys)} keys" if config.api_keys else "no key needed",
    ]
    if config.admin_keys:
        traits.append(f"{len(config.admin_keys)} admin keys")
    also = " and REST" if config.enable_rest else ""
    lines = [f"gRPC{also} at {address_of(config.host, port)} ({', '.join(traits)})"]
    if rest_port is not None:
        traits[0] = f"listens on {config.rest_host}"
        scheme = "https" if secure else "http"
        address = address_of(config.rest_host, rest_port)
        lines.append(f"REST at {scheme}://{address} ({', '.join(traits)})")
    return lines
