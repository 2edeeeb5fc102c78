"""Log lines: their forms, what cannot be forged in them, and the file that they go to."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mii import logs
from mii.config import DeploymentConfig, EngineConfig

_LINES = """
import logging, sys
from mii import logs
from mii.config import DeploymentConfig, EngineConfig
logs.set_up("router", DeploymentConfig("n", EngineConfig("/m", "/m", "m"), **{options}))
logger = logging.getLogger("mii.test")
{body}
"""


@pytest.fixture
def request_seven() -> Iterator[None]:
    token = logs.request_id.set("id-7")
    yield
    logs.request_id.reset(token)


def record_of(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    record = logging.getLogger("mii.test").makeRecord(
        "mii.test", logging.WARNING, "", 0, message, arguments, None, extra=extra
    )
    logs._RequestFilter().filter(record)
    return record


def written(body: str, stderr: Path, **options: object) -> str:
    """Run statements in a process that logs to a file; return what that holds then."""
    script = _LINES.format(options=options, body=body)
    with stderr.open("ab") as file:
        subprocess.run([sys.executable, "-c", script], stderr=file, check=True)
    return stderr.read_text() if stderr.is_file() else ""


def test_a_text_line_names_the_process_and_the_request(request_seven: None) -> None:
    line = logs.TextFormatter("worker 0.1").format(record_of("%d tokens", 5, fields={"a": 1.5}))
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z") and len(stamp) == len("2026-12-01T15:12:08.123Z")
    assert rest == "WARNING worker 0.1 mii.test [id-7] 5 tokens a=1.5"


def test_a_json_line_has_the_same_as_fields(request_seven: None) -> None:
    line = logs.JsonFormatter("worker 0.1").format(record_of("5 tokens", fields={"a": 1.5}))
    told = json.loads(line)
    assert told.pop("time").endswith("Z") and told.pop("pid") > 0
    assert told == {
        "level": "warning",
        "process": "worker 0.1",
        "logger": "mii.test",
        "message": "5 tokens",
        "request_id": "id-7",
        "a": 1.5,
    }


def test_a_line_outside_of_a_request_names_none() -> None:
    assert "request_id" not in json.loads(logs.JsonFormatter("router").format(record_of("a")))
    assert " [" not in logs.TextFormatter("router").format(record_of("a"))


FORGED = "2026-12-01T00:00:00.000Z ERROR router mii.router all is lost"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
@pytest.mark.parametrize("form", [logs.TextFormatter, logs.JsonFormatter])
def test_text_from_outside_makes_no_line_of_its_own(
    form: type[logging.Formatter], end: str
) -> None:
    line = form("router").format(record_of("asked for %s", f"x{end}{FORGED}"))  # type: ignore[arg-type]
    assert not any(each.startswith("2026-12-01T00:00") for each in line.splitlines())


def test_text_from_outside_cannot_steer_a_terminal_or_make_fields() -> None:
    fields = {"method": 'GET /a status=200 "', "other": "\x1b[31m"}
    line = logs.TextFormatter("router").format(record_of("\x1b[2J\u202e\udc80", fields=fields))
    assert line.endswith(r'\x1b[2J\u202e\udc80 method="GET /a status=200 \"" other="\u001b[31m"')


def test_a_traceback_is_part_of_its_record() -> None:
    try:
        raise ZeroDivisionError("a\nb")
    except ZeroDivisionError:
        record = record_of("it failed")
        record.exc_info = sys.exc_info()
    assert "ZeroDivisionError: a\nb" in json.loads(logs.JsonFormatter("r").format(record))["error"]
    first, *others = logs.TextFormatter("r").format(record).split("\n")
    assert first.endswith("it failed") and others
    assert all(line.startswith("  | ") for line in others)


def test_the_level_is_that_of_our_own_lines(tmp_path: Path) -> None:
    body = """
logger.debug("ours")
logging.getLogger("another").debug("theirs")
logs.tell_access("request", {"a": None, "b": 2}, "id-1")
"""
    text = written(body, tmp_path / "debug.log", log_level="debug")
    assert "ours" in text and "theirs" not in text
    assert text.endswith("mii.access [id-1] request b=2\n")
    assert written(body, tmp_path / "warning.log", log_level="warning") == ""
    quiet = written(body, tmp_path / "quiet.log", log_level="debug", access_log=False)
    assert "ours" in quiet and "id-1" not in quiet


def test_a_log_stays_below_its_bound_and_no_line_is_cut(tmp_path: Path) -> None:
    body = """
logging.getLogger().handlers[0]._max_bytes = 10_000
for number in range(1000):
    logger.info("line %d", number)
print("from elsewhere", file=sys.stderr)
"""
    log = tmp_path / "router.log"
    text = written(body, log, log_format="json")
    *lines, last = text.splitlines()
    assert last == "from elsewhere"
    before = (tmp_path / "router.previous.log").read_text().splitlines()
    numbers = [int(json.loads(line)["message"].split()[1]) for line in before + lines]
    assert numbers == list(range(numbers[0], 1000))
    assert max(log.stat().st_size, (tmp_path / "router.previous.log").stat().st_size) < 10_300
    assert {path.name for path in tmp_path.iterdir()} == {"router.log", "router.previous.log"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    written("logger.error('a')\nlogger.error('b')\n", Path("/dev/full"))


def test_every_format_and_level_that_is_allowed_works(tmp_path: Path) -> None:
    from mii.option_table import OPTION_NAMES

    for name, spelling in (("log_format", "JSON"), ("log_level", "Warning")):
        assert OPTION_NAMES[name].check.check(name, spelling) == spelling.lower()
    config = DeploymentConfig("n", EngineConfig("/m", "/m", "m"))
    assert (config.log_format, config.log_level, config.access_log) == ("text", "info", True)
