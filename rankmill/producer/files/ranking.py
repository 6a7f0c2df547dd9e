"""Ranks the rows of each query by score, and adds the mean of the scores or ranks that several models give.

Until the last row has come, rows wait on disk in parts, each sorted by query. Memory holds a buffer of rows,
and the name of each query.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.producer.files.formats.text import texts_of, undictionary
from rankmill.producer.files.stores.writing import as_output_error

if TYPE_CHECKING:
    import pandas as pd
    from pandas.core.groupby import DataFrameGroupBy

_BUFFER_BYTES = 128 << 20
"""Rows are held in memory until they have this many bytes, then they are written to disk."""

_BATCH_ROWS = 8192
"""About this many rows are ranked or averaged at a time; all rows of a query are handled together. Ranked
rows are returned in tables of at most this many.
"""

_QUERY, _ROW = "\0query", "\0row"
"""Columns that rows have while they wait to be ranked. They have the number of the row's query, and the row's
own number.
"""

_LOOKED_AT = 1000
"""If rows have the same hash, their ids are compared. At most this many hashes are handled in this way. More
are not needed, because different ids almost never have the same hash.
"""

Ids = tuple[str, str]

Rows = npt.NDArray[np.int64]

Mean = Literal["ranks", "scores"]


@dataclass(frozen=True)
class MeanColumn:
    """The column with the mean of the scores, or of the ranks, that several models give.

    Scores are first standardized within each query. Ranks count from 1, the best, within each query; equal
    scores share the mean of their ranks.
    """

    name: str
    of: Mean


class HeldRows:
    """Holds an output's rows with their scores until the last row has come, and then returns the rows with
    means or ranks.

    Ranked rows come query by query, in the order in which the queries appeared. Rows without a score are left
    out. If rows are not ranked, all of them are returned in input order.

    Parameters
    ----------
    folder
        Folder for the rows, in files without names.
    group, scores
        Names of the column that tells queries apart, and of the columns of scores.
    mean
        The column of means to add, if there is one. If rows are ranked, it decides their ranks.
    rank
        Name of the column of ranks to add; with ``None``, rows are not ranked.
    top_k
        Rows to keep of each query if they are ranked; ``None`` keeps all.
    passage
        Name of the column with the passages' ids, if there is one. It decides the order of equal scores.
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
        self._group, self._scores, self._mean = group, list(scores), mean
        self._score = mean.name if mean else scores[-1]
        self._rank, self._top_k, self._passage = rank, top_k, passage
        self._buffer: list[pa.Table] = []
        self._bytes = self._rows = 0
        self._known: dict[object, int] = {}
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, table: pa.Table) -> None:
        self._buffer.append(table)
        self._bytes += table.nbytes
        if self._bytes >= _BUFFER_BYTES:
            self._spill()

    def finish(self) -> Iterator[pa.Table]:
        """Yield the rows in their order, with their means or ranks."""
        self._spill()
        if self._writer is None:
            return
        self._writer.close()
        with pa.ipc.open_stream(pa.py_buffer(np.memmap(self._file, np.uint8, "r"))) as stream:
            batches = list(stream)  # this reads no rows yet: the file is mapped into memory
        if self._rank:
            yield from self._ranked(batches, self._rank)
        elif self._mean:
            yield from self._averaged(batches, self._mean)

    def close(self) -> None:
        """Close the temporary file. Errors are ignored, because closing the file tries once more to write the
        rows that a full disk has refused.
        """
        with suppress(OSError):
            self._file.close()

    def _spill(self) -> None:
        """Write the rows in memory to disk, sorted by query.

        If no means are to be added, only the best `top_k` rows of each query are written, and rows without a
        score are left out.
        """
        if not self._buffer:
            return
        table = pa.concat_tables(self._buffer).combine_chunks()
        self._buffer, self._bytes = [], 0
        first, self._rows = self._rows, self._rows + len(table)
        numbers = self._numbers_of(table[self._group])
        order = np.argsort(numbers, kind="stable") if self._mean else self._best(table, numbers)
        for name, column in ((_QUERY, numbers), (_ROW, np.arange(first, self._rows))):
            table = table.append_column(name, pa.array(column))
        if self._writer is None:  # the file is a stream, because each table has dictionaries of its own
            self._writer = pa.ipc.new_stream(self._file, table.schema)
        self._writer.write_table(table.take(order).combine_chunks())

    def _numbers_of(self, column: pa.ChunkedArray) -> Rows:
        whole = undictionary(column.combine_chunks())
        if isinstance(whole, pa.ExtensionArray):  # such as UUIDs, which Arrow cannot encode
            whole = whole.storage
        encoded = pc.dictionary_encode(whole, null_encoding="encode")
        by_code = [
            self._known.setdefault(query, len(self._known)) for query in encoded.dictionary.to_pylist()
        ]
        numbers: Rows = np.array(by_code, np.int64)[encoded.indices.to_numpy()]
        return numbers

    def _by_query(self, batches: Sequence[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Yield all rows of a few queries at a time, in the order of the queries. A column of means is added
        if the output has one.
        """
        numbers = [batch[_QUERY].to_numpy() for batch in batches]
        sizes = sum((np.bincount(some, minlength=len(self._known)) for some in numbers), np.zeros(1, int))
        ends = np.cumsum(sizes)
        firsts = np.unique(ends // _BATCH_ROWS, return_index=True)[1]
        for queries in pairwise([*firsts, len(ends)]):
            ranges = [np.searchsorted(some, queries) for some in numbers]
            parts = [
                batch.slice(start, end - start)
                for batch, (start, end) in zip(batches, ranges, strict=True)
                if start < end
            ]
            if parts:
                yield self._with_means(parts, self._mean) if self._mean else parts

    def _with_means(self, parts: Sequence[pa.RecordBatch], mean: MeanColumn) -> list[pa.RecordBatch]:
        table = pa.Table.from_batches([part.select([_QUERY, *self._scores]) for part in parts])
        scores = np.stack([table[name].to_numpy() for name in self._scores], axis=1)
        means = _means(table[_QUERY].to_numpy(), scores, mean.of).astype(np.float32)
        pieces = np.split(means, np.cumsum([len(part) for part in parts])[:-1])
        return [
            part.append_column(pa.field(mean.name, pa.float32()), pa.array(piece, mask=np.isnan(piece)))
            for part, piece in zip(parts, pieces, strict=True)
        ]

    def _averaged(self, batches: Sequence[pa.RecordBatch], mean: MeanColumn) -> Iterator[pa.Table]:
        start = self._file.seek(0, os.SEEK_END)
        # Write zeros first: a full disk raises an error here, but not when mapped memory is written.
        for batch in batches:
            self._file.write(bytes(np.float32().itemsize * len(batch)))
        means = np.memmap(self._file, np.float32, offset=start)
        for part in chain.from_iterable(self._by_query(batches)):
            means[part[_ROW].to_numpy()] = part[mean.name].to_numpy(zero_copy_only=False)
        for batch in batches:
            rows = batch[_ROW].to_numpy()
            order = np.argsort(rows)
            row_means = means[rows[order]]
            table = pa.Table.from_batches([batch.take(order)]).drop_columns([_QUERY, _ROW])
            yield table.append_column(mean.name, pa.array(row_means, mask=np.isnan(row_means)))

    def _ranked(self, batches: Sequence[pa.RecordBatch], rank: str) -> Iterator[pa.Table]:
        names = [_QUERY, self._score, *([self._passage] if self._passage else [])]
        for parts in self._by_query(batches):
            compared = pa.Table.from_batches([part.select(names) for part in parts])
            numbers = compared[_QUERY].to_numpy()
            best = self._best(compared, numbers)
            ranks = _places(numbers[best])
            for first in range(0, len(best), _BATCH_ROWS):
                some = slice(first, first + _BATCH_ROWS)
                table = taken(parts, best[some]).drop_columns([_QUERY, _ROW])
                yield table.append_column(rank, pa.array(ranks[some], pa.int32()))

    def _best(self, table: pa.Table, numbers: Rows) -> Rows:
        scores: npt.NDArray[np.float32] = table[self._score].to_numpy().astype(np.float32)
        ids = texts_of(table[self._passage].combine_chunks()) if self._passage else None
        order = best_first(numbers, scores, ids)
        order = order[np.isfinite(scores)[order]]
        return order[_places(numbers[order]) <= (self._top_k or len(order))]


def taken(batches: Sequence[pa.RecordBatch], rows: Rows) -> pa.Table:
    """Take rows by their numbers in all `batches`, and return one table. Arrow's own function would first
    copy all batches into one.
    """
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
    """Finds out whether two rows have the same ids of query and passage. A temporary file holds 8 bytes for
    each row.
    """

    def __init__(self, query: str, passage: str) -> None:
        self._names = (query, passage)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the ids of further rows, in order; raises `OutputError` if the temporary folder is full."""
        with as_output_error(Path(tempfile.gettempdir())):
            self._file.write(np.fromiter(map(hash, self._ids(batch)), np.int64, len(batch)).tobytes())
            self._file.flush()

    def first(self, again: Callable[[], Iterable[pa.RecordBatch]]) -> Ids | None:
        """Return a query and passage that occur together twice, or ``None``. `again` reads the rows anew."""
        with self._file as file:
            keys = np.memmap(file, np.int64) if file.tell() else np.zeros(0, np.int64)
        keys.sort()
        parts = (keys[start : start + _BATCH_ROWS + 1] for start in range(0, len(keys), _BATCH_ROWS))
        repeated = chain.from_iterable(part[1:][part[1:] == part[:-1]].tolist() for part in parts)
        twice = set(islice(repeated, _LOOKED_AT))
        seen: set[Ids] = set()
        for batch in again() if twice else ():
            for ids in self._ids(batch):
                if ids in seen:
                    return ids
                if hash(ids) in twice:
                    seen.add(ids)
        return None

    def _ids(self, batch: pa.RecordBatch) -> Iterator[Ids]:
        columns = [texts_of(batch[name]).to_pylist() for name in self._names]
        return zip(*columns, strict=True)


def best_first(numbers: Rows, scores: npt.NDArray[np.floating[Any]], ids: pa.Array | None) -> Rows:
    """Return the row numbers sorted by query, and within each query by score, best first.

    Rows without a score come last in their query.

    Parameters
    ----------
    numbers
        The number of each row's query.
    scores
        The score of each row.
    ids
        The passage's id of each row. Of equal scores, the larger id comes first, as in trec_eval. With
        ``None``, rows with equal scores stay in order.
    """
    order: Rows = np.lexsort((-scores, numbers))
    # for each row in this order, whether the next row has the same query and score
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
    """Find the sequences of equal values in a column, and return the index at which each begins."""
    encoded = pc.dictionary_encode(undictionary(column), null_encoding="encode")
    return np.flatnonzero(np.diff(encoded.indices.to_numpy().astype(np.int64), prepend=-1))


def _means(numbers: Rows, scores: npt.NDArray[np.float32], of: Mean) -> npt.NDArray[np.float64]:
    """Return the mean of each row's standardized scores, or of the row's ranks within its query.

    A row that lacks a score gets NaN, and does not affect the other rows.
    """
    import pandas as pd  # slow to import

    means = np.full(len(numbers), np.nan)
    whole = np.isfinite(scores).all(axis=1)
    if whole.any():
        by_query = pd.DataFrame(scores[whole].astype(np.float64)).groupby(numbers[whole])
        ranks_or_scores = by_query.rank(ascending=False) if of == "ranks" else _standardized(by_query)
        means[whole] = ranks_or_scores.mean(axis=1)
    return means


def _standardized(by_query: DataFrameGroupBy[Any, Any]) -> pd.DataFrame:
    """Standardize scores within each query: subtract their mean, and divide by their standard deviation.
    Equal scores become 0.
    """
    differ = by_query.transform("max") > by_query.transform("min")
    off = by_query.obj - by_query.transform("mean")
    return (off / by_query.transform("std", ddof=0)).where(differ, 0.0)
