"""Rows that are not sent, because an earlier output or an earlier row of their chunk gives their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.results import ChunkResult, ChunkScores
from rankmill.producer.collect.scored import RowResults, ScoredTable, row_results, scored_table

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


class EarlierScores:
    """The scores of an earlier output, by a digest of each row's texts. Digest and score of a row take 20
    bytes of memory.

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
        self._keys, self._scores = keys[order], scores[order]

    def __len__(self) -> int:
        return len(self._scores)

    @property
    def kind(self) -> str | None:
        """The device, versions and precision of a deterministic output, as one text (`ChunkStats.kind`).

        The bits of its scores depend on them. ``None`` if the output is not deterministic.
        """
        return self.made.get("rankmill.kind")

    def digests(self, table: pa.Table) -> Keys:
        return _digests([table[name] for name in self.columns])

    def known(self, keys: Keys) -> pa.Array:
        """Look up the score of each row by the digest of the row's texts. Null if the score is not known."""
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
        The columns of query and passage, or the only column; and the column of the scores.
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
        For each row of the chunk, the index in ``rows`` of the row's pair; null if the row's score is known.
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
        """Make the result of all rows of the chunk from the worker's `result`, which has only the distinct
        pairs.

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
