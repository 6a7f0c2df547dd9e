"""Input rows with their scores, made from the results of their chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats, worst


class RowResults(NamedTuple):
    """Scores and errors of rows, and their tokens if they were asked for; all of shape ``[rows]``.

    In each row exactly one of score and error is null. ``tokens`` are numbers of tokens, null if unknown; for
    a run that asks only for tokens, they are the answers as JSON.
    """

    scores: pa.Array
    errors: pa.Array
    tokens: pa.Array | None = None

    def take(self, rows: pa.Array) -> RowResults:
        tokens = None if self.tokens is None else self.tokens.take(rows)
        return RowResults(self.scores.take(rows), self.errors.take(rows), tokens)


@dataclass(frozen=True)
class ScoredTable:
    """Rows of the input with their scores and errors. In each row exactly one of score and error is null.

    Attributes
    ----------
    table
        The rows of the input. For a detached run, the table has no columns.
    scores
        A float32 for each row, or a list of a fixed number of them. If no row has a score, the type says
        nothing.
    errors
        The reason why a row has no score.
    stats
        Statistics of the chunk; ``None`` if no worker has scored the rows, or if several runs have.
    attempts
        The most attempts that any of the rows needed.
    worker
        Name of one of the workers; empty if unknown.
    reused
        Number of rows with the score of an earlier output.
    parts
        If several runs have scored the rows, the tables of these runs.
    tokens
        As in `RowResults`.
    """

    table: pa.Table
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats | None
    attempts: int
    worker: str
    reused: int = 0
    parts: tuple[ScoredTable, ...] = ()
    tokens: pa.Array | None = None


def scored_table(
    table: pa.Table, result: ChunkResult | None, results: RowResults, reused: int = 0
) -> ScoredTable:
    """Join a chunk's rows with their results, and with the worker's statistics if a worker was asked."""
    stats: ChunkStats | None = None
    attempts, worker = 0, ""
    if isinstance(result, ChunkScores):
        stats, attempts, worker = result.stats, result.stats.attempt, result.stats.worker
    elif result is not None:
        attempts, worker = result.attempts, result.worker
    return ScoredTable(
        table, results.scores, results.errors, stats, attempts, worker, reused, tokens=results.tokens
    )


def row_results(result: ChunkResult, rows: int, kind: pa.DataType | None = None) -> RowResults:
    """Turn the result of a chunk of `rows` rows into scores and errors of its rows.

    If the chunk failed, all scores are null. `kind` is the Arrow type of such null scores, by default
    float32.
    """
    if isinstance(result, ChunkScores):
        return RowResults(result.scores, result.errors, result.tokens)
    return RowResults(pa.nulls(rows, kind or pa.float32()), pa.array([result.message] * rows, pa.string()))


def join_results(chunk: int, results: Sequence[tuple[int, ChunkResult]]) -> ChunkResult:
    """Join the results of the parts of a chunk into one. `results` are in row order, each with its number of
    rows.
    """
    if len(results) == 1:
        return results[0][1]
    scored = [result for _, result in results if isinstance(result, ChunkScores)]
    failed = [result for _, result in results if isinstance(result, ChunkFailure)]
    if not scored:
        return failed[0].model_copy(update={"chunk": chunk})
    totals = {
        "attempt": max(*(part.stats.attempt for part in scored), *(part.attempts for part in failed), 1),
        "tokens": sum(part.stats.tokens for part in scored),
        "padded_tokens": sum(part.stats.padded_tokens for part in scored),
        "batches": sum(part.stats.batches for part in scored),
        "windows": sum(part.stats.windows for part in scored),
        "seconds": sum(part.stats.seconds for part in scored),
        "tokenize_seconds": sum(part.stats.tokenize_seconds for part in scored),
        "forward_seconds": sum(part.stats.forward_seconds for part in scored),
        "device_seconds": sum(part.stats.device_seconds for part in scored),
        "bound": worst([part.stats.bound for part in scored]),
        "reference": next((part.stats.reference for part in scored if part.stats.reference), None),
    }
    stats = scored[-1].stats.model_copy(update=totals)
    kind = scored[0].scores.type
    pieces = [row_results(result, rows, kind) for rows, result in results]
    scores = pa.concat_arrays([piece.scores for piece in pieces])
    errors = pa.concat_arrays([piece.errors for piece in pieces])
    return ChunkScores(chunk, scores, errors, stats, joined_tokens(pieces))


def joined_tokens(parts: Sequence[RowResults | ScoredTable]) -> pa.Array | None:
    """Join the token columns of several tables. The rows of a table without tokens get null.

    Returns ``None`` if no table has tokens.
    """
    kinds = [part.tokens.type for part in parts if part.tokens is not None]
    if not kinds:
        return None
    unknown = (pa.nulls(len(part.scores), kinds[0]) for part in parts)
    return pa.concat_arrays(
        [none if part.tokens is None else part.tokens for part, none in zip(parts, unknown, strict=True)]
    )
