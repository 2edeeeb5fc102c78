"""Certificates, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, *, days: int = 2) -> tuple[str, str]:
    """Make a certificate for localhost that is its own authority; return its file and its key's."""
    key, request, cert = (str(folder / f"{name}.{kind}") for kind in ("key", "csr", "pem"))
    names = folder / f"{name}.names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for command in (
        ["req", "-new", *kind, "-keyout", key, "-out", request, "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", request, "-signkey", key, "-days", str(days), "-out", cert]
        + ["-extfile", str(names)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return cert, key
