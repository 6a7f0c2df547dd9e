"""Ranks the rows of each query by score, best first, in bounded memory.

If the rows of each query follow each other, a query is ranked as soon as the next one begins. Otherwise
sorted parts are written to disk and merged at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.producer.files.formats.text import undictionary
from rankmill.producer.files.stores.writing import discard

_BUFFER_ROWS = 262_144
_BUFFER_BYTES = 128 << 20
_BATCH_ROWS = 8192
"""Rows of a sorted part that the merge reads at a time."""

_LOOKED_AT = 1000
"""Rows with equal hashes that are compared; different ids almost never have equal hashes."""

Ids = tuple[str, str]
"""The ids of a query and a passage."""

_NUMBER = "rankmill.query"
"""Column with the number of the row's query while rows are ranked; numbers follow the order of appearance."""


class QueryNumbers:
    """Numbers queries in order of appearance.

    Parameters
    ----------
    group
        Name of the column that tells queries apart.
    is_grouped
        Whether the rows of every query follow each other; if so, earlier queries are forgotten.
    """

    def __init__(self, group: str, *, is_grouped: bool) -> None:
        self._group = group
        self._is_grouped = is_grouped
        self._numbers: dict[object, int] = {}
        self._queries = 0
        self._last: object = object()  # no query

    @property
    def last(self) -> int:
        """The number of the last query, if the rows are grouped."""
        return self._queries - 1

    def of(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """The number of each row's query."""
        column = undictionary(table[self._group].combine_chunks())
        encoded = pc.dictionary_encode(column, null_encoding="encode")
        known = np.array([self._number(value) for value in encoded.dictionary.to_pylist()], np.int64)
        numbers: npt.NDArray[np.int64] = known[encoded.indices.to_numpy()]
        return numbers

    def _number(self, value: object) -> int:
        if self._is_grouped:  # of grouped rows, only the first value can be of a known query
            if value != self._last:
                self._last, self._queries = value, self._queries + 1
            return self._queries - 1
        return self._numbers.setdefault(value, len(self._numbers))


class Repeats:
    """Finds two rows with the same ids; needs 8 bytes of memory for each row, and 24 while comparing."""

    def __init__(self, query: str, passage: str) -> None:
        self._names = (query, passage)
        self._keys: list[npt.NDArray[np.int64]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in rows, in order."""
        self._keys.append(np.fromiter(map(hash, self._ids(batch)), np.int64, len(batch)))

    def first(self, again: Callable[[], Iterable[pa.RecordBatch]]) -> Ids | None:
        """The query and passage of the first row that repeats another row's ids; `again` reads all rows once
        more.
        """
        keys = np.concatenate(self._keys) if self._keys else np.zeros(0, np.int64)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        if not len(same):
            return None
        seconds = np.sort(order[same + 1])[:_LOOKED_AT]
        wanted = np.flatnonzero(np.isin(keys[: seconds[-1] + 1], keys[seconds]))
        seen: set[Ids] = set()
        start = 0
        for batch in again():
            here = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + len(batch))]
            for ids in self._ids(batch.take(pa.array(here - start))):
                if ids in seen:
                    return ids
                seen.add(ids)
            start += len(batch)
        return None

    def _ids(self, batch: pa.RecordBatch) -> Iterator[Ids]:
        columns = [undictionary(batch[name]).cast(pa.string()).to_pylist() for name in self._names]
        return zip(*columns, strict=True)


def best_first(
    numbers: npt.NDArray[np.int64], scores: npt.NDArray[np.floating[Any]], ids: pa.Array | None
) -> npt.NDArray[np.int64]:
    """The rows of each query in order of their scores, best first; those without a score come last.

    Of equal scores, the passage with the larger id comes first, as in trec_eval; without `ids`, rows with
    equal scores stay in order. `numbers` are the numbers of the rows' queries, and rows are sorted by them.
    """
    order: npt.NDArray[np.int64] = np.lexsort((-scores, numbers))
    is_tied = (np.diff(numbers[order]) == 0) & (np.diff(scores[order]) == 0)  # with the row behind it
    if ids is not None and is_tied.any():
        places = np.flatnonzero(np.r_[is_tied, False] | np.r_[False, is_tied])
        rows = order[places]
        by_id = pc.rank(ids.take(pa.array(rows)), sort_keys="descending", tiebreaker="dense").to_numpy()
        order[places] = rows[np.lexsort((by_id, -scores[rows], numbers[rows]))]
    return order


class Ranking:
    """Ranks rows. Rows without a score are left out; equal scores are ranked as by `best_first`.

    Parameters
    ----------
    folder
        Folder for sorted parts.
    group, score, rank
        Names of the column that tells queries apart, of the column of scores, and of the column to add.
    top_k
        Rows to keep of each query; ``None`` keeps all.
    passage
        Name of the column with the passages' ids, if there is one.
    is_grouped
        Whether the rows of every query follow each other.
    """

    def __init__(
        self,
        folder: Path,
        group: str,
        score: str,
        rank: str,
        top_k: int | None,
        passage: str | None,
        *,
        is_grouped: bool,
    ) -> None:
        self._folder = folder
        self._queries = QueryNumbers(group, is_grouped=is_grouped)
        self._score = score
        self._rank = rank
        self._top_k = top_k
        self._passage = passage
        self._is_grouped = is_grouped
        self._rows: list[pa.Table] = []
        self._held_rows = self._held_bytes = 0
        self._parts: list[Path] = []

    def add(self, table: pa.Table) -> Iterator[pa.Table]:
        """Take in rows; yield ranked rows of complete queries."""
        table = table.append_column(_NUMBER, pa.array(self._queries.of(table)))
        table = table.filter(pc.is_finite(table[self._score]))
        self._rows.append(table)
        self._held_rows += len(table)
        self._held_bytes += table.nbytes
        if self._held_rows < _BUFFER_ROWS and self._held_bytes < _BUFFER_BYTES:
            return
        if not self._is_grouped:
            self._spill()
            return
        rows = pa.concat_tables(self._rows)
        open_rows = pc.equal(rows[_NUMBER], self._queries.last)
        yield self._ranked(rows.filter(pc.invert(open_rows)))
        rest = self._best(rows.filter(open_rows))  # bounded if only the best rows are kept
        self._rows, self._held_rows, self._held_bytes = [rest], len(rest), rest.nbytes

    def finish(self) -> Iterator[pa.Table]:
        """Yield the ranked rows of the remaining queries."""
        if self._parts:
            self._spill()
            yield from map(self._ranked, self._merged())
        elif self._rows:
            yield self._ranked(pa.concat_tables(self._rows))
        self._rows = []

    def _best(self, table: pa.Table) -> pa.Table:
        """The rows to keep, sorted by query and score."""
        numbers = table[_NUMBER].to_numpy()
        scores = table[self._score].to_numpy().astype(np.float32)
        ids = undictionary(table[self._passage].combine_chunks()).cast(pa.string()) if self._passage else None
        order = best_first(numbers, scores, ids)
        if self._top_k is not None:
            order = order[_places(numbers[order]) <= self._top_k]
        return table.take(order)

    def _ranked(self, table: pa.Table) -> pa.Table:
        best = self._best(table)
        ranks = pa.array(_places(best[_NUMBER].to_numpy()), pa.int32())
        return best.drop_columns(_NUMBER).append_column(self._rank, ranks)

    def _spill(self) -> None:
        """Write the held rows as a sorted part."""
        rows = self._best(pa.concat_tables(self._rows)) if self._rows else None
        self._rows, self._held_rows, self._held_bytes = [], 0, 0
        if rows is None:
            return
        path = self._folder / f"sorted-{len(self._parts)}.arrow"
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(path, rows.schema, options=options) as writer:
            writer.write_table(rows.combine_chunks().unify_dictionaries(), max_chunksize=_BATCH_ROWS)
        self._parts.append(path)

    def _merged(self) -> Iterator[pa.Table]:
        """Merge the sorted parts; yield tables of whole queries."""
        parts = [_SortedPart(path) for path in self._parts]
        while parts := [part for part in parts if part.fill()]:
            ends = [part.last for part in parts if not part.is_exhausted]
            end = min(ends, default=None)
            taken = [part.take(end) for part in parts]
            rows = pa.concat_tables(taken)
            if len(rows):
                yield rows
            else:  # the rows of the next query are not all loaded
                for part in parts:
                    if not part.is_exhausted and part.last == end:
                        part.load()

    def close(self) -> None:
        """Delete the sorted parts."""
        for path in self._parts:
            discard(path)


class _SortedPart:
    """A sorted part that is read from its beginning; ``last`` is the last query that is loaded."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        self._next = 0
        self._loaded: pa.Table = self._reader.schema.empty_table()

    @property
    def is_exhausted(self) -> bool:
        """Whether everything is loaded."""
        return self._next >= int(self._reader.num_record_batches)

    @property
    def last(self) -> int:
        return int(self._loaded[_NUMBER][-1].as_py())

    def fill(self) -> bool:
        """Load rows if none are loaded; return whether any rows are left."""
        while not len(self._loaded) and not self.is_exhausted:
            self.load()
        return len(self._loaded) > 0

    def load(self) -> None:
        """Load one batch more."""
        batch = self._reader.get_batch(self._next)
        self._loaded = pa.concat_tables([self._loaded, pa.Table.from_batches([batch])])
        self._next += 1

    def take(self, end: int | None) -> pa.Table:
        """Remove and return the loaded rows of the queries before number `end`; with ``None``, all loaded
        rows.
        """
        numbers = self._loaded[_NUMBER].to_numpy()
        size = len(numbers) if end is None else int(np.searchsorted(numbers, end))
        taken, self._loaded = self._loaded.slice(0, size), self._loaded.slice(size)
        return taken


def _places(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The place (from 1) of each row within its query; rows must be sorted by query."""
    starts = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]]) if len(numbers) else np.array([], int)
    sizes = np.diff(np.r_[starts, len(numbers)])
    return np.arange(len(numbers)) - np.repeat(starts, sizes) + 1


def starts_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """The first row of each run of equal values."""
    encoded = pc.dictionary_encode(undictionary(column), null_encoding="encode")
    return np.flatnonzero(np.diff(encoded.indices.to_numpy().astype(np.int64), prepend=-1))
