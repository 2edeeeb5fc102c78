"""Splitting a request into its prompts."""

from __future__ import annotations

import secrets

from mii.messages import MAX_NAME, MAX_SEQUENCES, partial_answers, seed_of
from mii.proto.inference_pb2 import GenerateRequest, PartialAnswer

_LONGEST_SUFFIX = len(f"-{MAX_SEQUENCES - 1}")


def split(request: GenerateRequest, request_id: str, client: str) -> dict[int, GenerateRequest]:
    """Return one request for each prompt, each of them whole: it can be sent to any replica, again.

    They are counted for `client`, whatever the request says. Prompts whose answers the client has
    already are left out; the others keep their places and ids.

    An explicit seed is every prompt's, so that answers do not depend on the order of prompts.
    Without one each prompt gets its own, drawn here: sent again, it has the same answer.

    Raises:
        InvalidArgument: if it is not clear which answers are wanted.
    """
    stem = request_id[: MAX_NAME - _LONGEST_SUFFIX]
    partial = partial_answers(request)
    singles = {}
    for index, prompt in enumerate(request.prompts):
        if partial is not None and index not in partial:
            continue
        single = GenerateRequest(
            request_id=request_id if len(request.prompts) == 1 else f"{stem}-{index}",
            prompts=[prompt],
            sampling=request.sampling,
            stream=request.stream,
            defaults=request.defaults,
            client=client,
            attempt=request.attempt,
        )
        if partial is not None:
            single.resume.extend(
                PartialAnswer(choice_index=choice, token_ids=ids)
                for choice, ids in partial[index].items()
            )
        seed = seed_of(request, index)
        single.sampling.seed = secrets.randbits(63) if seed is None else seed
        singles[index] = single
    return singles
