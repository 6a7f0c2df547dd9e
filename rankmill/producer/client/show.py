"""Shows a bar with the progress of runs while their caller waits. This is done in Jupyter, or if the caller
asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

from rankmill.jobs.contract.run import Progress
from rankmill.jobs.system import system

_FIRST_SECONDS = 0.5
"""Seconds until a run's progress bar is first drawn. If the run ends earlier, the bar is drawn once at its
end, and only if the caller asks for a bar.
"""

_EVERY_SECONDS = 0.2

Draw = Callable[[Progress], None]


def in_notebook() -> bool:
    """Whether this code runs in a cell of Jupyter. IPython is not imported for this check, because Jupyter
    has already loaded IPython.
    """
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@contextmanager
def shown(
    progress: Callable[[], Progress], total: int | None, show: bool | None
) -> Iterator[Callable[[], None]]:
    """Show a bar with the progress of `total` rows. Yields a function that updates the bar. Call this
    function from time to time.

    If `show` is ``None``, a bar is shown only in Jupyter.
    """
    is_notebook = in_notebook()
    if show is False or not (show or is_notebook):
        yield lambda: None
        return
    with _in_notebook(total) if is_notebook else _in_terminal(total) as draw:
        begun, drawn = system.monotonic(), 0.0

        def look() -> None:
            nonlocal drawn
            now = system.monotonic()
            if now - begun >= _FIRST_SECONDS and now - drawn >= _EVERY_SECONDS:
                draw(progress())
                drawn = now

        yield look
        if show or drawn:
            draw(progress())


def as_text(progress: Progress, total: int | None) -> str:
    """Format a run's progress as a line of text, with rows, speed and remaining time."""
    done = f"{progress.rows:,} pairs" if total is None else f"{progress.rows:,} of {total:,} pairs"
    parts = [done, f"{progress.row_errors:,} without a score"] if progress.row_errors else [done]
    now = system.now()
    speed, remaining = progress.rows_per_second(now), progress.seconds_left(total, now)
    if speed is not None:
        parts.append(f"{speed:,.0f} pairs/s")
    if remaining:
        parts.append(f"{timedelta(seconds=round(remaining))} left")
    return ", ".join(parts)


def as_html(progress: Progress, total: int | None) -> str:
    """Format a run's progress as HTML: a bar, and the line of `as_text`."""
    place = "" if total is None else f' value="{progress.rows}" max="{max(total, 1)}"'
    return f"<progress{place}></progress> {as_text(progress, total)}"


@contextmanager
def _in_notebook(total: int | None) -> Iterator[Draw]:
    display: Any = import_module("IPython.display").display
    handle: Any = None

    def draw(progress: Progress) -> None:
        nonlocal handle
        forms = {"text/plain": as_text(progress, total), "text/html": as_html(progress, total)}
        if handle is None:
            handle = display(forms, raw=True, display_id=True)
        else:
            handle.update(forms, raw=True)

    yield draw


@contextmanager
def _in_terminal(total: int | None) -> Iterator[Draw]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True))
    task = bar.add_task("scoring", total=total)
    with bar:
        yield lambda progress: bar.update(task, completed=progress.rows, description=as_text(progress, total))
