"""What a producer notes of its run for others to see: rows that are done, rows without a score."""

from __future__ import annotations

import time

from jobs.results import ChunkResult, ChunkScores
from jobs.run import MAX_ERROR_CHARS, MAX_ROW_ERRORS, Progress, RowError
from producer.splitting import scores_and_errors


class Notes:
    """Counts results as they come."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.errors: list[RowError] = []
        """Rows without a score that Redis has not been told of; for the caller to empty."""

    def add(self, start: int, rows: int, result: ChunkResult, *, fresh: bool = True) -> None:
        """Count the result of `rows` rows, of which the first is row `start` of the input.

        One that is not `fresh` was there before the run, and says nothing of its speed.
        """
        attempts = result.stats.attempt if isinstance(result, ChunkScores) else result.attempts
        worker = result.stats.worker if isinstance(result, ChunkScores) else result.worker
        _, errors = scores_and_errors(result, rows)
        failed = len(errors) - errors.null_count
        before = self.progress
        now = time.time() if fresh else 0.0
        begins = fresh and not before.since
        self.progress = Progress(
            rows=before.rows + rows,
            row_errors=before.row_errors + failed,
            since=before.since or now,
            since_rows=before.since_rows + (0 if fresh and not begins else rows),
            at=now or before.at,
        )
        if failed and before.row_errors < MAX_ROW_ERRORS:
            found = [(row, reason) for row, reason in enumerate(errors.to_pylist(), start) if reason]
            self.errors += [
                RowError(row=row, error=reason[:MAX_ERROR_CHARS], attempts=attempts, worker=worker)
                for row, reason in found[: MAX_ROW_ERRORS - before.row_errors]
            ]
