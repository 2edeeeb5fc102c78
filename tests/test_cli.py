"""The command line, without a model: parsing, help, and errors of one line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mii.cli import main, make_parser, options_of, parameters_of
from mii.config import DeploymentConfig, EngineConfig
from mii.registry import DeploymentRecord, ProcessIdentity, ProcessRecord, Registry, mark


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MII_CACHE_PATH", str(tmp_path))
    for name in ("WORLD_SIZE", "RANK", "MII_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_options_of_the_command_line_are_those_of_serve() -> None:
    line = (
        "serve m --replica-num 2 --enable-rest --no-prefix-caching --kv-cache-bytes 2GiB "
        "--gpu-memory-fraction 0.5 --port-number 7 --restful-api-host ::1"
    )
    parsed = make_parser().parse_args(line.split())
    assert options_of(parsed) == {
        "replica_num": 2,
        "enable_rest": True,
        "prefix_caching": False,
        "kv_cache_bytes": "2GiB",
        "gpu_memory_fraction": 0.5,
        "port": 7,
        "rest_host": "::1",
    }
    assert options_of(make_parser().parse_args(["serve", "m"])) == {}


def test_parameters_of_the_command_line_are_those_of_generate() -> None:
    line = "generate m p --max-new-tokens 5 --temperature 0.5 --stop a --stop b"
    parsed = make_parser().parse_args(line.split())
    expected = {"max_new_tokens": 5, "temperature": 0.5, "stop": ["a", "b"]}
    assert parameters_of(parsed) == expected


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("serve", 2, "MODEL"),
        ("serve m --replica-nums 2", 2, "--replica-nums"),
        ("fly", 2, "fly"),
        ("serve /gone --replica-num 0", 2, "replica_num = 0 is not allowed"),
        ("serve /gone --replica-num two", 2, "replica_num = 'two' is not allowed"),
        ("serve /gone", 1, "/gone"),
        ("plan /gone", 1, "/gone"),
        ("generate /gone hello", 1, "/gone"),
        ("generate /gone hello --temperature hot", 2, "temperature = 'hot'"),
        ("logs gone", 1, "gone"),
        ("stop gone", 1, "gone"),
        ("stop", 2, "--all"),
        ("stop a --all", 2, "--all"),
    ],
)
def test_an_error_is_one_line_that_says_what_is_wrong(
    line: str, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        returned = main(line.split())
    except SystemExit as ended:
        returned = int(str(ended.code))
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert words in errors
    assert returned == status


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "ps", "logs", "stop", "plan"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert command in capsys.readouterr().out


def test_debug_shows_where_an_error_arises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError):
        main(["--debug", "stop", "gone"])
    monkeypatch.setenv("MII_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["stop", "gone"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("mii 0.")


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == main(["stop", "--all"]) == 0
    assert capsys.readouterr().out == "no deployment is running\n" * 2


def enter(cache: Path) -> DeploymentRecord:
    """Enter a deployment into the registry, as if this process were its supervisor."""
    engine = EngineConfig(model_path="/models/m", tokenizer_path="/models/m", model_name="m")
    config = DeploymentConfig(deployment_name="m-mii-deployment", engine=engine, replica_num=2)
    record = DeploymentRecord(config, ProcessIdentity.of(os.getpid()), "ready", 50051, 28081)
    record = mark(record, ProcessRecord("router", 0, 0, 11, "ready", 50051))
    record = mark(record, ProcessRecord("worker", 0, 0, 12, "ready", 50052))
    record = mark(record, ProcessRecord("worker", 1, 0, 13, "dead", last_words="out of memory"))
    Registry(cache).claim(record)
    return record


def test_ps_shows_what_runs_and_what_is_dead(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(cache)
    main(["ps", "--all"])
    lines = capsys.readouterr().out.splitlines()
    cells = lines[1].split()
    assert cells[:4] == ["m-mii-deployment", "ready", "localhost:50051", "localhost:28081"]
    assert cells[4:6] == ["1/2", "ready"] and cells[-1] == str(os.getpid())
    assert ["worker-0-0", "ready", "50052", "12"] in [line.split() for line in lines]
    assert lines[-1] == "m-mii-deployment, replica 1 is dead: out of memory"


def test_a_target_that_is_not_unique_is_asked_for(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = enter(cache)
    other = replace(record, config=replace(record.config, deployment_name="other"))
    Registry(cache).claim(other)
    assert main(["chat"]) == 2
    assert "name one of" in capsys.readouterr().err


def test_logs_of_a_deployment_that_has_ended(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Registry(cache).logs("m-mii-deployment")
    folder.mkdir(parents=True)
    (folder / "router.log").write_text("one\ntwo\nthree\n")
    (folder / "worker-0-0.log").write_text("four\n")
    assert main(["logs", "m", "-n", "2"]) == 0
    assert capsys.readouterr().out == "router: two\nrouter: three\nworker-0-0: four\n"
    assert main(["logs", "m", "-f", "-p", "router"]) == 0  # ends, as the deployment has
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    assert main(["logs", "m", "-p", "supervisor"]) == 2
    assert "one of router, worker-0-0" in capsys.readouterr().err


def test_a_plan_needs_nothing_that_runs(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {"model_type": "llama", "vocab_size": 16, "max_position_embeddings": 64}
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, **dict.fromkeys(sizes, 8)}))
    assert main(["plan", str(tmp_path / "m")]) == 1
    assert "no weights" in capsys.readouterr().err
