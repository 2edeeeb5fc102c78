"""A call to generate as its client sees it: the request that it sends, the answers that come."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from mii.engine.params import check_params
from mii.errors import InternalError, InvalidArgument
from mii.messages import choices_of, sampling_message
from mii.proto import inference_pb2
from mii.proto.inference_pb2 import Chat, GenerateRequest, Prompt, SequenceDelta
from mii.response import Response

if TYPE_CHECKING:
    from mii.engine.plan import TokenLogprobs

Prompts = str | Sequence[str]
TokenIds = Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, Any]]

_MAX_ID: Final = 2**31 - 1
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Parameters of DeepSpeed-MII that its server overwrites with what it knows better.
_IGNORED: Final = ("prompt_length", "stream")


def generation_request(
    prompts: Prompts | None,
    prompt_token_ids: TokenIds | None,
    messages: Messages | None,
    params: Mapping[str, object],
    *,
    stream: bool,
) -> GenerateRequest:
    """Return the request for what a user has asked.

    Args:
        prompts: one prompt or several.
        prompt_token_ids: in place of prompts: ids of one prompt or of several.
        messages: in place of prompts: a conversation.
        params: sampling parameters; numbers may be numpy's.
        stream: ask for pieces of the answer, of which there may be only one.

    Raises:
        InvalidArgument: naming what is not allowed.
    """
    if sum(given is not None for given in (prompts, prompt_token_ids, messages)) != 1:
        raise InvalidArgument(
            "give exactly one of prompts, prompt_token_ids and messages", "prompts"
        )
    if params.get("stream") and not stream:
        raise InvalidArgument(
            "stream = True is not allowed here: iterate over client.stream(prompt, ...), or give a "
            "streaming_fn",
            "stream",
        )
    given = {name: _plain(value) for name, value in params.items() if name not in _IGNORED}
    checked = check_params(given)
    if messages is not None:
        inputs = [_conversation(messages)]
    elif prompt_token_ids is not None:
        inputs = _token_prompts(prompt_token_ids)
    else:
        inputs = _text_prompts(prompts)
    if stream and (len(inputs) != 1 or checked.get("n", 1) != 1):
        raise InvalidArgument(
            f"streaming takes exactly one prompt with n = 1, and there are {len(inputs)} prompts "
            f"with n = {checked.get('n', 1)}: call once for each",
            "prompts",
        )
    return GenerateRequest(prompts=inputs, sampling=sampling_message(checked), stream=stream)


def check_timeout(timeout: object) -> float | None:
    """Return a user's deadline in seconds; None: none.

    Raises:
        InvalidArgument: if it is no positive number.
    """
    seconds = _plain(timeout)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InvalidArgument.of("timeout", timeout, "a positive number of seconds, or None")
    return float(min(seconds, 1e9))  # beyond that, C-core's clock overflows


def check_streaming_fn(streaming_fn: object) -> None:
    """Refuse what cannot be called, before anything is generated for it.

    Raises:
        InvalidArgument: naming it.
    """
    if streaming_fn is not None and not callable(streaming_fn):
        raise InvalidArgument.of("streaming_fn", streaming_fn, "a function of one argument")


class WholeAnswers:
    """Collects the answers of a call without streaming, which come in the order of their ends."""

    def __init__(self, request: GenerateRequest) -> None:
        self._choices = choices_of(request)
        self._responses: list[Response | None] = [None] * (len(request.prompts) * self._choices)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Take in a message of the server."""
        for delta in message.deltas:
            usage = delta.usage
            place = delta.prompt_index * self._choices + delta.choice_index
            self._responses[place] = _response(delta, usage.prompt_tokens, usage.completion_tokens)

    def responses(self) -> list[Response]:
        """Return all answers, in the order of their prompts.

        Raises:
            InternalError: if some have not come.
        """
        whole = [response for response in self._responses if response is not None]
        if len(whole) < len(self._responses):
            raise InternalError(
                f"the server ended the call after {len(whole)} of {len(self._responses)} answers"
            )
        return whole


class StreamedAnswer:
    """Turns the deltas of one answer into pieces of it."""

    def __init__(self) -> None:
        self._prompt_length = 0
        self._generated_length = 0

    def pieces(self, message: inference_pb2.GenerateResponse) -> list[Response]:
        """Return what a message of the server holds."""
        responses = []
        for delta in message.deltas:
            self._prompt_length = delta.usage.prompt_tokens or self._prompt_length
            self._generated_length += len(delta.token_ids)
            responses.append(_response(delta, self._prompt_length, self._generated_length))
        return responses


def _response(delta: SequenceDelta, prompt_length: int, generated_length: int) -> Response:
    return Response(
        generated_text=delta.text,
        prompt_length=prompt_length,
        generated_length=generated_length,
        finish_reason=delta.finish_reason or "none",
        token_ids=list(delta.token_ids),
        logprobs=[_logprobs(each) for each in delta.logprobs],
    )


def _logprobs(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    from mii.engine.plan import TokenLogprobs  # imports NumPy

    top = tuple((each.token_id, each.logprob) for each in message.top)
    return TokenLogprobs(message.sampled.logprob, top)


def text_prompt(field: str, text: object) -> Prompt:
    """Return a text as a prompt. Lone surrogates become U+FFFD: UTF-8 has none.

    Raises:
        InvalidArgument: if it is no string, naming `field`.
    """
    if not isinstance(text, str):
        raise InvalidArgument.of(field, text, "a string")
    if _SURROGATE.search(text):  # pairs of them, as from JSON's \ud83d\ude00, are joined
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return Prompt(text=text)


def token_ids(field: str, ids: object) -> list[int]:
    """Return token ids, which may come in an array or a tensor, as a list.

    Raises:
        InvalidArgument: if there are none, or something else among them, naming `field`.
    """
    values = _as_list(field, ids)
    for token in values:
        if (
            not isinstance(token, Integral)
            or isinstance(token, bool)
            or not 0 <= int(token) <= _MAX_ID
        ):
            raise InvalidArgument.of(field, token, "a list of token ids of the model's vocabulary")
    return [int(token) for token in values]


def _text_prompts(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str):
        return [text_prompt("prompts", prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidArgument.of("prompts", prompts, "a string or a list of strings")
    _refuse_empty(prompts, "prompts")
    return [text_prompt(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _token_prompts(given: object) -> list[Prompt]:
    prompts = _as_list("prompt_token_ids", given)
    if isinstance(prompts[0], Integral):  # the ids of one prompt
        return [_token_prompt("prompt_token_ids", prompts)]
    return [
        _token_prompt(f"prompt_token_ids[{index}]", prompt) for index, prompt in enumerate(prompts)
    ]


def _token_prompt(field: str, ids: object) -> Prompt:
    return Prompt(token_ids=inference_pb2.TokenIds(ids=token_ids(field, ids)))


def _as_list(field: str, values: object) -> list[Any]:
    """Return the items of a sequence, an array or a tensor."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise InvalidArgument.of(field, values, "a list of token ids")
    _refuse_empty(plain, field)
    return list(plain)


def _refuse_empty(values: Sequence[object], field: str) -> None:
    if not values:
        raise InvalidArgument(f"{field} is empty: give at least one", field)


def _conversation(messages: object) -> Prompt:
    allowed = "a list of messages, each with a role and content"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidArgument.of("messages", messages, allowed)
    _refuse_empty(messages, "messages")
    try:
        content = json.dumps(list(messages))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"messages cannot be written as JSON: {error}", "messages") from None
    return Prompt(chat=Chat(messages_json=content, add_generation_prompt=True))


def _plain(value: object) -> object:
    """Return a scalar of numpy or torch as Python's own; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value
