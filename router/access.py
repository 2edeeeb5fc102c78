"""Who may call what: keys of clients, keys of admins, and the deployment's own token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mii.errors import PermissionDenied, Unauthenticated
from mii.keys import digest_of, is_among

_OPEN_SERVICES: Final = ("/grpc.health.v1.Health/",)
_ADMIN_SERVICES: Final = ("/mii.v1.Deployment/", "/modelresponse.ModelResponse/Terminate")
_BEARER: Final = "bearer "
_NAME_LENGTH: Final = 12


@dataclass(frozen=True)
class Caller:
    """Who makes a call.

    Args:
        name: for logs and for fair shares; tells the key from others, and not the key.
        admin: whether it may change the deployment.
    """

    name: str
    admin: bool


class Access:
    """Judges calls by the key that they show.

    Without keys everybody may do everything. With `api_keys` every call needs one; with
    `admin_keys` those that change the deployment need one of these. The deployment's own token,
    which its user's programs on this machine find in the registry, counts as an admin's.

    Args:
        api_keys: digests, see `mii.keys`.
        admin_keys: digests.
        token: the deployment's; "": there is none.
    """

    def __init__(
        self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = (), token: str = ""
    ) -> None:
        self._api_keys = tuple(api_keys)
        self._admin_keys = tuple(admin_keys)
        self._token = (digest_of(token),) if token else ()

    @property
    def closed(self) -> bool:
        """Whether calls need a key."""
        return bool(self._api_keys)

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Return who calls.

        Args:
            headers: of the request, their names in lower case.

        Raises:
            Unauthenticated: without a key where one is needed, or with an unknown one.
        """
        key = _key_of(headers)
        if not self._api_keys and not self._admin_keys:
            return Caller("", admin=True)
        if not key:
            if self._api_keys:
                raise Unauthenticated(
                    "this deployment needs a key: send 'Authorization: Bearer KEY' or 'x-api-key'"
                )
            return Caller("", admin=False)
        if is_among(key, self._token):
            return Caller("", admin=True)
        name = digest_of(key)[:_NAME_LENGTH]
        admin = is_among(key, self._admin_keys)
        if not (admin or is_among(key, self._api_keys)):
            if not self._api_keys:
                return Caller("", admin=False)  # clients send some key to open servers, too
            raise Unauthenticated("the key is not one of this deployment's")
        return Caller(name, admin=admin or not self._admin_keys)

    def check_call(self, path: str, headers: Mapping[str, str]) -> Caller:
        """Return who makes a gRPC call.

        Raises:
            Unauthenticated: see `check`.
            PermissionDenied: for a call that changes the deployment, without an admin's key.
        """
        if path.startswith(_OPEN_SERVICES):
            return Caller("", admin=False)
        caller = self.check(headers)
        if path.startswith(_ADMIN_SERVICES) and not caller.admin:
            raise PermissionDenied(f"{path[1:]} needs one of the deployment's admin_keys")
        return caller


def _key_of(headers: Mapping[str, str]) -> str:
    given = headers.get("authorization", "")
    if given[: len(_BEARER)].lower() == _BEARER:
        return given[len(_BEARER) :].strip()
    return headers.get("x-api-key", "").strip()
