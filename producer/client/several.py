"""Runs of several models over the same pairs, which are read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import tee
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankmill.jobs.contract.run import Progress
from rankmill.producer.client.runs import JoinedRuns, ScoringRun, as_array
from rankmill.producer.collect.earlier import no_earlier
from rankmill.producer.collect.pairs import RowsAt
from rankmill.producer.collect.scored import ScoredTable

if TYPE_CHECKING:
    from rankmill.producer.collect.journal import Journal


class SharedTables:
    """The tables of a run, cut once and handed to several readers.

    Parameters
    ----------
    cut
        As of `Client.start`.
    journals
        Those of the readers; chunks whose result is in one of them are cut as they were.
    """

    def __init__(
        self, cut: Callable[[RowsAt], Iterator[pa.Table]], journals: Sequence[Journal | None]
    ) -> None:
        self._journals = [journal for journal in journals if journal]
        self._sizes: list[RowsAt] = []
        self._readers = list(tee(cut(self._rows_at), len(journals)))

    def reader(self, rows_at: RowsAt) -> Iterator[pa.Table]:
        """The tables for one more reader, which asks for chunks of so many rows."""
        self._sizes.append(rows_at)
        return self._readers.pop()

    def _rows_at(self, start: int) -> int:
        known = [found for journal in self._journals if (found := journal.next_cut(start))]
        if whole := [rows for first, rows in known if first == start]:
            return max(whole)
        return min([*(rows_at(start) for rows_at in self._sizes), *(first - start for first, _ in known)])


def start_each(
    start: Callable[..., ScoringRun],
    models: Sequence[str],
    cut: Callable[[RowsAt], Iterator[pa.Table]],
    columns: tuple[str, ...],
    *,
    journals: Sequence[Journal | None] | None = None,
    revisions: Sequence[str | None] | None = None,
    apart: bool = False,
    **options: Any,
) -> list[ScoringRun]:
    """Start a run of each model over the same tables; they share one window.

    Parameters
    ----------
    start
        `Client.start`.
    models, journals, revisions
        The models, and for each its journal and its commit.
    apart
        Whether each run scores one of the columns, as of a pair of conversations.
    cut, columns, options
        As of `Client.start`.
    """
    journals = journals or [None] * len(models)
    revisions = revisions or [None] * len(models)
    tables = SharedTables(cut, journals)
    runs: list[ScoringRun] = []
    try:
        for place, (model, journal, revision) in enumerate(zip(models, journals, revisions, strict=True)):
            own: dict[str, Any] = {"model": model, "revision": revision, "journal": journal}
            mine = columns[place : place + 1] if apart else columns
            if apart:
                own["reuse"] = no_earlier(mine)
            runs.append(start(tables.reader, mine, sharers=len(models), **{**options, **own}))
    except BaseException:
        for run in runs:
            run.cancel()
        raise
    return runs


def start_several(
    start: Callable[..., ScoringRun],
    models: Sequence[str],
    cut: Callable[[RowsAt], Iterator[pa.Table]],
    columns: tuple[str, ...],
    **options: Any,
) -> ScoringRun:
    """As `start_each`, read as one run: each row has a list with a score of each model, or column."""
    runs = start_each(start, models, cut, columns, **options)
    names = [column.lstrip("\0") for column in columns] if options.get("apart") else models

    def tables() -> Iterator[ScoredTable]:
        for parts in zip(*(run.tables() for run in runs), strict=True):
            yield _together(names, parts)

    return JoinedRuns(runs, tables, _mean_progress)


def _mean_progress(each: Sequence[Progress]) -> Progress:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return Progress(
        rows=int(mean([one.rows for one in each])),
        row_errors=max(one.row_errors for one in each),
        since=mean([one.since for one in each]),
        since_rows=int(mean([one.since_rows for one in each])),
        at=mean([one.at for one in each]),
    )


def _together(models: Sequence[str], parts: Sequence[ScoredTable]) -> ScoredTable:
    """The rows of a chunk with the scores of all models, null for a model that has none."""
    numbers = np.stack([as_array(part.scores) for part in parts], axis=1)
    flat = pa.array(numbers.ravel(), mask=np.isnan(numbers).ravel())
    workers = dict.fromkeys(part.worker for part in parts if part.worker)
    return ScoredTable(
        table=parts[0].table,
        scores=pa.FixedSizeListArray.from_arrays(flat, len(parts)),
        errors=_reasons(models, [part.errors for part in parts]),
        stats=None,
        attempts=max(part.attempts for part in parts),
        worker=", ".join(workers),
        parts=tuple(parts),
    )


def _reasons(models: Sequence[str], errors: Sequence[pa.Array]) -> pa.Array:
    """Why a row lacks a score: the model and its reason, or the reason alone if all have the same."""
    if all(column.null_count == len(column) for column in errors):
        return errors[0]
    rows = []
    for row in zip(*(column.to_pylist() for column in errors), strict=True):
        if len(set(row)) == 1:
            rows.append(row[0])
        else:
            named = zip(models, row, strict=True)
            rows.append("; ".join(f"{model}: {reason}" for model, reason in named if reason is not None))
    return pa.array(rows, pa.string())
