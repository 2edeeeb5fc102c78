"""Clients that ask without a pause while workers are killed under them: nothing may be lost.

    python -m tests.system.chaos [--model smollm2] [--seconds 600] [--clients 32] [--replicas 3]
                                 [--router]

With --router the router dies, too: our own clients must not notice, and those that speak plain gRPC
or HTTP see their connection break off or UNAVAILABLE, and ask again.

Every question is asked once in calm, and then again and again while replicas die in every way: an
answer that differs, is missing, or does not come is a fault. Unseeded answers, which differ each
time, must be whole. Exits with 1 if there was any fault.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import resource
import signal
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import mii
from mii import MIIClient
from mii.channel import channel_options
from mii.engine.params import check_params
from mii.messages import sampling_message
from mii.proto.inference_pb2 import GenerateRequest, Prompt
from mii.proto.inference_pb2_grpc import InferenceStub
from mii.registry import ProcessRecord, Registry

HUNG_SECONDS = 120.0  # within which every answer must come, replicas dying or not

AS_JSON = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "list", "schema": {"type": "array", "items": {"type": "integer"}}},
    }
}

Answer = list[tuple[str, tuple[int, ...], str]]  # text, token ids, why it ended; one for each


@dataclass(frozen=True)
class Question:
    """One request; `ask` sends it, and the answer is the same each time unless it is unseeded."""

    name: str
    ask: Callable[[], Answer]
    repeatable: bool = True
    plain: bool = False  # of a client that does not ask again by itself


class BrokenOff(Exception):
    """A stream has ended before its end."""


def _over_grpc(client: MIIClient, prompts: list[str], **params: Any) -> Answer:
    responses = client(prompts, timeout=HUNG_SECONDS, **params)
    assert responses is not None
    return [(str(r), tuple(r.token_ids), str(r.finish_reason)) for r in responses]


def _streamed(client: MIIClient, prompt: str, **params: Any) -> Answer:
    pieces = list(client.stream(prompt, timeout=HUNG_SECONDS, **params))
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    return [("".join(map(str, pieces)), ids, str(pieces[-1].finish_reason))]


def _plainly_over_grpc(stub: InferenceStub, prompt: str, **params: Any) -> Answer:
    """Ask as a client in any language does, which does not ask again by itself."""
    sampling = sampling_message(check_params(params))
    request = GenerateRequest(prompts=[Prompt(text=prompt)], sampling=sampling, stream=True)
    try:
        deltas = [
            delta
            for message in stub.Generate(request, timeout=HUNG_SECONDS)
            for delta in message.deltas
        ]
    except grpc.RpcError as error:
        call: Any = error
        if call.code() is grpc.StatusCode.UNAVAILABLE:
            raise BrokenOff(call.details()) from None
        raise
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    return [("".join(delta.text for delta in deltas), ids, deltas[-1].finish_reason)]


def _over_http(url: str, body: dict[str, Any]) -> Answer:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as response:
        if not body.get("stream"):
            choices = json.load(response)["choices"]
            return [(choice["text"], (), choice["finish_reason"]) for choice in choices]
        events = [
            line[6:] for line in response.read().decode().splitlines() if line[:6] == "data: "
        ]
    if events[-1:] != ["[DONE]"]:
        raise BrokenOff(str(events[-1:]))
    events.pop()
    chunks = [json.loads(event)["choices"][0] for event in events]
    text = "".join(chunk["text"] for chunk in chunks)
    return [(text, (), str(chunks[-1]["finish_reason"]))]


def questions_for(client: MIIClient, url: str, count: int, longest: int) -> list[Question]:
    """Return questions of every kind."""
    rng = random.Random(0)
    stub = InferenceStub(grpc.insecure_channel(client.address, channel_options()))
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "in", "Seattle"]

    def prompt() -> str:
        return " ".join(rng.choices(words, k=rng.randint(2, 40)))

    questions = []
    for number in range(count):
        new = {"max_new_tokens": rng.randint(longest // 4, longest), "ignore_eos": True}
        seeded = {**new, "temperature": 0.8, "seed": rng.randrange(2**40)}
        http = {
            "prompt": prompt(), "max_tokens": new["max_new_tokens"], "ignore_eos": True,
            "temperature": 0.7, "seed": number,
        }  # fmt: skip
        one, several = prompt(), [prompt() for _ in range(3)]
        kinds: list[tuple[str, Callable[[], Answer]]] = [
            ("greedy", lambda p=several, k=new: _over_grpc(client, p, temperature=0, **k)),
            ("seeded stream", lambda p=one, k=seeded: _streamed(client, p, **k)),
            ("greedy stream", lambda p=one, k=new: _streamed(client, p, temperature=0, **k)),
            ("n = 2", lambda p=one, k=seeded: _over_grpc(client, [p], n=2, **k)),
            ("stop", lambda p=one, k=seeded: _streamed(client, p, stop=["qzj", " a "], **k)),
            ("logprobs", lambda p=one, k=seeded: _over_grpc(client, [p], logprobs=2, **k)),
            ("plain gRPC", lambda p=one, k=seeded: _plainly_over_grpc(stub, p, **k)),
            ("HTTP", lambda b=http: _over_http(url, b)),
            ("HTTP stream", lambda b=http: _over_http(url, {**b, "stream": True})),
            ("HTTP schema", lambda b=http: _over_http(url, {**b, "stream": True, **AS_JSON})),
        ]
        name, ask = kinds[number % len(kinds)]
        questions.append(Question(name, ask, plain=name.startswith(("HTTP", "plain"))))
        if number % len(kinds) == 0:
            unseeded = {**new, "temperature": 0.8}
            ask = lambda p=one, k=unseeded: _streamed(client, p, **k)  # noqa: E731
            questions.append(Question("unseeded", ask, repeatable=False))
    return questions


def _poison_memory(pid: int) -> None:
    """Have the process's next allocations fail."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


WAYS_TO_DIE: dict[str, Callable[[int], None]] = {
    "SIGKILL": lambda pid: os.kill(pid, signal.SIGKILL),
    "SIGSTOP": lambda pid: os.kill(pid, signal.SIGSTOP),
    "SIGABRT": lambda pid: os.kill(pid, signal.SIGABRT),
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
    "no memory": _poison_memory,
}


@dataclass
class Report:
    """What happened."""

    answered: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds until a replica served again
    router_recoveries: list[float] = field(default_factory=list)
    longest_answer: float = 0.0
    broken_off: int = 0  # plain clients' connections, by the router's death

    def lines(self) -> list[str]:
        """Return it for people."""
        lines = [
            f"{self.answered.total()} answers, {len(self.faults)} faults: {dict(self.answered)}",
            f"{self.kills.total()} kills: {dict(self.kills)}",
            f"longest answer {self.longest_answer:.2f} s",
            f"{self.broken_off} requests of plain clients were broken off and asked again",
        ]
        for what, seconds in (("replica", self.recoveries), ("router", self.router_recoveries)):
            if len(seconds) > 1:
                lines.append(
                    f"a killed {what} served again after {statistics.median(seconds):.2f} s "
                    f"(median), {statistics.quantiles(seconds, n=10)[-1]:.2f} (p90), "
                    f"{max(seconds):.2f} (longest)"
                )
        return lines + self.faults[:20]


class RouterKiller:
    """Kills the router again and again, a while after it has come to serve."""

    def __init__(self, report: Report, pauses: tuple[float, float]) -> None:
        self._report = report
        self._pauses = pauses
        self._rng = random.Random(2)
        self._pid = 0
        self._dies_at = 0.0
        self._killed_at: float | None = None

    def look(self, router: ProcessRecord, may_kill: bool) -> None:
        """Do what the time has come for."""
        now = time.monotonic()
        if router.state != "ready":
            return
        if router.pid != self._pid:  # it serves, for the first time or again
            if self._killed_at is not None:
                self._report.router_recoveries.append(now - self._killed_at)
            self._pid, self._killed_at = router.pid, None
            self._dies_at = now + self._rng.uniform(*self._pauses)
        elif self._killed_at is None and may_kill and now >= self._dies_at:
            way = self._rng.choice(["SIGKILL", "SIGSTOP", "SIGTERM", "SIGABRT"])
            WAYS_TO_DIE[way](router.pid)
            self._report.kills[f"router {way}"] += 1
            self._killed_at = now


class Chaos:
    """Clients and a killer at work on one deployment."""

    def __init__(
        self,
        name: str,
        registry: Registry,
        questions: Sequence[Question],
        pauses: tuple[float, float],
        *,
        kill_router: bool = False,
    ) -> None:
        """Set out.

        Args:
            name: of the deployment.
            registry: that knows it.
            questions: of which the clients choose.
            pauses: shortest and longest time between two deaths.
            kill_router: some time after it has come to serve.
        """
        self._pauses = pauses
        self.report = Report()
        self._router_killer = RouterKiller(self.report, pauses) if kill_router else None
        self._name = name
        self._registry = registry
        self._questions = questions
        self._calm: dict[int, Answer] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()

    def run(self, seconds: float, clients: int) -> Report:
        """Ask everything in calm, and then amid deaths for some seconds.

        Args:
            seconds: how long.
            clients: that ask at the same time.
        """
        with ThreadPoolExecutor(clients) as pool:
            self._calm = dict(enumerate(pool.map(lambda q: q.ask(), self._questions)))
            asking = [pool.submit(self._ask, seed) for seed in range(clients)]
            try:
                self._kill(time.monotonic() + seconds)
            finally:
                self._over.set()
            for each in asking:
                each.result()
        return self.report

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            number = rng.randrange(len(self._questions))
            question, began = self._questions[number], time.monotonic()
            try:
                answer = question.ask()
            except (OSError, http.client.HTTPException, BrokenOff) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code != 503
                if not (question.plain and self._router_killer) or refused:
                    self._note(question, began, f"{type(error).__name__}: {error}")
                with self._lock:
                    self.report.broken_off += 1
                time.sleep(0.2)  # as clients do before they ask again
                continue
            except Exception as error:
                self._note(question, began, f"{type(error).__name__}: {error}")
                continue
            expected = self._calm[number]
            if question.repeatable and answer != expected:
                self._note(question, began, f"{answer} is not {expected}")
            elif any(reason not in ("length", "stop") for _, _, reason in answer):
                self._note(question, began, f"not whole: {answer}")
            else:
                self._note(question, began)

    def _note(self, question: Question, began: float, fault: str = "") -> None:
        took = time.monotonic() - began
        with self._lock:
            if fault:
                self.report.faults.append(f"{question.name}, after {took:.2f} s: {fault[:600]}")
            else:
                self.report.answered[question.name] += 1
                self.report.longest_answer = max(self.report.longest_answer, took)

    def _kill(self, until: float) -> None:
        rng = random.Random(1)
        down: dict[int, tuple[int, str, float]] = {}  # replica: pid of the victim, way, when
        next_death = time.monotonic() + rng.uniform(*self._pauses)
        while time.monotonic() < until or down:
            time.sleep(0.05)
            workers = self._workers()
            for replica, (pid, way, since) in list(down.items()):
                if workers[replica].state == "ready" and workers[replica].pid != pid:
                    self.report.recoveries.append(time.monotonic() - since)
                    del down[replica]
                elif (
                    time.monotonic() - since > 10
                    and way == "no memory"
                    and (workers[replica].state == "ready")
                ):
                    del down[replica]  # it has not asked for any
                elif time.monotonic() - since > HUNG_SECONDS:
                    self.report.faults.append(f"replica {replica} did not come back")
                    del down[replica]
            if self._router_killer is not None:
                self._router_killer.look(self._router(), time.monotonic() < until)
            up = [w for w in workers.values() if w.state == "ready" and w.replica not in down]
            if time.monotonic() >= next_death and up and time.monotonic() < until:
                victim, way = rng.choice(up), rng.choice(list(WAYS_TO_DIE))
                WAYS_TO_DIE[way](victim.pid)
                self.report.kills[way] += 1
                down[victim.replica] = victim.pid, way, time.monotonic()
                next_death = time.monotonic() + rng.uniform(*self._pauses)

    def _workers(self) -> dict[int, ProcessRecord]:
        record = self._registry.get(self._name)
        return {p.replica: p for p in record.processes if p.role == "worker" and p.rank == 0}

    def _router(self) -> ProcessRecord:
        record = self._registry.get(self._name)
        return next(process for process in record.processes if process.role == "router")


def run_chaos(
    model: str | Path,
    cache: Path,
    *,
    seconds: float,
    clients: int,
    replicas: int,
    pauses: tuple[float, float],
    longest: int,
    kill_router: bool = False,
    **options: Any,
) -> Report:
    """Serve a model, have it die again and again, and return what became of its answers."""
    client = mii.serve(
        str(model), replica_num=replicas, port=0, enable_rest=True, rest_port=0,
        max_restarts=1000, **options,
    )  # fmt: skip
    try:
        registry = Registry(cache)
        (record,) = [r for r in registry.all() if r.address == client.address]
        questions = questions_for(client, f"http://{record.rest_address}", 4 * clients, longest)
        chaos = Chaos(record.name, registry, questions, pauses, kill_router=kill_router)
        return chaos.run(seconds, clients)
    finally:
        client.terminate_server()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--longest", type=int, default=64, help="new tokens of an answer at most")
    parser.add_argument("--router", action="store_true", help="kill the router, too")
    options = parser.parse_args()
    from mii.models.checkpoint import default_cache

    report = run_chaos(
        options.model, default_cache(), seconds=options.seconds, clients=options.clients,
        replicas=options.replicas, kill_router=options.router, pauses=(5.0, 15.0),
        longest=options.longest, threads=1, max_length=1024,
    )  # fmt: skip
    print("\n".join(report.lines()))
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
