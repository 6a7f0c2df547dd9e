"""Input rows with their scores. A score comes from a worker, from an earlier output, or from an equal row in
the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats, worst

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


class RowResults(NamedTuple):
    """Scores and errors of rows, and the rows' tokens if they were asked for; all of shape ``[rows]``.

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
        Each row has a float32, or each row has a list of float32, all of one length. If no row has a score,
        the type has no meaning.
    errors
        The reason why a row has no score.
    stats
        Statistics of the chunk; ``None`` if no worker or several runs have scored the rows.
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
    """Join a chunk's rows with their results. If a worker was asked, also add its statistics."""
    stats: ChunkStats | None = None
    attempts, worker = 0, ""
    if isinstance(result, ChunkScores):
        stats, attempts, worker = result.stats, result.stats.attempt, result.stats.worker
    elif result is not None:
        attempts, worker = result.attempts, result.worker
    return ScoredTable(
        table, results.scores, results.errors, stats, attempts, worker, reused, tokens=results.tokens
    )


def row_results(result: ChunkResult, rows: int) -> RowResults:
    """Turn the result of a chunk of `rows` rows into scores and errors of its rows.

    If the chunk failed, all scores are null.
    """
    if isinstance(result, ChunkScores):
        return RowResults(result.scores, result.errors, result.tokens)
    return RowResults(pa.nulls(rows, pa.float32()), pa.array([result.message] * rows, pa.string()))


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
    summed = (
        "tokens", "padded_tokens", "batches", "windows", "seconds", "tokenize_seconds", "forward_seconds",
        "device_seconds",
    )  # fmt: skip
    totals = {name: sum(getattr(part.stats, name) for part in scored) for name in summed} | {
        "attempt": max(*(part.stats.attempt for part in scored), *(part.attempts for part in failed), 1),
        "bound": worst([part.stats.bound for part in scored]),
        "reference": next((part.stats.reference for part in scored if part.stats.reference), None),
    }
    stats = scored[-1].stats.model_copy(update=totals)
    pieces = [row_results(result, rows) for rows, result in results]
    errors = pa.concat_arrays([piece.errors for piece in pieces])
    return ChunkScores(chunk, joined_scores(pieces), errors, stats, joined_tokens(pieces))


def joined_scores(parts: Sequence[RowResults | ScoredTable]) -> pa.Array:
    """Join the scores of several tables. If a table has no score at all, its column of scores may have
    another type.
    """
    kinds = [part.scores.type for part in parts]
    kind = next((kind for kind in kinds if pa.types.is_fixed_size_list(kind)), pa.float32())
    scores = [part.scores if part.scores.type == kind else pa.nulls(len(part.scores), kind) for part in parts]
    return pa.concat_arrays(scores)


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


class EarlierScores:
    """The scores of an earlier output, by a digest of each row's texts. A row takes 20 bytes of memory.

    Parameters
    ----------
    columns
        The columns of a row's texts.
    keys
        The digests of the rows, ``[n, 2]``.
    scores
        The scores of the rows, ``[n]``.
    made
        The output's metadata, which say how the scores were made.
    """

    def __init__(
        self, columns: tuple[str, ...], keys: Keys, scores: Scores, made: Mapping[str, str] | None = None
    ) -> None:
        order = np.argsort(keys[:, 0], kind="stable")
        self.columns, self.made = columns, made or {}
        self.kind = self.made.get("rankmill.kind")
        """One text that names device, versions and precision, on which the exact scores of a deterministic
        output depend (`ChunkStats.kind`). ``None`` if the output is not deterministic.
        """
        self._keys, self._scores = keys[order], scores[order]

    def __len__(self) -> int:
        return len(self._scores)

    def digests(self, table: pa.Table) -> Keys:
        return _digests([table[name] for name in self.columns])

    def known(self, keys: Keys) -> pa.Array:
        """Look up the score of each row by the digest of the row's texts. An unknown score is null."""
        if not len(self):
            return pa.nulls(len(keys), pa.float32())
        places = np.minimum(np.searchsorted(self._keys[:, 0], keys[:, 0]), len(self) - 1)
        missing = (self._keys[places] != keys).any(axis=1)
        return pa.array(self._scores[places], mask=missing)


def no_earlier(columns: tuple[str, ...]) -> EarlierScores:
    """Make an `EarlierScores` that knows no score, for pairs in these columns."""
    return EarlierScores(columns, np.zeros((0, 2), np.uint64), np.zeros(0, np.float32))


def read_earlier(
    batches: Iterable[pa.RecordBatch],
    columns: tuple[str, ...],
    score: str,
    made: Mapping[str, str] | None = None,
) -> EarlierScores:
    """Read the pairs and scores of an output; rows without a score are left out.

    Parameters
    ----------
    batches
        The rows of the output, with the columns that are named below.
    columns, score
        The columns with the texts (query and passage, or a single one), and the column with the scores.
    made
        As in `EarlierScores`.
    """
    keys, scores = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.float32)]
    for batch in batches:
        kept = batch.filter(batch[score].is_valid())
        keys.append(_digests([pa.chunked_array([kept[name]]) for name in columns]))
        scores.append(np.asarray(kept[score]).astype(np.float32))
    return EarlierScores(columns, np.concatenate(keys), np.concatenate(scores), made)


def _digests(columns: list[pa.ChunkedArray]) -> Keys:
    texts = [_as_bytes(column).to_pylist() for column in columns]
    queries = {text: blake2b(_bytes(text), digest_size=16).digest() for text in set(texts[0])}
    if len(texts) == 1:
        joined = b"".join(map(queries.__getitem__, texts[0]))
    else:
        joined = b"".join(
            blake2b(_bytes(passage), digest_size=16, key=queries[query]).digest()
            for query, passage in zip(*texts, strict=True)
        )
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def _bytes(text: bytes | None) -> bytes:
    return b"\0" if text is None else b"\1" + text


def _as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of any text type to bytes."""
    kind = column.type
    return (column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column).cast(pa.binary())


@dataclass(frozen=True)
class ChunkPairs:
    """The distinct pairs among those rows of a chunk whose score is not known.

    Attributes
    ----------
    rows
        The number of the first row of each distinct pair. Only these rows are sent to workers.
    places
        For each row of the chunk, the place of its pair in ``rows``; null if the row's score is known.
    known
        The known score of each row, or null.
    """

    rows: Numbers
    places: pa.Array
    known: pa.Array

    def select(self, table: pa.Table) -> pa.Table:
        """Return the rows of the chunk's `table` that are sent to workers: one for each distinct pair."""
        return table.take(pa.array(self.rows))

    def whole(self, chunk: int, result: ChunkResult) -> ChunkScores | None:
        """Make a result with all rows of the chunk. The worker's `result` has only the distinct pairs.

        Returns ``None`` if `result` is a failure. A resumed run then tries the chunk again.
        """
        if not isinstance(result, ChunkScores):
            return None
        results = self._row_results(result)
        return ChunkScores(chunk, results.scores, results.errors, result.stats, results.tokens)

    def table(self, table: pa.Table, result: ChunkResult | None) -> ScoredTable:
        """Join the chunk's `table` with the scores of all its rows.

        `result` has the scores of the distinct pairs that were sent to a worker. It is ``None`` if no pair
        was sent.
        """
        return scored_table(table, result, self._row_results(result), len(table) - self.known.null_count)

    def _row_results(self, result: ChunkResult | None) -> RowResults:
        if result is None:
            return RowResults(self.known, pa.nulls(len(self.known), pa.string()))
        results = row_results(result, len(self.rows)).take(self.places)
        if self.known.null_count == len(self.known):
            return results
        return results._replace(scores=pc.coalesce(self.known, results.scores))


def distinct_pairs(table: pa.Table, columns: tuple[str, ...], known: pa.Array | None) -> ChunkPairs | None:
    """Find the distinct pairs among those rows of a chunk whose score is not known.

    Returns ``None`` if all rows must be sent to workers.

    Parameters
    ----------
    table, columns
        The chunk, and its columns with the texts of a row.
    known
        The known score of each row, or null; ``None`` if no score is known.
    """
    known = pa.nulls(len(table), pa.float32()) if known is None else known
    pairs, *others = [_codes(table[name]) for name in columns]
    for codes in others:
        pairs = pairs * (int(codes.max(initial=0)) + 1) + codes
    unknown = np.flatnonzero(np.asarray(pc.is_null(known)))
    found = np.asarray(pa.array(pairs[unknown]).dictionary_encode().indices)  # in order of appearance
    rows = unknown[np.diff(np.maximum.accumulate(found), prepend=-1) > 0]
    if len(rows) == len(table):
        return None
    places = np.full(len(table), -1, np.int64)
    places[unknown] = found
    return ChunkPairs(rows, pa.array(places, mask=places < 0), known)


def _codes(column: pa.ChunkedArray) -> Numbers:
    """Return a number for each text of a column; equal texts have equal numbers."""
    if pa.types.is_dictionary(column.type):  # several dictionaries may not fit into one with 8-bit indices
        column = column.cast(column.type.value_type)
    indices = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)
