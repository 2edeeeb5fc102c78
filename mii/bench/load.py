"""Drives requests: as many at a time as there are clients, or as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from mii.bench.targets import Measured, Target
from mii.bench.workload import Question


async def closed_loop(
    target: Target,
    questions: Sequence[Question],
    clients: int,
    on_end: Callable[[Measured], None] = lambda measured: None,
) -> list[Measured]:
    """Have so many clients ask, each its next question when its last one is answered."""
    waiting = iter(questions)
    results: list[Measured] = []

    async def client() -> None:
        for question in waiting:
            results.append(await _ask(target, question))
            on_end(results[-1])

    await asyncio.gather(*(client() for _ in range(min(clients, len(questions)))))
    return results


async def open_loop(
    target: Target,
    questions: Sequence[Question],
    pauses: Iterable[float],
    on_end: Callable[[Measured], None] = lambda measured: None,
) -> list[Measured]:
    """Ask each question when its time has come, however many are then under way."""
    loop = asyncio.get_running_loop()
    tasks = []
    due = loop.time()
    for question, pause in zip(questions, pauses, strict=False):
        await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.create_task(_ask(target, question)))
        tasks[-1].add_done_callback(lambda task: on_end(task.result()))
        due += pause
    return list(await asyncio.gather(*tasks))


async def _ask(target: Target, question: Question) -> Measured:
    measured = Measured(time.perf_counter())
    try:
        await target.ask(question, measured)
        if not measured.arrivals:
            measured.error = "the answer was empty"
    except Exception as error:  # whatever a server or the way to it does
        measured.error = f"{type(error).__name__}: {error}"
    measured.ended = time.perf_counter()
    return measured
