"""What the processes of a deployment write to their logs, and in which form.

`set_up` is called once in each of them. A line is readable text or one JSON object; either way it
names the process, and the request that it concerns while `request_id` says which. Text that came
from outside cannot make a line of its own: what follows a line break is indented, and characters
that do not print are written as escapes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
import time
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from mii.config import DeploymentConfig

# The request that the running task or thread is serving; "": none.
request_id: ContextVar[str] = ContextVar("request_id", default="")
# The trace that it belongs to, where there are traces; "": none.
trace_id: ContextVar[str] = ContextVar("trace_id", default="")

# One line for each request that has ended, with its figures as fields.
access: Final = logging.getLogger("mii.access")

_MAX_FILE_BYTES: Final = 2**26  # then it becomes *.previous.log, and a new one is begun
_PLAIN: Final = re.compile(r"[!#-<>-~]+").fullmatch  # printable ASCII but spaces, " and =
_STDOUT, _STDERR = 1, 2


def set_up(process: str, config: DeploymentConfig) -> None:
    """Have everything that this process logs come out on standard error.

    Args:
        process: what the process is called in the deployment, such as "worker 0.1".
        config: has `log_format`, `log_level` and `access_log`.
    """
    # Of no use in these lines, and a third of their cost.
    logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = LineHandler()
    handler.addFilter(_RequestFilter())
    form = JsonFormatter if config.log_format == "json" else TextFormatter
    handler.setFormatter(form(process))
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    logging.basicConfig(handlers=[handler], force=True)
    # Libraries' words for their own developers would hide ours.
    logging.getLogger().setLevel(max(level, logging.INFO))
    logging.getLogger("mii").setLevel(level)
    access.disabled = not config.access_log
    logging.captureWarnings(True)


def tell_access(message: str, fields: dict[str, Any], request: str) -> None:
    """Write the line of a request that has ended.

    Args:
        message: what it was.
        fields: its figures, by name; None: not known, and left out.
        request: its id; "": it had none yet.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    access.info(message, extra={"fields": known, "request_id": request})


class _RequestFilter(logging.Filter):
    """Notes in each record which request it concerns."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        record.trace_id = trace_id.get()
        return True


class TextFormatter(logging.Formatter):
    """`2026-12-01T15:12:08.123Z INFO worker 0.0 mii.workers [request id] message name=value`"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request_id", "")
        fields = getattr(record, "fields", {})
        where = f"{record.levelname} {self._process} {record.name}"
        text = f"{_timestamp(record.created)} {where} {record.getMessage()}"
        if request:
            text = f"{_timestamp(record.created)} {where} [{request}] {record.getMessage()}"
        if fields:
            told = [f"{name}={_value(value)}" for name, value in fields.items()]
            text = f"{text} {' '.join(told)}"
        details = _details(self, record)
        return printable(f"{text}\n{details}" if details else text)


class JsonFormatter(logging.Formatter):
    """One JSON object, ASCII throughout: no reader takes a part of it for a line's end."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id"):
            if value := getattr(record, name, ""):
                line[name] = value
        line |= getattr(record, "fields", {})
        if details := _details(self, record):
            line["error"] = details
        return json.dumps(line, default=str)


class LineHandler(logging.Handler):
    """Writes to standard error, each record with one system call.

    Lines of several threads or processes do not mix there. A regular file is renamed to
    `*.previous.log` when it has become large and a new one is begun. What cannot be written, as
    when the disk is full, is lost, and nothing else happens.
    """

    def __init__(self, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        super().__init__()
        self._max_bytes = max_file_bytes
        self._path = _path_of(_STDERR)
        self._written = 0 if self._path is None else os.fstat(_STDERR).st_size

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
            self._written += len(line)
            if self._path is not None and self._written > self._max_bytes:
                self._begin_anew(self._path)
            os.write(_STDERR, line)
        except OSError:
            return
        except Exception:
            self.handleError(record)

    def _begin_anew(self, path: Path) -> None:
        self._written = 0
        os.replace(path, path.with_suffix(".previous.log"))
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        shared = os.path.sameopenfile(_STDOUT, _STDERR)
        os.dup2(new, _STDERR)
        if shared:
            os.dup2(new, _STDOUT)
        os.close(new)


def printable(text: str) -> str:
    """Return text that is one line, or a line and others that nobody takes for a beginning."""
    if text.isprintable():
        return text
    return "\n  | ".join(_escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        each if each.isprintable() or each == "\t" else each.encode("unicode_escape").decode()
        for each in line
    )


def _value(value: object) -> str:
    """Return a field's value as one word."""
    if type(value) is int or type(value) is float:
        return str(value)
    text = str(value)
    return text if _PLAIN(text) else json.dumps(text)


def _details(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return a record's traceback and stack, if it has them."""
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _timestamp(seconds: float) -> str:
    whole = int(seconds)
    return f"{_to_the_second(whole)}.{int((seconds - whole) * 1000):03d}Z"


@lru_cache(4)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _path_of(descriptor: int) -> Path | None:
    """Return the path of the regular file that is open there; None: it is something else."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if sys.platform == "darwin":
            import fcntl

            name = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).split(b"\0")[0].decode()
        else:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        path = Path(name)
        return path if path.suffix == ".log" and os.path.samestat(path.stat(), status) else None
    except OSError:
        return None
