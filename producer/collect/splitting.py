"""Splitting of chunks that kill their worker, and joining of results to what the caller gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats


@dataclass(frozen=True)
class ScoredTable:
    """A part of the input with its scores; ``stats`` is ``None`` if no worker could score it.

    In each row exactly one of score and error is null. A score is a float32, or a list of a fixed number of
    them; the type says nothing where no row has one. ``attempts`` is the number of attempts;
    ``worker`` made the last one (empty if it is not known). ``reused`` rows have their score from elsewhere.
    ``parts`` are the tables of each model, where several have scored the rows.
    """

    table: pa.Table
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats | None
    attempts: int
    worker: str
    reused: int = 0
    parts: tuple[ScoredTable, ...] = ()


@dataclass
class Unit:
    """Rows that one job scores: a whole chunk, or a piece of a chunk.

    ``start`` is the unit's first row within the chunk; ``submits`` counts how often the unit was submitted;
    ``payload_bytes`` is its size in Redis.
    """

    chunk: int
    table: pa.Table
    start: int = 0
    submits: int = 1
    piece: bool = False
    payload_bytes: int = 0

    @cached_property
    def table_bytes(self) -> int:
        """The size of the table."""
        return int(self.table.nbytes)

    def halves(self) -> list[Unit]:
        """Split the unit, of at least two rows, into two pieces."""
        middle = len(self.table) // 2
        cuts = ((0, middle), (middle, len(self.table) - middle))
        return [
            Unit(self.chunk, self.table.slice(at, rows), self.start + at, piece=True) for at, rows in cuts
        ]


def join(chunk: int, parts: Sequence[tuple[Unit, ChunkResult]]) -> ChunkResult:
    """Combine the results of a chunk's pieces, in any order, into the result of the chunk."""
    if len(parts) == 1:
        return parts[0][1]
    ordered = sorted(parts, key=lambda part: part[0].start)
    scored = [result for _, result in ordered if isinstance(result, ChunkScores)]
    failed = [result for _, result in ordered if isinstance(result, ChunkFailure)]
    if not scored:
        return failed[0].model_copy(update={"chunk": chunk})
    totals = {
        "attempt": max(part.stats.attempt for part in scored),
        "tokens": sum(part.stats.tokens for part in scored),
        "padded_tokens": sum(part.stats.padded_tokens for part in scored),
        "batches": sum(part.stats.batches for part in scored),
        "seconds": sum(part.stats.seconds for part in scored),
        "tokenize_seconds": None,
        "forward_seconds": None,
    }
    stats = scored[-1].stats.model_copy(update=totals)
    kind = scored[0].scores.type
    columns = [scores_and_errors(result, len(unit.table), kind) for unit, result in ordered]
    scores, errors = (pa.concat_arrays([pair[side] for pair in columns]) for side in (0, 1))
    return ChunkScores(chunk, scores, errors, stats)


def scores_and_errors(
    result: ChunkResult, rows: int, kind: pa.DataType | None = None
) -> tuple[pa.Array, pa.Array]:
    """Return ``(scores, errors)`` of shape ``[rows]``; in each row exactly one of them is null.

    `kind` is the type of the scores where there are none; default: float32.
    """
    if isinstance(result, ChunkScores):
        return result.scores, result.errors
    return pa.nulls(rows, kind or pa.float32()), pa.array([result.message] * rows, pa.string())


def scored_table(table: pa.Table, result: ChunkResult) -> ScoredTable:
    """The rows of a chunk with its result."""
    columns = scores_and_errors(result, len(table))
    if isinstance(result, ChunkScores):
        return ScoredTable(table, *columns, result.stats, result.stats.attempt, result.stats.worker)
    return ScoredTable(table, *columns, None, result.attempts, result.worker)
