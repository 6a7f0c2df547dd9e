"""Shows the progress while a file is scored, as a line on a terminal, and elsewhere in log messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from rankmill.jobs.contract.run import Progress
from rankmill.jobs.system import system
from rankmill.producer.client.show import as_text

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


def _text(progress: Progress, total: int, workers: int, doing: str) -> str:
    return ", ".join(filter(None, (as_text(progress, total), doing, f"workers: {workers}")))


@contextmanager
def _in_terminal(total: int) -> Iterator[Show]:
    text = TextColumn("{task.description}", markup=False, table_column=Column())  # a long name is wrapped
    bar = Bar(BarColumn(12), text, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total)

    def show(progress: Progress, workers: int, doing: str) -> None:
        bar.update(task, completed=progress.rows, description=_text(progress, total, workers, doing))

    with suppress(OSError):  # go on even if the terminal is closed
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
        if system.monotonic() - logged >= _LOG_SECONDS:
            logged = system.monotonic()
            logger.info(_text(progress, total, workers, doing))

    yield show
