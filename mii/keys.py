"""Keys that clients show: what is kept of them, and how they are compared.

Only digests are kept, in the registry's file and in the processes: who reads them has no key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Final

KEY_VARIABLE: Final = "MII_API_KEY"  # environment variable from which clients take their key
LEAST_KEY_LENGTH: Final = 8
MAX_KEY_LENGTH: Final = 512


def draw_token() -> str:
    """Draw the secret of a deployment, which its own processes and its user's programs show."""
    return secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def is_among(key: str, digests: Iterable[str]) -> bool:
    """Return whether a key is one of those whose digests are kept.

    The time that it takes tells nothing of the keys: all are compared, by their digests.
    """
    shown = digest_of(key)
    found = False
    for digest in digests:
        found |= hmac.compare_digest(shown, digest)
    return found


def is_key(key: str) -> bool:
    """Return whether a text may be a key: printable ASCII without blanks, of some length."""
    fits = LEAST_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH
    return fits and key.isascii() and key.isprintable() and " " not in key


def key_headers(
    key: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a key, or the environment's if there is none."""
    key = key or environment.get(KEY_VARIABLE)
    return (("authorization", f"Bearer {key}"),) if key else ()
