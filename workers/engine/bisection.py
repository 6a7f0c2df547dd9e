"""Finds the rows that fail among many."""

from __future__ import annotations

from collections.abc import Callable

from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.batches.planner import Rows


def bisect(rows: Rows, run: Callable[[Rows], None], broken: Callable[[int, str], None]) -> None:
    """`run` the rows; if that raises, bisect them and call `broken` for each single row that fails."""
    if not len(rows):
        return
    try:
        run(rows)
    except DeviceLost:
        raise
    except Exception as error:
        if len(rows) == 1:
            broken(int(rows[0]), f"{type(error).__name__}: {' '.join(str(error).split())}")
            return
        middle = len(rows) // 2
        bisect(rows[:middle], run, broken)
        bisect(rows[middle:], run, broken)
