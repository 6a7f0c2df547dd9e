"""Input rows with their scores, made of the results of their chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats, worst


@dataclass(frozen=True)
class ScoredTable:
    """A part of the input with its scores; ``stats`` is ``None`` if no worker could score it.

    In each row exactly one of score and error is null. A score is a float32, or a list of a fixed number of
    them; the type says nothing where no row has one. ``attempts`` is the number of attempts;
    ``worker`` made the last one (empty if it is not known). ``reused`` rows have their score from elsewhere.
    ``parts`` are the tables of each run, where several have scored the rows. Of a detached run, the table has
    no columns.
    """

    table: pa.Table
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats | None
    attempts: int
    worker: str
    reused: int = 0
    parts: tuple[ScoredTable, ...] = ()


def scored_table(
    table: pa.Table, result: ChunkResult | None, columns: tuple[pa.Array, pa.Array], reused: int = 0
) -> ScoredTable:
    """The rows of a chunk with their scores and errors, and what a worker says of it, if one was asked."""
    if isinstance(result, ChunkScores):
        return ScoredTable(table, *columns, result.stats, result.stats.attempt, result.stats.worker, reused)
    if result is None:
        return ScoredTable(table, *columns, None, 0, "", reused)
    return ScoredTable(table, *columns, None, result.attempts, result.worker, reused)


def scores_and_errors(
    result: ChunkResult, rows: int, kind: pa.DataType | None = None
) -> tuple[pa.Array, pa.Array]:
    """Return ``(scores, errors)`` of shape ``[rows]``; in each row exactly one of them is null.

    `kind` is the type of the scores where there are none; default: float32.
    """
    if isinstance(result, ChunkScores):
        return result.scores, result.errors
    return pa.nulls(rows, kind or pa.float32()), pa.array([result.message] * rows, pa.string())


def join_results(chunk: int, results: Sequence[tuple[int, ChunkResult]]) -> ChunkResult:
    """Combine the results of a chunk's pieces, each with its number of rows, in order, into the chunk's."""
    if len(results) == 1:
        return results[0][1]
    scored = [result for _, result in results if isinstance(result, ChunkScores)]
    failed = [result for _, result in results if isinstance(result, ChunkFailure)]
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
        "device_seconds": sum(part.stats.device_seconds or 0.0 for part in scored) or None,
        "bound": worst([part.stats.bound for part in scored]),
        "reference": next((part.stats.reference for part in scored if part.stats.reference), None),
    }
    stats = scored[-1].stats.model_copy(update=totals)
    kind = scored[0].scores.type
    columns = [scores_and_errors(result, rows, kind) for rows, result in results]
    scores, errors = (pa.concat_arrays([pair[side] for pair in columns]) for side in (0, 1))
    return ChunkScores(chunk, scores, errors, stats)
