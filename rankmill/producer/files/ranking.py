"""Ranks the rows of each query by score, and adds the mean of several models' scores, in bounded memory.

Rows wait on disk until the last one has come. Of each row, only the number of its query stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.producer.files.formats.text import undictionary
from rankmill.producer.files.stores.writing import discard

if TYPE_CHECKING:
    import pandas as pd
    from pandas.core.groupby import DataFrameGroupBy

_BUFFER_BYTES = 128 << 20
"""Bytes of rows that are held in memory before they are written to disk."""

_BATCH_ROWS = 8192
"""Number of rows that are read at a time, and that are ranked at a time unless one query has more."""

_LOOKED_AT = 1000
"""Most rows with equal hashes that are compared, because different ids almost never have equal hashes."""

Ids = tuple[str, str]
"""The ids of a query and a passage."""

Rows = npt.NDArray[np.int64]

Mean = Literal["ranks", "scores"]


@dataclass(frozen=True)
class MeanColumn:
    """The column with the mean of several models' scores, or of the ranks that the models give.

    Both are computed within each query. Scores are standardized first. Rank 1 is the best; equal scores share
    the mean of their ranks.
    """

    name: str
    of: Mean


class HeldRows:
    """Holds rows with their scores, and gives them back with their means or ranks.

    Ranked rows come by query, in the order in which the queries appeared; rows without a score are left out,
    and equal scores are ranked as by `best_first`. Otherwise, rows keep their order.

    Parameters
    ----------
    folder
        Folder for the file of the rows.
    group, scores
        Names of the column that tells queries apart, and of the columns of scores.
    mean
        The column of means to add, if any; rows are then ranked by it.
    rank
        Name of the column of ranks to add; with ``None``, rows are not ranked.
    top_k
        Rows to keep of each query if they are ranked; ``None`` keeps all.
    passage
        Name of the column with the passages' ids, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        group: str,
        scores: Sequence[str],
        mean: MeanColumn | None = None,
        rank: str | None = None,
        top_k: int | None = None,
        passage: str | None = None,
    ) -> None:
        self._path = folder / "rows.arrow"
        self._group, self._scores, self._mean = group, list(scores), mean
        self._score = mean.name if mean else scores[-1]
        self._rank, self._top_k, self._passage = rank, top_k, passage
        self._buffer: list[pa.Table] = []
        self._bytes = 0
        self._known: dict[object, int] = {}
        self._numbers: list[Rows] = []
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Take in rows."""
        self._buffer.append(table)
        self._bytes += table.nbytes
        if self._bytes >= _BUFFER_BYTES:
            self._spill()

    def finish(self) -> Iterator[pa.Table]:
        """Yield all rows."""
        self._spill()
        if self._writer is None:
            return
        self._writer.close()
        numbers = np.concatenate(self._numbers)
        if not len(numbers):
            return
        with pa.ipc.open_stream(pa.memory_map(str(self._path))) as stream:
            batches = list(stream)  # this does not read the rows yet, because the file is mapped into memory
        if self._mean:
            batches = self._with_means(batches, numbers, self._mean)
        if self._rank:
            yield from self._ranked(batches, numbers, self._rank)
        else:
            yield from (pa.Table.from_batches([batch]) for batch in batches)

    def close(self) -> None:
        """Delete the file of the rows."""
        if self._writer is not None:
            self._writer.close()
        discard(self._path)

    def _spill(self) -> None:
        """Write the held rows to disk, without those that cannot be among the best."""
        if not self._buffer:
            return
        table = pa.concat_tables(self._buffer).combine_chunks()
        numbers = self._numbers_of(table[self._group])
        if self._rank and not self._mean:
            kept = np.sort(self._best(table, numbers))
            table, numbers = table.take(kept).combine_chunks(), numbers[kept]
        if self._writer is None:  # the file is a stream, because each table has dictionaries of its own
            self._writer = pa.ipc.new_stream(self._path, table.schema)
        self._writer.write_table(table)
        self._numbers.append(numbers)
        self._buffer, self._bytes = [], 0

    def _numbers_of(self, column: pa.ChunkedArray) -> Rows:
        """The number of each row's query; queries are numbered in order of appearance."""
        encoded = pc.dictionary_encode(undictionary(column.combine_chunks()), null_encoding="encode")
        by_code = [
            self._known.setdefault(query, len(self._known)) for query in encoded.dictionary.to_pylist()
        ]
        numbers: Rows = np.array(by_code, np.int64)[encoded.indices.to_numpy()]
        return numbers

    def _with_means(
        self, batches: Sequence[pa.RecordBatch], numbers: Rows, mean: MeanColumn
    ) -> list[pa.RecordBatch]:
        columns = [
            np.concatenate([batch[name].to_numpy(zero_copy_only=False) for batch in batches])
            for name in self._scores
        ]
        means = _means(numbers, np.stack(columns, axis=1), mean.of)
        parts = np.split(means.astype(np.float32), np.cumsum([len(batch) for batch in batches])[:-1])
        return [
            batch.append_column(pa.field(mean.name, pa.float32()), pa.array(part, mask=np.isnan(part)))
            for batch, part in zip(batches, parts, strict=True)
        ]

    def _ranked(self, batches: Sequence[pa.RecordBatch], numbers: Rows, rank: str) -> Iterator[pa.Table]:
        by_query = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[by_query], append=-1)) + 1
        names = [self._score, *([self._passage] if self._passage else [])]
        compared = [batch.select(names) for batch in batches]
        start = 0
        while start < len(numbers):
            end = int(ends[np.searchsorted(ends, min(start + _BATCH_ROWS, len(numbers)))])
            rows = by_query[start:end]
            best = self._best(taken(compared, rows), numbers[rows])
            ranks = _places(numbers[rows][best])
            for first in range(0, len(best), _BATCH_ROWS):
                some = slice(first, first + _BATCH_ROWS)
                table = taken(batches, rows[best[some]])
                yield table.append_column(rank, pa.array(ranks[some], pa.int32()))
            start = end

    def _best(self, table: pa.Table, numbers: Rows) -> Rows:
        """The rows to keep, sorted by query and score."""
        scores: npt.NDArray[np.float32] = table[self._score].to_numpy().astype(np.float32)
        ids = undictionary(table[self._passage].combine_chunks()).cast(pa.string()) if self._passage else None
        order = best_first(numbers, scores, ids)
        order = order[np.isfinite(scores)[order]]
        return order[_places(numbers[order]) <= (self._top_k or len(order))]


def taken(batches: Sequence[pa.RecordBatch], rows: Rows) -> pa.Table:
    """The rows of batches with some numbers. Arrow's own function would copy all batches into one before."""
    order = np.argsort(rows)
    starts = np.cumsum([0, *map(len, batches)])
    cuts = np.searchsorted(rows[order], starts)
    parts = [
        batch.take(pa.array(rows[order[first:end]] - start))
        for batch, start, first, end in zip(batches, starts, cuts, cuts[1:], strict=False)
        if first < end
    ]
    return pa.Table.from_batches(parts, batches[0].schema).take(np.argsort(order))


class Repeats:
    """Finds two rows with the same ids; needs 8 bytes of memory for each row, and 16 while comparing."""

    def __init__(self, query: str, passage: str) -> None:
        self._names = (query, passage)
        self._keys: list[Rows] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in rows, in order."""
        self._keys.append(np.fromiter(map(hash, self._ids(batch)), np.int64, len(batch)))

    def first(self, again: Callable[[], Iterable[pa.RecordBatch]]) -> Ids | None:
        """Ids that two rows have; ``None`` if no two rows have the same. `again` reads all rows once more."""
        keys = np.sort(np.concatenate(self._keys or [np.zeros(0, np.int64)]))
        twice = set(keys[1:][keys[1:] == keys[:-1]][:_LOOKED_AT].tolist())
        seen: set[Ids] = set()
        for batch in again() if twice else ():
            for ids in self._ids(batch):
                if ids in seen:
                    return ids
                if hash(ids) in twice:
                    seen.add(ids)
        return None

    def _ids(self, batch: pa.RecordBatch) -> Iterator[Ids]:
        columns = [undictionary(batch[name]).cast(pa.string()).to_pylist() for name in self._names]
        return zip(*columns, strict=True)


def best_first(numbers: Rows, scores: npt.NDArray[np.floating[Any]], ids: pa.Array | None) -> Rows:
    """The rows of each query in order of their scores, best first; those without a score come last.

    Of equal scores, the passage with the larger id comes first, as in trec_eval; without `ids`, rows with
    equal scores stay in order. `numbers` are the numbers of the rows' queries.
    """
    order: Rows = np.lexsort((-scores, numbers))
    # whether a row ties with the next one
    is_tied = (np.diff(numbers[order]) == 0) & (np.diff(scores[order]) == 0)
    if ids is not None and is_tied.any():
        places = np.flatnonzero(np.r_[is_tied, False] | np.r_[False, is_tied])
        rows = order[places]
        by_id = pc.rank(ids.take(pa.array(rows)), sort_keys="descending", tiebreaker="dense").to_numpy()
        order[places] = rows[np.lexsort((by_id, -scores[rows], numbers[rows]))]
    return order


def _places(numbers: Rows) -> Rows:
    """The place (from 1) of each row within its query; rows must be sorted by query."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    sizes = np.diff(starts, append=len(numbers))
    return np.arange(1, len(numbers) + 1) - np.repeat(starts, sizes)


def starts_of(column: pa.Array) -> Rows:
    """The first row of each sequence of equal values."""
    encoded = pc.dictionary_encode(undictionary(column), null_encoding="encode")
    return np.flatnonzero(np.diff(encoded.indices.to_numpy().astype(np.int64), prepend=-1))


def _means(numbers: Rows, scores: npt.NDArray[np.float32], of: Mean) -> npt.NDArray[np.float64]:
    """The mean of each row; NaN for a row that lacks a score. Such a row does not affect others."""
    import pandas as pd  # slow to import

    means = np.full(len(numbers), np.nan)
    whole = np.isfinite(scores).all(axis=1)
    if whole.any():
        by_query = pd.DataFrame(scores[whole].astype(np.float64)).groupby(numbers[whole])
        ranks_or_scores = by_query.rank(ascending=False) if of == "ranks" else _standardized(by_query)
        means[whole] = ranks_or_scores.mean(axis=1)
    return means


def _standardized(by_query: DataFrameGroupBy[Any, Any]) -> pd.DataFrame:
    """The difference of each score from its query's mean, divided by the query's standard deviation; 0 if a
    query's scores are all equal.
    """
    differ = by_query.transform("max") > by_query.transform("min")
    off = by_query.obj - by_query.transform("mean")
    return (off / by_query.transform("std", ddof=0)).where(differ, 0.0)
