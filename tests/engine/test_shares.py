"""A client that fills its share of an engine leaves the rest to others."""

from __future__ import annotations

import pytest

from mii.engine.generator import Generator
from mii.engine.params import check_params
from mii.errors import Overloaded
from tests.fakes import fake_generator


def add(generator: Generator, client: str, *, moved: bool = False) -> int:
    params = check_params({"max_new_tokens": 3})
    resumed = {0: ()} if moved else None
    (request,) = generator.prompts.prepare(
        "abc", params, request_id="r", resumed=resumed, client=client
    )
    return generator.add(request)


def test_a_client_is_refused_beyond_its_share_and_others_are_not() -> None:
    generator = fake_generator(max_requests=8)
    handles = [add(generator, "a") for _ in range(4)]
    with pytest.raises(Overloaded, match="'a', has 4 .*its share of 8"):
        add(generator, "a")
    generator.abort(handles[0])
    handles = [add(generator, client) for client in ("a", "b", "")]
    handles.append(add(generator, "a", moved=True))  # or it would be lost
    add(generator, "")
    with pytest.raises(Overloaded, match="8 requests are running or waiting"):
        add(generator, "c")
    while generator.has_work:
        generator.step()
    assert not generator._held
    for _ in range(4):
        add(generator, "a")


def test_without_clients_all_may_be_used() -> None:
    generator = fake_generator(max_requests=8)
    for _ in range(8):
        add(generator, "")
