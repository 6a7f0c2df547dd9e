"""Pairs that several chunks in the window have: the first of these chunks asks for their scores, for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.results import ChunkResult, ChunkScores
from producer.reuse.rows import RowsToScore
from producer.splitting import ScoredTable, scores_and_errors

Answer = tuple[float | None, str | None]
"""Score and error of a pair; one of them is null."""


@dataclass
class SharedPairs:
    """The distinct pairs of a chunk without a known score, and the answers to them.

    ``asked`` has a row for each. ``own`` says for each whether this chunk asks for it; another chunk asks for
    the rest, whose digests are in ``missing`` until their answers are there.
    """

    asked: RowsToScore
    digests: Sequence[bytes]
    own: npt.NDArray[np.bool_]
    missing: set[bytes]
    result: ChunkResult | None = None
    answers: dict[bytes, Answer] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all answers are there."""
        return not self.missing and (self.result is not None or not self.own.any())

    def select(self, table: pa.Table) -> pa.Table:
        """The rows that this chunk asks for itself."""
        return self.asked.select(table).filter(pa.array(self.own))

    def add(self, answers: Mapping[bytes, Answer]) -> None:
        """Take in answers to pairs that another chunk has asked for."""
        self.answers.update(answers)
        self.missing.difference_update(answers)

    def whole(self, chunk: int) -> ChunkScores | None:
        """The result of all rows for the journal; ``None`` where there are no statistics."""
        if not isinstance(self.result, ChunkScores):
            return None
        return self.asked.whole(chunk, ChunkScores(chunk, *self._found(), self.result.stats))

    def table(self, table: pa.Table) -> ScoredTable:
        """The chunk's rows with their scores."""
        return self.asked.table(table, self.result, self._found())

    def _found(self) -> tuple[pa.Array, pa.Array]:
        """Scores and errors of the distinct pairs, in order."""
        count = int(self.own.sum())
        if self.result is None:
            own: Iterator[Answer] = iter(())
        else:
            own = zip(*(each.to_pylist() for each in scores_and_errors(self.result, count)), strict=True)
        found = [
            next(own) if is_own else self.answers[digest]
            for digest, is_own in zip(self.digests, self.own, strict=True)
        ]
        return pa.array([score for score, _ in found], pa.float32()), pa.array(
            [error for _, error in found], pa.string()
        )


class Lenders:
    """Which chunk asks for a pair, and which others wait for its answer."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[int]] = {}

    def share(self, chunk: int, asked: RowsToScore, digests: Sequence[bytes]) -> SharedPairs:
        """The pairs of a new chunk: it asks for those that no chunk without a result asks for."""
        own = np.array([digest not in self._waiting for digest in digests], bool)
        for digest, is_own in zip(digests, own, strict=True):
            if is_own:
                self._waiting[digest] = []
            else:
                self._waiting[digest].append(chunk)
        missing = {digest for digest, is_own in zip(digests, own, strict=True) if not is_own}
        return SharedPairs(asked, digests, own, missing)

    def answer(self, shared: SharedPairs, result: ChunkResult) -> dict[int, dict[bytes, Answer]]:
        """Note the result of a chunk's own pairs; returns the answers for the chunks that wait for them."""
        shared.result = result
        scores, errors = scores_and_errors(result, int(shared.own.sum()))
        own = (digest for digest, is_own in zip(shared.digests, shared.own, strict=True) if is_own)
        found: dict[int, dict[bytes, Answer]] = {}
        for digest, score, error in zip(own, scores.to_pylist(), errors.to_pylist(), strict=True):
            for chunk in self._waiting.pop(digest):
                found.setdefault(chunk, {})[digest] = (score, error)
        return found
