"""What a producer publishes about its run: the number of rows done, and the rows without a score."""

from __future__ import annotations

import time

from jobs.results import ChunkResult, ChunkScores
from jobs.run import MAX_ERROR_CHARS, MAX_ROW_ERRORS, Progress, RowError
from producer.splitting import scores_and_errors


class Notes:
    """Counts results as they arrive."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.errors: list[RowError] = []
        """Row errors that are not yet written to Redis; the caller empties the list."""

    def add(self, start: int, rows: int, result: ChunkResult, *, fresh: bool = True) -> None:
        """Count the result of `rows` rows that begin at row `start` of the input.

        A result that is not `fresh` was in the journal before the run, and does not count for its speed.
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
