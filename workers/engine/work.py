"""What is scored: the pairs of a chunk with their tokens and scores, and batches of rows of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankmill.workers.backends.base import Pending
from rankmill.workers.batches.planner import Rows
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.host import metrics


@dataclass
class PairScores:
    """Scores of `n` pairs, with the tokens and batches that they took.

    ``scores`` is float32, ``[n]`` or ``[n, labels]``; NaN for the rows in ``errors``, row to reason.
    ``tokens`` counts real tokens, ``padded_tokens`` real tokens and padding. ``batches`` counts the
    batches with at least one of the pairs. ``windows`` counts the windows of the ``cut`` passages.
    """

    scores: npt.NDArray[np.float32]
    errors: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    windows: int = 0
    cut: int = 0

    def fail(self, row: int, kind: str, reason: str) -> None:
        """Set the error of a row; `kind` is one of `metrics.ROW_ERRORS`."""
        self.errors[row] = reason
        metrics.row_errors.labels(kind).inc()


@dataclass(eq=False)
class Work:
    """The pairs of a chunk in the engine: their tokens, and their scores so far.

    ``rows[i]`` is the number of the pair in row ``i`` of ``tokens``; a pair has a row for each window.
    ``left`` is how many rows are not scored yet. ``seconds`` are those of its stages, by name.
    """

    tokens: Tokens
    rows: Rows
    scored: PairScores
    left: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Pairs that are scored; those of several windows count in parts."""
        rows = len(self.rows)
        return (rows - self.left) * (rows - self.scored.windows + self.scored.cut) // rows if rows else 0


Part = tuple[Work, Rows]
"""Some rows of one `Work`, as indices into its ``tokens``."""


@dataclass(frozen=True)
class Flight:
    """A batch whose forward has begun, or could not begin (then ``pending`` is the error)."""

    parts: list[Part]
    pending: Pending | Exception


def rows_in(parts: list[Part]) -> int:
    """Rows of a batch."""
    return sum(len(rows) for _, rows in parts)


def longest_in(parts: list[Part]) -> int:
    """Tokens of the longest row of a batch."""
    return max(int(work.tokens.lengths[rows].max()) for work, rows in parts)
