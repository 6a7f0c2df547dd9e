"""Adds the mean of several models as a column: the mean of their ranks, or of their standardized scores.

Both are computed within each query. Rows stay in the input's order. If the rows of each query follow each
other, they are passed on as soon as the next query begins; otherwise they wait on disk for the last row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.producer.files.ranking import QueryNumbers
from rankmill.producer.files.stores.writing import discard

if TYPE_CHECKING:
    import pandas as pd
    from pandas.core.groupby import DataFrameGroupBy

Mean = Literal["ranks", "scores"]

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MeanColumn:
    """The column with the mean of several models' scores, or of the ranks that the models give."""

    name: str
    of: Mean


class MeanScores:
    """Adds the column of means to tables.

    Parameters
    ----------
    folder
        Folder for the rows that wait.
    group, scores
        Names of the column that tells queries apart, and of the columns of scores.
    mean
        The column to add. Rank 1 is the best; equal scores share the mean of their ranks.
    is_grouped
        Whether the rows of every query follow each other.
    """

    def __init__(
        self, folder: Path, group: str, scores: Sequence[str], mean: MeanColumn, *, is_grouped: bool
    ) -> None:
        self._path = folder / "means.arrow"
        self._names, self._name = list(scores), mean.name
        self._of = mean.of
        self._is_grouped = is_grouped
        self._queries = QueryNumbers(group, is_grouped=is_grouped)
        self._rows: list[pa.Table] = []
        self._numbers: list[Numbers] = []
        self._scores: list[Floats] = []
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, table: pa.Table) -> Iterator[pa.Table]:
        """Take in rows; yield rows of complete queries."""
        numbers = self._queries.of(table)
        self._numbers.append(numbers)
        self._scores.append(np.stack([table[name].to_numpy() for name in self._names], axis=1))
        if not self._is_grouped:
            self._spill(table)
            return
        self._rows.append(table)
        if len(table) and numbers[-1] != self._numbers[0][0]:
            yield self._complete(int(numbers[-1]))

    def finish(self) -> Iterator[pa.Table]:
        """Yield the remaining rows."""
        if self._writer is None:
            if self._rows:
                yield self._complete(None)
            return
        self._writer.close()
        means = self._mean(np.concatenate(self._numbers), np.concatenate(self._scores))
        start = 0
        with pa.ipc.open_stream(pa.memory_map(str(self._path))) as spilled:
            for batch in spilled:
                table = pa.Table.from_batches([batch])
                yield self._with_means(table, means[start : start + len(table)])
                start += len(table)

    def close(self) -> None:
        """Delete the rows that wait."""
        if self._writer is not None:
            self._writer.close()
        discard(self._path)

    def _spill(self, table: pa.Table) -> None:
        if self._writer is None:
            options = pa.ipc.IpcWriteOptions(
                compression="lz4"
            )  # a stream: tables have dictionaries of their own
            self._writer = pa.ipc.new_stream(self._path, table.schema, options=options)
        self._writer.write_table(table.combine_chunks())

    def _complete(self, open_query: int | None) -> pa.Table:
        """Remove and return the rows of the queries before the one that may go on; ``None``: all rows."""
        rows, numbers = pa.concat_tables(self._rows), np.concatenate(self._numbers)
        scores = np.concatenate(self._scores)
        done = len(rows) if open_query is None else int(np.searchsorted(numbers, open_query))
        self._rows, self._numbers, self._scores = [rows.slice(done)], [numbers[done:]], [scores[done:]]
        return self._with_means(rows.slice(0, done), self._mean(numbers[:done], scores[:done]))

    def _with_means(self, rows: pa.Table, means: Floats) -> pa.Table:
        column = pa.array(means.astype(np.float32), mask=np.isnan(means))
        return rows.append_column(pa.field(self._name, pa.float32()), column)

    def _mean(self, numbers: Numbers, scores: Floats) -> Floats:
        """The mean of each row; NaN for a row that lacks a score, which does not affect other rows."""
        import pandas as pd  # slow to import

        means = np.full(len(numbers), np.nan)
        whole = np.isfinite(scores).all(axis=1)
        if whole.any():
            by_query = pd.DataFrame(scores[whole].astype(np.float64)).groupby(numbers[whole])
            means[whole] = (_ranks if self._of == "ranks" else _standardized)(by_query).mean(axis=1)
        return means


def _ranks(by_query: DataFrameGroupBy[Any, Any]) -> pd.DataFrame:
    """Ranks within the queries, from 1 for the highest score; equal scores share the mean of their ranks."""
    return by_query.rank(ascending=False)


def _standardized(by_query: DataFrameGroupBy[Any, Any]) -> pd.DataFrame:
    """Each score less the query's mean, in units of its standard deviation; 0 if a query's scores are all
    equal.
    """
    differ = by_query.transform("max") > by_query.transform("min")
    off = by_query.obj - by_query.transform("mean")
    return (off / by_query.transform("std", ddof=0)).where(differ, 0.0)
