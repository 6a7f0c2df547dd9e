"""How far a run has come: what its producer notes in Redis for others to see."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_ROW_ERRORS = 200
"""So many of a run's row errors are kept in Redis, the first ones; the output's list has all."""

MAX_ERROR_CHARS = 500


class Progress(BaseModel):
    """Rows that have their result; ``since`` and ``at`` are when the first and the last came.

    In seconds since 1970; the first brought ``since_rows`` of the ``rows``.
    """

    model_config = ConfigDict(frozen=True)

    rows: int = 0
    row_errors: int = 0
    since: float = 0.0
    since_rows: int = 0
    at: float = 0.0

    def rows_per_second(self) -> float | None:
        """The speed so far; ``None`` before the second result."""
        fresh = self.rows - self.since_rows
        return fresh / (self.at - self.since) if fresh and self.at > self.since else None


class RowError(BaseModel):
    """A row without a score, as in the list of errors beside the output; rows count from 0."""

    model_config = ConfigDict(frozen=True)

    row: int
    error: str
    attempts: int
    worker: str
