"""mii.v1.Inference over real gRPC: what a request means, and how its answers come."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from mii.messages import ACCEPTED_KEY
from mii.proto import inference_pb2
from mii.proto.inference_pb2 import (
    Chat,
    DetokenizeRequest,
    GenerateRequest,
    ListModelsRequest,
    Prompt,
    SamplingParams,
    SequenceDelta,
    TokenIds,
    TokenizeRequest,
)
from mii.status import ERROR_KEY, FIELD_KEY
from tests.fakes import EOS, VOCAB, ByteTokenizer, continuation
from tests.serving import MODEL, ServedWorker
from tests.workers.conftest import StartWorker


def asked(
    *texts: str, stream: bool = False, defaults: int = 0, model: str = "", **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        prompts=[Prompt(text=text) for text in texts],
        sampling=SamplingParams(**sampling),
        stream=stream,
        defaults=defaults,  # type: ignore[arg-type]
        model=model,
    )


def deltas_of(worker: ServedWorker, request: GenerateRequest) -> list[SequenceDelta]:
    return [delta for message in worker.stub.Generate(request) for delta in message.deltas]


def ids_of(text: str, count: int) -> list[int]:
    return continuation(list(text.encode()), count)


def text_of(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_an_answer_comes_whole_in_one_delta(worker: ServedWorker) -> None:
    request = asked("abc", max_new_tokens=12, temperature=0)
    (delta,) = deltas_of(worker, request)
    expected = ids_of("abc", 12)
    assert list(delta.token_ids) == expected
    assert delta.text == text_of(expected)
    assert delta.finish_reason == "length"
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (3, 12)
    assert delta.usage.total_seconds >= delta.usage.time_to_first_token_seconds > 0
    assert not delta.HasField("stop_match") and not delta.logprobs


def test_a_stream_adds_up_to_the_whole_answer(worker: ServedWorker) -> None:
    deltas = deltas_of(worker, asked("abc", stream=True, max_new_tokens=12, temperature=0))
    expected = ids_of("abc", 12)
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert "".join(delta.text for delta in deltas) == text_of(expected)
    assert [delta.finish_reason for delta in deltas] == [""] * (len(deltas) - 1) + ["length"]
    assert deltas[0].usage.prompt_tokens == deltas[-1].usage.prompt_tokens == 3
    assert all(not delta.HasField("usage") for delta in deltas[1:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_their_choices_are_numbered(worker: ServedWorker, stream: bool) -> None:
    texts = ("a", "bcd", "efghijk")
    deltas = deltas_of(worker, asked(*texts, stream=stream, n=2, max_new_tokens=5, temperature=0))
    answers: dict[tuple[int, int], list[int]] = {}
    for delta in deltas:
        answers.setdefault((delta.prompt_index, delta.choice_index), []).extend(delta.token_ids)
    assert answers == {
        (p, choice): ids_of(text, 5) for p, text in enumerate(texts) for choice in range(2)
    }
    assert sum(delta.finish_reason != "" for delta in deltas) == 6


def test_a_stream_is_accepted_before_its_first_token(start_worker: StartWorker) -> None:
    worker = start_worker(gated=True)
    request = asked("abc", stream=True, max_new_tokens=2)
    request.request_id = "id-7"
    call = worker.stub.Generate(request)
    assert (ACCEPTED_KEY, "id-7") in [tuple(pair) for pair in call.initial_metadata()]
    worker.model.open.set()
    assert sum(len(delta.token_ids) for message in call for delta in message.deltas) == 2


def test_a_stop_string_is_told_and_not_shown(worker: ServedWorker) -> None:
    text = text_of(ids_of("abc", 12))
    (delta,) = deltas_of(worker, asked("abc", max_new_tokens=12, temperature=0, stop=[text[6:8]]))
    assert (delta.text, delta.finish_reason) == (text[:6], "stop")
    assert delta.stop_match == text[6:8]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_their_tokens_bytes(worker: ServedWorker, stream: bool) -> None:
    request = asked("abc", stream=stream, max_new_tokens=6, temperature=0, logprobs=2)
    tokens = [t for delta in deltas_of(worker, request) for t in delta.logprobs]
    likely = math.log(math.exp(10) / (math.exp(10) + VOCAB - 1))  # the fake model's 10 against 0
    assert [t.sampled.token_id for t in tokens] == ids_of("abc", 6)
    for token in tokens:
        assert token.sampled.logprob == pytest.approx(likely, abs=1e-5)
        assert token.sampled.token == bytes([token.sampled.token_id])
        assert len(token.top) == 2 and token.top[0] == token.sampled


def test_a_conversation_is_rendered_by_the_template(worker: ServedWorker) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = Prompt(chat=Chat(messages_json=json.dumps(messages), add_generation_prompt=True))
    request = GenerateRequest(
        prompts=[chat], sampling=SamplingParams(max_new_tokens=4, temperature=0)
    )
    (delta,) = deltas_of(worker, request)
    rendered = "user: hi\nassistant: "
    assert list(delta.token_ids) == ids_of(rendered, 4)
    ids = worker.stub.Tokenize(TokenizeRequest(prompt=chat)).ids
    assert bytes(ids).decode() == rendered


class RecordingTokenizer(ByteTokenizer):
    """Keeps what a template would be rendered with."""

    rendered: tuple[Any, ...] = ()

    def render_chat(self, *values: Any, **named: Any) -> str:
        self.rendered = (*values, named)
        return "a"


def test_the_template_gets_all_that_a_conversation_says(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.prompts.optional_tokenizer = tokenizer = RecordingTokenizer()
    messages = [{"role": "assistant", "content": "hi"}]
    full = Chat(
        messages_json=json.dumps(messages),
        tools_json='[{"name": "t"}]',
        continue_final_message=True,
        template_kwargs_json='{"k": [1]}',
    )
    expected = {
        "tools": [{"name": "t"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "template_kwargs": {"k": [1]},
    }
    worker.stub.Tokenize(TokenizeRequest(prompt=Prompt(chat=full)))
    assert tokenizer.rendered == (messages, expected)
    bare = Chat(messages_json=json.dumps(messages), add_generation_prompt=True)
    worker.stub.Tokenize(TokenizeRequest(prompt=Prompt(chat=bare)))
    absent: dict[str, Any] = {"tools": None, "continue_final_message": False, "template_kwargs": {}}
    assert tokenizer.rendered == (messages, {**absent, "add_generation_prompt": True})


def test_ids_go_in_and_out(worker: ServedWorker) -> None:
    answer = worker.stub.Tokenize(TokenizeRequest(prompt=Prompt(text="aé")))
    assert (list(answer.ids), answer.max_length) == ([97, 0xC3, 0xA9], 256)
    assert worker.stub.Detokenize(DetokenizeRequest(ids=[97, 0xC3, 0xA9, EOS])).text == "aé"
    ids = Prompt(token_ids=TokenIds(ids=[1, 2, EOS]))
    request = GenerateRequest(prompts=[ids], sampling=SamplingParams(max_new_tokens=3, top_k=1))
    assert list(deltas_of(worker, request)[0].token_ids) == continuation([1, 2, EOS], 3)


def test_the_model_is_described(worker: ServedWorker) -> None:
    (model,) = worker.stub.ListModels(ListModelsRequest()).models
    assert (model.id, model.engine, model.dtype) == (MODEL, "v2", "float32")
    assert (model.max_length, model.vocab_size, model.has_chat_template) == (256, VOCAB, True)
    for name in ("", "default", MODEL):
        assert deltas_of(worker, asked("a", model=name, max_new_tokens=1))


def chat(text: str) -> GenerateRequest:
    return GenerateRequest(prompts=[Prompt(chat=Chat(messages_json=text))])


def ids(*tokens: int) -> GenerateRequest:
    return GenerateRequest(prompts=[Prompt(token_ids=TokenIds(ids=tokens))])


_INVALID, _NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND

REFUSED: list[tuple[GenerateRequest, grpc.StatusCode, str]] = [
    (asked(), _INVALID, "prompts"),
    (GenerateRequest(prompts=[Prompt()]), _INVALID, "prompts[0]"),
    (asked(""), _INVALID, "prompt"),
    (asked("x" * 256), _INVALID, "prompt"),
    (asked("x" * 200, defaults=inference_pb2.DEFAULTS_MODEL, max_new_tokens=57), _INVALID, "max"),
    (asked("a", defaults=7), _INVALID, "defaults"),
    (asked("a", model="other"), _NOT_FOUND, "model"),
    (asked("a", temperature=math.nan), _INVALID, "temperature"),
    (asked("a", temperature=-math.inf), _INVALID, "temperature"),
    (asked("a", n=0), _INVALID, "n"),
    (asked("a", n=129), _INVALID, "n"),
    (asked("a", stop=[""]), _INVALID, "stop"),
    (asked("a", stop=["x"] * 10_000), _INVALID, "stop"),
    (asked("a", stop_token_ids=[VOCAB]), _INVALID, "stop_token_ids"),
    (asked("a", logit_bias={VOCAB: 1.0}), _INVALID, "logit_bias"),
    (ids(), _INVALID, "prompts[0]"),
    (ids(1, -1), _INVALID, "prompts[0]"),
    (ids(1, VOCAB), _INVALID, "prompt"),
    (chat("{"), _INVALID, "messages"),
    (chat("{}"), _INVALID, "messages"),
    (chat("[1]"), _INVALID, "messages"),
    (chat("[" * 100_000), _INVALID, "messages"),
    (chat(json.dumps([{"role": "user", "content": ""}] * 257)), _INVALID, "messages"),
    (GenerateRequest(prompts=[Prompt(text="a")], request_id="é"), _INVALID, "request_id"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("request_", "code", "field"), REFUSED)
def test_what_cannot_be_is_refused_by_name(
    worker: ServedWorker,
    request_: GenerateRequest,
    code: grpc.StatusCode,
    field: str,
    stream: bool,
) -> None:
    asked_before = worker.stats().prompt_tokens
    request_.stream = stream
    with pytest.raises(grpc.RpcError) as caught:
        deltas_of(worker, request_)
    call: Any = caught.value
    metadata = dict(call.trailing_metadata())
    assert call.code() is code and ERROR_KEY in metadata
    assert field.split("[")[0] in metadata.get(FIELD_KEY, "")
    assert field.split("[")[0] in call.details()
    assert worker.stats().prompt_tokens == asked_before  # the engine has seen nothing


@pytest.mark.parametrize(
    ("method", "request_", "words"),
    [
        ("Tokenize", TokenizeRequest(), "prompt"),
        ("Tokenize", TokenizeRequest(prompt=Prompt(text="a"), model="other"), "other"),
        ("Tokenize", TokenizeRequest(prompt=Prompt(chat=Chat(messages_json="{"))), "messages"),
        ("Detokenize", DetokenizeRequest(ids=[1, VOCAB]), f"ids = {VOCAB}"),
        ("Detokenize", DetokenizeRequest(ids=[-1]), "ids = -1"),
        ("Detokenize", DetokenizeRequest(ids=[97] * 257), "at most 256"),
        ("Detokenize", DetokenizeRequest(model="other"), "other"),
    ],
)
def test_other_calls_refuse_by_name(
    worker: ServedWorker, method: str, request_: Any, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(worker.stub, method)(request_)
    call: Any = caught.value
    assert call.code() in (_INVALID, _NOT_FOUND) and words in call.details()


def test_a_full_engine_takes_all_of_a_call_or_nothing(start_worker: StartWorker) -> None:
    worker = start_worker(gated=True, max_requests=3)
    first = worker.stub.Generate(asked("a", "b", stream=True, max_new_tokens=20))
    assert first.initial_metadata()
    second = worker.stub.Generate(asked("c", "d", max_new_tokens=2))
    while second.is_active():
        worker.model.gate.release()  # between two steps the engine hears of it
        worker.model.gate.acquire(timeout=0.01)
    assert second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    stats = worker.stats()
    assert stats.running + stats.waiting == 2
    worker.model.open.set()
    assert sum(len(delta.token_ids) for message in first for delta in message.deltas) == 40
    worker.until_idle()


class BlockedTokenizer(ByteTokenizer):
    """Has long texts wait."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_go_on = threading.Event()

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]:
        if len(text) > 100:
            self.asked.set()
            assert self.may_go_on.wait(10)
        return super().encode(text, add_special_tokens, limit=limit)


def test_other_calls_go_on_while_a_long_text_is_tokenised(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.prompts.optional_tokenizer = tokenizer = BlockedTokenizer()
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(deltas_of, worker, asked("x" * 101, max_new_tokens=1))
        assert tokenizer.asked.wait(10)
        assert len(deltas_of(worker, asked("abc", stream=True, max_new_tokens=9))) > 0
        assert not long.done()
        tokenizer.may_go_on.set()
        assert len(long.result(10)) == 1


def test_messages_may_be_large(start_worker: StartWorker) -> None:
    worker = start_worker(max_length=2_000_000)
    text = "x" * (8 * 2**20)  # beyond gRPC's own 4 MiB
    ids_ = [120] * 2_000_000
    assert worker.stub.Detokenize(DetokenizeRequest(ids=ids_)).text == "x" * len(ids_)
    with pytest.raises(grpc.RpcError, match="context"):
        deltas_of(worker, asked(text))
