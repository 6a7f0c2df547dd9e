"""Progress display while a file is scored: a line on a terminal, occasional log messages elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LOG_SECONDS = 30.0

logger = logging.getLogger(__name__)


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def __enter__(self) -> ProgressView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, rows: int, pairs_per_second: float, workers: int) -> None:
        """Show the total of `rows` done, the speed, and the number of live workers."""
        ...


def progress_view(total: int, *, quiet: bool) -> ProgressView:
    """A progress line if standard error is a terminal, else a log message every 30 s."""
    if quiet or not sys.stderr.isatty():
        return _LogView(total)
    return _TerminalView(total)


class _TerminalView:
    def __init__(self, total: int) -> None:
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows, {task.fields[speed]:,.0f} pairs/s, left"),
            TimeRemainingColumn(),
            TextColumn("workers: {task.fields[workers]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("scoring", total=total, speed=0.0, workers=0)

    def __enter__(self) -> _TerminalView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, rows: int, pairs_per_second: float, workers: int) -> None:
        self._progress.update(self._task, completed=rows, speed=pairs_per_second, workers=workers)


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

    def update(self, rows: int, pairs_per_second: float, workers: int) -> None:
        if time.monotonic() - self._logged < _LOG_SECONDS:
            return
        self._logged = time.monotonic()
        left = (self._total - rows) / pairs_per_second if pairs_per_second else float("nan")
        logger.info(
            f"{rows:,} of {self._total:,} rows ({rows / max(self._total, 1):.0%}), "
            f"{pairs_per_second:,.0f} pairs/s, about {left:,.0f} s left, workers: {workers}"
        )
