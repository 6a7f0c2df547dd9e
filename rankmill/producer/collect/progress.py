"""Counts the finished rows of a run, and collects the errors of rows without a score. A producer writes the
count and the errors to Redis.
"""

from __future__ import annotations

from collections import deque

from rankmill.jobs.contract.run import MAX_ERROR_CHARS, MAX_ROW_ERRORS, Progress, RowError
from rankmill.producer.collect.scored import ScoredTable

_SPEED_SECONDS = 60
"""A run's progress is remembered for this many seconds. The speed is computed from the later half of this
time, so that the slow beginning of a run soon stops counting.
"""

_STEP_SECONDS = 0.5
"""The recorded points of a run's progress are about this many seconds apart. A point that comes sooner
replaces the last one.
"""


class RowCounter:
    """Counts rows as they are scored.

    Parameters
    ----------
    known_rows
        Rows that earlier runs have finished, with or without a score.
    row_errors
        Number of row errors before the first call of `add`.
    most_errors
        At most this many row errors are recorded, and those in `row_errors` count as recorded. Further errors
        are only counted.
    """

    def __init__(self, known_rows: int, row_errors: int = 0, most_errors: int = MAX_ROW_ERRORS) -> None:
        self.errors: list[RowError] = []
        """Row errors that are not written to Redis yet; the caller empties the list."""
        self._most_errors = most_errors
        self._rows = self._seen_rows = known_rows
        self._row_errors = row_errors
        self._points: deque[tuple[float, int]] = deque()
        """Points of time in the last minute, each with the number of rows that were done by then. Known rows
        count as done.
        """

    @property
    def progress(self) -> Progress:
        at = self._points[-1][0] if self._points else 0.0
        half = (self._points[0][0] + at) / 2 if self._points else 0.0
        since, since_rows = max((point for point in self._points if point[0] <= half), default=(0.0, 0))
        return Progress(
            rows=self._rows, row_errors=self._row_errors, since=since, since_rows=since_rows, at=at
        )

    def add(self, start: int, part: ScoredTable, *, fresh: bool = True) -> None:
        """Count the rows of a chunk that begins at row `start` of the input, and record the errors of its
        rows.

        With ``fresh=False``, the rows are already counted in `known_rows`, and only their errors are added.
        """
        if fresh:
            self._rows += len(part.table)
        errors, attempts, worker = part.errors, part.attempts, part.worker
        failed = len(errors) - errors.null_count
        room = self._most_errors - self._row_errors
        self._row_errors += failed
        if failed and room > 0:
            reasons = [(row, reason) for row, reason in enumerate(errors.to_pylist(), start) if reason]
            self.errors += [
                RowError(row=row, error=reason[:MAX_ERROR_CHARS], attempts=attempts, worker=worker)
                for row, reason in reasons[:room]
            ]

    def see(self, now: float) -> bool:
        """Remember the run's progress at `now` (s since 1970). Returns whether the number of rows has changed
        since the last call.
        """
        if self._rows == self._seen_rows:
            return False
        self._seen_rows = self._rows
        if len(self._points) > 1 and now - self._points[-2][0] < _STEP_SECONDS:
            self._points.pop()
        self._points.append((now, self._rows))
        while len(self._points) > 2 and now - self._points[1][0] > _SPEED_SECONDS:
            self._points.popleft()
        return True
