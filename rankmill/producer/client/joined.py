"""Several runs that are read as one: of several models over the same pairs, or of an alias' versions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import tee
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.run import Progress
from rankmill.producer.client.runs import RunStats, ScoringRun, as_array
from rankmill.producer.collect.earlier import no_earlier
from rankmill.producer.collect.pairs import OpenTables, RowsAt
from rankmill.producer.collect.scored import ScoredTable, joined_tokens

if TYPE_CHECKING:
    from rankmill.producer.collect.journal import Journal

RowNumbers = npt.NDArray[np.int64]


class JoinedRuns(ScoringRun):
    """Several runs that are read as one.

    Parameters
    ----------
    runs
        The runs.
    tables
        Joins their tables; each has the tables that it was made of as its parts.
    progress
        Joins their progress.
    """

    def __init__(
        self,
        runs: Sequence[ScoringRun],
        tables: Callable[[], Iterator[ScoredTable]],
        progress: Callable[[Sequence[Progress]], Progress],
    ) -> None:
        self._runs, self._join, self._join_progress = runs, tables, progress
        self._scores, self._all = [], None
        self.errors = {}
        self.stats = RunStats()
        self.labels = ()
        self.found = []

    @property
    def id(self) -> str:
        """The ids of the runs."""
        return ",".join(run.id for run in self._runs)

    @property
    def model(self) -> str:
        """The models that score."""
        return ",".join(run.model for run in self._runs)

    @property
    def is_detached(self) -> bool:
        """False."""
        return False

    @property
    def rows(self) -> int | None:
        """The number of all their pairs."""
        return sum(run.rows or 0 for run in self._runs)  # each has a table

    @property
    def progress(self) -> Progress:
        """The progress of all runs."""
        return self._join_progress([run.progress for run in self._runs])

    @property
    def scoring_since(self) -> float:
        """When a worker began to score the first of them."""
        return min(run.scoring_since for run in self._runs)

    def cancel(self) -> None:
        """Cancel all of them."""
        for run in self._runs:
            run.cancel()

    def _tables(self) -> Iterator[ScoredTable]:
        return self._join()

    def _wait_until(self, deadline: float) -> None:
        for run in self._runs:
            run._wait_until(deadline)

    @property
    def _seen(self) -> Progress:
        return self._join_progress([run._seen for run in self._runs])

    @contextmanager
    def _looking(self, look: Callable[[], None]) -> Iterator[None]:
        with ExitStack() as stack:
            for run in self._runs:
                stack.enter_context(run._looking(look))
            yield


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
        tables = cut(self._rows_at)
        self.opened = OpenTables(tables, tables)
        self._readers = list(tee(self.opened, len(journals)))
        self._open = len(journals)

    def reader(self, rows_at: RowsAt) -> OpenTables:
        """The tables for one more reader, which asks for chunks of so many rows."""
        self._sizes.append(rows_at)
        return OpenTables(self._readers.pop(), self)

    def close(self) -> None:
        """Close the tables with the last reader."""
        self._open -= 1
        if not self._open:
            self.opened.close()

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
        tables.opened.close()
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


def version_of(name: str, versions: Mapping[str, float], query: str | None) -> str:
    """The version of model `name` that scores a query: always the same, as long as the shares are.

    The first version keeps its queries as its share grows, and so does the last.
    """
    text = f"{name}\0{query or ''}".encode(errors="replace")
    at = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    for version, share in versions.items():
        at -= share
        if at < 0:
            return version
    return list(versions)[-1]  # the shares add up to a little less than 1


def rows_by_version(
    name: str, versions: Mapping[str, float], queries: Iterable[str | None]
) -> dict[str, RowNumbers]:
    """Row numbers by the version that scores them."""
    known: dict[str | None, str] = {}
    found: dict[str, list[int]] = {}
    for row, query in enumerate(queries):
        if query not in known:
            known[query] = version_of(name, versions, query)
        found.setdefault(known[query], []).append(row)
    return {version: np.array(rows, np.int64) for version, rows in found.items()}


def split_run(table: pa.Table, rows: Sequence[RowNumbers], runs: Sequence[ScoringRun]) -> ScoringRun:
    """Runs that score some rows of `table` each, read as one; its scores are there when all of them are."""
    read: list[list[ScoredTable]] = [[] for _ in runs]

    def tables() -> Iterator[ScoredTable]:
        for run, found in zip(runs, read, strict=True):
            for part in run.tables():
                found.append(part)  # to be there if the wait ends, and is taken up again
        parts = [part for found in read for part in found]
        read[:] = [[] for _ in runs]
        if not parts:
            return
        kinds = [part.scores.type for part in parts]
        kind = next((kind for kind in kinds if pa.types.is_fixed_size_list(kind)), pa.float32())
        scores = [
            part.scores if part.scores.type == kind else pa.nulls(len(part.scores), kind) for part in parts
        ]
        order = pa.array(np.argsort(np.concatenate(rows)))
        tokens = joined_tokens(parts)
        yield ScoredTable(
            table=table,
            scores=pa.concat_arrays(scores).take(order),
            errors=pa.concat_arrays([part.errors for part in parts]).take(order),
            stats=None,
            attempts=max(part.attempts for part in parts),
            worker="",
            parts=tuple(parts),
            tokens=None if tokens is None else tokens.take(order),
        )

    return JoinedRuns(runs, tables, lambda each: Progress(rows=sum(one.rows for one in each)))
