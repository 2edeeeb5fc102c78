"""What a user gets for a prompt."""

from __future__ import annotations

import json

from mii.engine.plan import TokenLogprobs
from mii.response import GenerationFinishReason, Response


def test_a_response_reads_as_its_text() -> None:
    response = Response("a cat\n", 3, 2, "stop")
    assert str(response) == repr(response) == f"{response}" == "a cat\n"
    assert str([response]) == "[a cat\n]"


def test_fields_go_out_and_come_back_by_name() -> None:
    response = Response("a", 3, 1, "length", [97], [TokenLogprobs(-0.5, ((97, -0.5), (98, -1.0)))])
    fields = response.to_msg_dict()
    assert (fields["generated_text"], fields["prompt_length"]) == ("a", 3)
    assert (fields["generated_length"], fields["finish_reason"]) == (1, "length")
    assert Response.from_msg_dict(fields) == response
    assert Response.from_msg_dict(json.loads(json.dumps(fields))) == response


def test_the_fields_of_deepspeed_mii_are_enough() -> None:
    response = Response.from_msg_dict(
        {"generated_text": "a", "prompt_length": 3, "generated_length": 1, "finish_reason": "stop"}
    )
    assert response == Response("a", 3, 1, GenerationFinishReason.STOP)


def test_finish_reasons_are_plain_strings_too() -> None:
    assert GenerationFinishReason.LENGTH == "length"
    assert f"{GenerationFinishReason.NONE}" == "none"
    assert json.dumps(GenerationFinishReason.STOP) == '"stop"'
