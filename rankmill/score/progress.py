"""Progress display while a file is scored: a line on a terminal, occasional log messages elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from rankmill.jobs.contract.run import Progress
from rankmill.jobs.system import system

_LOG_SECONDS = 30.0

Show = Callable[[Progress, int], None]
"""Shows the progress, and the number of live workers."""

MakeView = Callable[[int], AbstractContextManager[Show]]
"""Makes what shows the progress of so many rows."""

logger = logging.getLogger(__name__)


def progress_view(total: int, *, quiet: bool = False) -> AbstractContextManager[Show]:
    """A progress line if standard error is a terminal, else a log message every 30 s."""
    return _in_log(total) if quiet or not sys.stderr.isatty() else _in_terminal(total)


@contextmanager
def _in_terminal(total: int) -> Iterator[Show]:
    bar = Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows, {task.fields[speed]}, left {task.fields[left]}"),
        TextColumn("workers: {task.fields[workers]}"),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("scoring", total=total, speed="?", left="?", workers=0)

    def show(progress: Progress, workers: int) -> None:
        speed, left = _speed(progress), _left(progress, total)
        bar.update(task, completed=progress.rows, speed=speed, left=left, workers=workers)

    with bar:
        yield show


@contextmanager
def _in_log(total: int) -> Iterator[Show]:
    logged = system.monotonic()

    def show(progress: Progress, workers: int) -> None:
        nonlocal logged
        if system.monotonic() - logged < _LOG_SECONDS:
            return
        logged = system.monotonic()
        share = progress.rows / max(total, 1)
        logger.info(
            f"{progress.rows:,} of {total:,} rows ({share:.0%}), {_speed(progress)}, "
            f"time left: {_left(progress, total)}, workers: {workers}"
        )

    yield show


def _speed(progress: Progress) -> str:
    speed = progress.rows_per_second()
    return "? pairs/s" if speed is None else f"{speed:,.0f} pairs/s"


def _left(progress: Progress, total: int) -> str:
    """The time left as hours, minutes and seconds."""
    left = progress.seconds_left(total)
    return "?" if left is None else str(timedelta(seconds=round(left)))
