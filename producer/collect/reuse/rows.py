"""Which rows of a chunk a worker scores, and how the chunk's rows get their scores from these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.results import ChunkResult, ChunkScores
from rankmill.producer.collect.scored import ScoredTable, scores_and_errors

Rows = npt.NDArray[np.int64]
Found = tuple[pa.Array, pa.Array]
"""Scores and errors of rows; in each row exactly one of them is null."""


@dataclass(frozen=True)
class RowsToScore:
    """The rows of a chunk whose pair has no ``known`` score and is not in a row before.

    ``rows`` are these rows. ``places`` has for each row of the chunk the place in ``rows`` of the row with
    the same pair; null where the score is known.
    """

    rows: Rows
    places: pa.Array
    known: pa.Array

    def select(self, table: pa.Table) -> pa.Table:
        """These rows of the chunk's table."""
        return table.take(pa.array(self.rows))

    def whole(self, chunk: int, result: ChunkScores) -> ChunkScores:
        """The result of the chunk from that of these rows."""
        return ChunkScores(chunk, *self._spread(result), result.stats)

    def table(self, table: pa.Table, result: ChunkResult | None, found: Found | None = None) -> ScoredTable:
        """The chunk's rows with their scores.

        Parameters
        ----------
        table
            The rows.
        result
            What a worker says of these rows; ``None`` if it was not asked.
        found
            Scores and errors of these rows, if they are not those of the result.
        """
        reused = len(table) - self.known.null_count
        if result is None and found is None:
            return ScoredTable(table, self.known, pa.nulls(len(table), pa.string()), None, 0, "", reused)
        scores, errors = self._spread(result, found)
        if result is None:
            return ScoredTable(table, scores, errors, None, 0, "", reused)
        if isinstance(result, ChunkScores):
            stats = result.stats
            return ScoredTable(table, scores, errors, stats, stats.attempt, stats.worker, reused)
        return ScoredTable(table, scores, errors, None, result.attempts, result.worker, reused)

    def _spread(self, result: ChunkResult | None, found: Found | None = None) -> Found:
        if found is None:
            assert result is not None
            found = scores_and_errors(result, len(self.rows))
        scores, errors = found
        scores, errors = scores.take(self.places), errors.take(self.places)
        if self.known.null_count < len(self.known):
            scores = pc.coalesce(self.known, scores)
        return scores, errors


def rows_to_score(table: pa.Table, columns: tuple[str, str], known: pa.Array) -> RowsToScore:
    """Find the rows to score of a chunk; `columns` are those of the query and the passage."""
    codes = [_codes(table[name]) for name in columns]
    pairs = codes[0] * (int(codes[1].max(initial=0)) + 1) + codes[1]
    left = np.flatnonzero(np.asarray(pc.is_null(known)))
    _, first, source = np.unique(pairs[left], return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they are in the chunk
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    places = np.full(len(table), -1, np.int64)
    places[left] = place[source]
    return RowsToScore(left[first[order]], pa.array(places, mask=places < 0), known)


def _codes(column: pa.ChunkedArray) -> Rows:
    """Numbers that are equal where the texts are."""
    whole = column.combine_chunks()
    if pa.types.is_dictionary(whole.type):
        whole = whole.cast(whole.type.value_type)
    indices = pc.dictionary_encode(whole, null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)
