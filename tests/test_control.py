"""The control channel, with a real child at its other end where a process matters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from mii.config import DeploymentConfig, EngineConfig
from mii.control import (
    ControlChannel,
    Detach,
    Failed,
    Message,
    Progress,
    Ready,
    Replica,
    Replicas,
    Start,
    Stop,
    Terminate,
    decode,
    encode,
)
from mii.errors import DeploymentError, InternalError, InvalidArgument, ModelError, PortInUse

CONFIG = DeploymentConfig(
    deployment_name="a/b \u2013 \U0001f600",
    engine=EngineConfig(model_path="/m", tokenizer_path="/m", model_name="m", threads=2),
)

MESSAGES: list[Message] = [
    Start(CONFIG, "worker", replica=1, rank=2, shared_memory_fd=7, plan_fds=(8, 9)),
    Replicas((Replica(0, "127.0.0.1:50051", True), Replica(1, "127.0.0.1:50052", False))),
    Detach(),
    Stop(),
    Progress("reading weights\nof two lines", 0.5),
    Ready(50051, 28080),
    Failed("port_in_use", "port 1 is taken"),
    Terminate(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.event)
def test_a_message_survives_the_wire_as_one_line(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line) == message


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b'{"event":"no"}\n', b'{"event":"ready"}\n'])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(InternalError, match="not a control message"):
        decode(line)


@pytest.mark.parametrize(
    "error", [PortInUse("p"), ModelError("m"), InvalidArgument("i", "field"), DeploymentError("d")]
)
def test_an_error_of_ours_is_the_same_class_at_the_other_end(error: Exception) -> None:
    again = Failed.of(error).to_error()
    assert type(again) is type(error) and str(again) == str(error)


def test_an_unforeseen_error_keeps_its_name_and_words() -> None:
    again = Failed.of(ZeroDivisionError("by zero")).to_error()
    assert type(again) is DeploymentError and str(again) == "ZeroDivisionError: by zero"


def test_messages_arrive_in_order_and_then_the_end() -> None:
    ours, theirs = ControlChannel.pair()
    other = ControlChannel(theirs)
    for message in MESSAGES:
        ours.send(message)
    ours.close()
    assert list(other.messages()) == MESSAGES
    other.send(Stop())  # to a side that is gone: nothing happens
    other.close()


def test_messages_of_many_threads_do_not_mix() -> None:
    ours, theirs = ControlChannel.pair()
    other = ControlChannel(theirs)

    def send(number: int) -> None:
        for _ in range(50):
            ours.send(Progress(str(number) * 3000))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    received = [other.receive() for _ in range(200)]
    for thread in threads:
        thread.join()
    ours.close()
    other.close()
    texts = [message.what for message in received if isinstance(message, Progress)]
    assert sorted(texts) == sorted(str(number) * 3000 for number in range(4) for _ in range(50))


def test_closing_ends_a_receive_that_waits() -> None:
    ours, theirs = ControlChannel.pair()
    ended = threading.Event()
    ours.listen(lambda message: None, ended.set)
    ours.close()
    assert ended.wait(5)
    theirs.close()


CHILD = """
import sys, time
from mii.control import ControlChannel, Ready
channel = ControlChannel.from_arguments(sys.argv[1:])
start = channel.receive_start()
channel.listen(lambda message: None)
channel.send(Ready(port=start.preferred_port))
time.sleep(60)
"""


@pytest.mark.parametrize("say_start", [True, False])
def test_a_child_exits_when_its_parents_end_closes(say_start: bool) -> None:
    ours, theirs = ControlChannel.pair()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "--control-fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    if say_start:
        ours.send(Start(CONFIG, "worker", preferred_port=4711, parent_pid=os.getpid()))
        ready = ours.receive()
        assert isinstance(ready, Ready) and ready.port == 4711
    ours.close()
    assert child.wait(10) == 1
