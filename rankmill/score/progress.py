"""Shows the progress while a file is scored, as a line on a terminal, and elsewhere in log messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from rankmill.jobs.contract.run import Progress
from rankmill.jobs.system import system

_LOG_SECONDS = 30.0

Show = Callable[[Progress, int, str], None]
"""A function that shows how far the scoring of a file has come. It gets the progress, the number of live
workers, and a text that says what the workers do before they score, such as loading the model. The text is
empty once there are scores.
"""

MakeView = Callable[[int], AbstractContextManager[Show]]
"""A function that gets the number of rows to score, and returns a context manager that yields a `Show`."""

logger = logging.getLogger(__name__)


def progress_view(total: int, *, quiet: bool = False) -> AbstractContextManager[Show]:
    """Show the progress of scoring `total` rows: as a line on standard error if that is a terminal and
    `quiet` is false, otherwise as log messages, at least 30 s apart.
    """
    return _in_log(total) if quiet or not sys.stderr.isatty() else _in_terminal(total)


@contextmanager
def _in_terminal(total: int) -> Iterator[Show]:
    what_column, workers_column = (
        TextColumn("{task.fields[what]}"),
        TextColumn("workers: {task.fields[workers]}"),
    )
    scores = (BarColumn(), MofNCompleteColumn(), what_column, workers_column)
    wrapped = TextColumn(
        "{task.completed}/{task.total} rows, {task.fields[what]}", markup=False, table_column=Column()
    )
    bar = Bar(*scores, console=Console(stderr=True), transient=True)
    task = bar.add_task("scoring", total=total, what="rows", workers=0)

    def show(progress: Progress, workers: int, doing: str) -> None:
        bar.columns = (wrapped, workers_column) if doing else scores  # no bar, so that a long name has room
        text = doing or f"rows, {_speed(progress)}, left {_left(progress, total)}"
        bar.update(task, completed=progress.rows, what=text, workers=workers)

    with suppress(OSError):  # the terminal may be closed, and the run goes on
        bar.start()
    try:
        yield show
    finally:
        with suppress(OSError):
            bar.stop()


@contextmanager
def _in_log(total: int) -> Iterator[Show]:
    logged = system.monotonic()

    def show(progress: Progress, workers: int, doing: str) -> None:
        nonlocal logged
        if system.monotonic() - logged < _LOG_SECONDS:
            return
        logged = system.monotonic()
        share = progress.rows / max(total, 1)
        text = doing or f"{_speed(progress)}, time left: {_left(progress, total)}"
        logger.info(f"{progress.rows:,} of {total:,} rows ({share:.0%}), {text}, workers: {workers}")

    yield show


def _speed(progress: Progress) -> str:
    speed = progress.rows_per_second(system.now())
    return "? pairs/s" if speed is None else f"{speed:,.0f} pairs/s"


def _left(progress: Progress, total: int) -> str:
    seconds = progress.seconds_left(total, system.now())
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))
