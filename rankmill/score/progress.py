"""Progress display while a file is scored: a line on a terminal, occasional log messages elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from rankmill.jobs.contract.run import Progress

_LOG_SECONDS = 30.0

logger = logging.getLogger(__name__)


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def __enter__(self) -> ProgressView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, progress: Progress, workers: int) -> None:
        """Show the progress, and the number of live workers."""
        ...


class MakeView(Protocol):
    """Makes a view of the progress of `total` rows."""

    def __call__(self, total: int, *, quiet: bool) -> ProgressView: ...


def progress_view(total: int, *, quiet: bool) -> ProgressView:
    """A progress line if standard error is a terminal, else a log message every 30 s."""
    if quiet or not sys.stderr.isatty():
        return _LogView(total)
    return _TerminalView(total)


class _TerminalView:
    def __init__(self, total: int) -> None:
        self._total = total
        self._progress = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows, {task.fields[speed]}, left {task.fields[left]}"),
            TextColumn("workers: {task.fields[workers]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("scoring", total=total, speed="?", left="?", workers=0)

    def __enter__(self) -> _TerminalView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, progress: Progress, workers: int) -> None:
        self._progress.update(
            self._task,
            completed=progress.rows,
            speed=_speed(progress),
            left=_left(progress, self._total),
            workers=workers,
        )


class _LogView:
    def __init__(self, total: int) -> None:
        self._total = total
        self._logged = time.monotonic()

    def __enter__(self) -> _LogView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, progress: Progress, workers: int) -> None:
        if time.monotonic() - self._logged < _LOG_SECONDS:
            return
        self._logged = time.monotonic()
        share = progress.rows / max(self._total, 1)
        logger.info(
            f"{progress.rows:,} of {self._total:,} rows ({share:.0%}), {_speed(progress)}, "
            f"time left: {_left(progress, self._total)}, workers: {workers}"
        )


def _speed(progress: Progress) -> str:
    speed = progress.rows_per_second()
    return "? pairs/s" if speed is None else f"{speed:,.0f} pairs/s"


def _left(progress: Progress, total: int) -> str:
    """The time left as hours, minutes and seconds."""
    left = progress.seconds_left(total)
    return "?" if left is None else str(timedelta(seconds=round(left)))
