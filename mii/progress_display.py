"""Shows on a terminal, or in a notebook, what a start is busy with."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressDisplay:
    """A progress callback: on a terminal one line for each replica, removed at the end; in a
    notebook a plain line for each thing that begins; elsewhere nothing.

    rich is imported with the first line that is drawn.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown = ""

    def __call__(self, what: str, fraction: float | None) -> None:
        """Show what is going on; a prefix "replica 1: " chooses the line."""
        if self._stream.isatty():
            self._draw(what, fraction)
        elif "ipykernel" in sys.modules and what != self._shown:
            self._shown = what
            print(what, file=self._stream)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _draw(self, what: str, fraction: float | None) -> None:
        if self._progress is None:
            self._progress = self._start()
        prefix, separator, _ = what.partition(": ")
        line = prefix if separator and prefix.startswith("replica ") else ""
        if line not in self._tasks:
            self._tasks[line] = self._progress.add_task("")
        self._progress.update(
            self._tasks[line],
            description=what,
            total=None if fraction is None else 1.0,
            completed=fraction or 0.0,
        )

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        progress.start()
        return progress
