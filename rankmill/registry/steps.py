"""Progress of the steps of a push or pull: bars on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn


class Steps:
    """Shows each step while it lasts, on standard error if that is a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    @contextmanager
    def unmeasured(self, what: str) -> Iterator[None]:
        """Show a step of unknown length."""
        with Progress(
            SpinnerColumn(),
            TextColumn(what),
            console=Console(stderr=True),
            transient=True,
            disable=not self._shown,
        ) as progress:
            progress.add_task(what, total=None)
            yield

    @contextmanager
    def measured(self, what: str, size: int) -> Iterator[Callable[[int], None]]:
        """Show a step of `size` bytes; call what this gives with the size of each piece that is done."""
        with Progress(
            TextColumn(what),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._shown,
        ) as progress:
            task = progress.add_task(what, total=size)
            yield lambda done: progress.advance(task, done)
