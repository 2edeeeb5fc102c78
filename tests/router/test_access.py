"""Who may call what, by the keys that are configured and the one that is shown."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from mii.errors import InvalidArgument, PermissionDenied, Unauthenticated
from mii.keys import digest_of, is_among, is_key
from mii.option_checks import Keys
from mii.router.access import Access, Caller

USER, ADMIN, TOKEN = "user-key-1", "admin-key-1", "deployment-token"
GENERATE = "/mii.v1.Inference/Generate"
TERMINATE = "/modelresponse.ModelResponse/Terminate"
SCALE = "/mii.v1.Deployment/Scale"
HEALTH = "/grpc.health.v1.Health/Check"


def access(api: tuple[str, ...] = (), admin: tuple[str, ...] = ()) -> Access:
    return Access([digest_of(key) for key in api], [digest_of(key) for key in admin], TOKEN)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def outcome(access: Access, path: str, headers: dict[str, str]) -> str:
    try:
        access.check_call(path, headers)
    except Unauthenticated:
        return "who?"
    except PermissionDenied:
        return "no"
    return "yes"


NOBODY, WRONG = {}, bearer("wrong-key-1")


@pytest.mark.parametrize(
    ("keys", "headers", "answers"),
    [  # Generate, Terminate, Scale
        ((), NOBODY, "yes yes yes"),
        ((), WRONG, "yes yes yes"),
        (((USER,),), NOBODY, "who? who? who?"),
        (((USER,),), WRONG, "who? who? who?"),
        (((USER,),), bearer(USER), "yes yes yes"),
        (((USER,),), bearer(TOKEN), "yes yes yes"),
        (((USER,), (ADMIN,)), NOBODY, "who? who? who?"),
        (((USER,), (ADMIN,)), WRONG, "who? who? who?"),
        (((USER,), (ADMIN,)), bearer(USER), "yes no no"),
        (((USER,), (ADMIN,)), bearer(ADMIN), "yes yes yes"),
        (((USER,), (ADMIN,)), bearer(TOKEN), "yes yes yes"),
        (((), (ADMIN,)), NOBODY, "yes no no"),
        (((), (ADMIN,)), WRONG, "yes no no"),
        (((), (ADMIN,)), bearer(ADMIN), "yes yes yes"),
    ],
)
def test_who_may_call_what(keys: Any, headers: dict[str, str], answers: str) -> None:
    judge = access(*keys)
    got = [outcome(judge, path, headers) for path in (GENERATE, TERMINATE, SCALE)]
    assert got == answers.split()
    assert outcome(judge, HEALTH, headers) == "yes"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {USER}"},
        {"authorization": f"bearer  {USER} "},
        {"x-api-key": USER},
    ],
)
def test_a_key_is_shown_in_either_header(headers: dict[str, str]) -> None:
    assert access((USER,)).check(headers).name


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": USER},
        {"authorization": f"Basic {USER}"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {USER}x"},
        {"authorization": f"Bearer {USER.upper()}"},
        {"authorization": f"Bearer {digest_of(USER)}"},
        {"x-api-key": ""},
    ],
)
def test_what_is_no_key_is_none(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        access((USER,)).check(headers)


def test_callers_are_told_apart_by_a_name_that_tells_no_key() -> None:
    judge = access((USER, "user-key-2"))
    one, other = judge.check(bearer(USER)), judge.check(bearer("user-key-2"))
    assert one.name != other.name and one == judge.check(bearer(USER))
    assert USER not in one.name and one.name in hashlib.sha256(USER.encode()).hexdigest()
    assert access().check(NOBODY) == Caller("", admin=True)


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(one: str, other: str) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    digests = [digest_of(f"some-key-{number}") for number in range(5)]
    assert is_among("some-key-0", digests)
    assert compared == digests


@pytest.mark.parametrize(
    "key",
    [
        "short",
        "has a blank",
        "tab\tin-it",
        "\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9",
        "x" * 600,
    ],
)
def test_what_cannot_be_a_key_is_refused_without_being_shown(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(InvalidArgument, match="api_keys") as caught:
        Keys().check("api_keys", [USER, key])
    assert key not in str(caught.value)


def test_keys_come_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{USER}\n  {ADMIN}  \n")
    assert Keys().check("api_keys", str(path)) == (digest_of(USER), digest_of(ADMIN))
    with pytest.raises(InvalidArgument, match="neither"):
        Keys().check("api_keys", str(tmp_path / "none"))
    path.write_text("# nothing\n")
    with pytest.raises(InvalidArgument):
        Keys().check("api_keys", path)
