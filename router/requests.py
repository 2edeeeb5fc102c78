"""Splitting a request into its prompts."""

from __future__ import annotations

import secrets

from mii.messages import MAX_NAME, MAX_SEQUENCES
from mii.proto.inference_pb2 import GenerateRequest

_LONGEST_SUFFIX = len(f"-{MAX_SEQUENCES - 1}")


def split(request: GenerateRequest, request_id: str, client: str) -> list[GenerateRequest]:
    """Return one request for each prompt, each of them whole: it can be sent to any replica, again.

    They are counted for `client`, whatever the request says.

    An explicit seed is every prompt's, so that answers do not depend on the order of prompts.
    Without one each prompt gets its own, drawn here: sent again, it has the same answer.
    """
    stem = request_id[: MAX_NAME - _LONGEST_SUFFIX]
    singles = []
    for index, prompt in enumerate(request.prompts):
        single = GenerateRequest(
            request_id=request_id if len(request.prompts) == 1 else f"{stem}-{index}",
            prompts=[prompt],
            sampling=request.sampling,
            stream=request.stream,
            defaults=request.defaults,
            resume=request.resume,
            client=client,
        )
        if not single.sampling.HasField("seed"):
            single.sampling.seed = secrets.randbits(63)
        singles.append(single)
    return singles
