"""Reads several runs as one: those of several models over the same pairs, or of the versions of an alias."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import tee
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.shown import natural_order
from rankmill.producer.client.runs import Join, ScoringRun, as_array, joined
from rankmill.producer.collect.pairs import OpenTables
from rankmill.producer.collect.scored import ScoredTable, joined_scores, joined_tokens, no_earlier
from rankmill.producer.collect.sizing import Sizing

RowNumbers = npt.NDArray[np.int64]


def start_each(
    start: Callable[..., ScoringRun],
    models: Sequence[Mapping[str, Any]],
    tables: Iterator[pa.Table],
    columns: tuple[str, ...],
    sizing: Sizing,
    *,
    apart: bool = False,
    **options: Any,
) -> list[ScoringRun]:
    """Start one run for each model, over the same tables. The window, which limits how many chunks may be in
    Redis without a result, is divided equally among the runs.

    Parameters
    ----------
    start
        The function that starts a run, `Client.start`.
    models
        For each run, the options that differ from run to run, such as the model and the journal.
    apart
        Whether each run scores another column. The first run then scores the first column, and so on.
    tables, columns, sizing, options
        Passed to `start`.
    """
    # Closing one of these readers closes `tables`, which all of them read.
    readers = [OpenTables(reader, tables) for reader in tee(tables, len(models))]
    runs: list[ScoringRun] = []
    try:
        for place, own in enumerate(models):
            mine = columns[place : place + 1] if apart else columns
            if apart:
                options["reuse"] = no_earlier(mine)
            runs.append(start(readers[place], mine, sizing, sharers=len(models), **{**options, **own}))
    except BaseException:
        for run in runs:
            run.cancel()
        OpenTables(tables, tables).close()
        raise
    return runs


def start_several(
    start: Callable[..., ScoringRun],
    models: Sequence[Mapping[str, Any]],
    tables: Iterator[pa.Table],
    columns: tuple[str, ...],
    sizing: Sizing,
    **options: Any,
) -> ScoringRun:
    """Start one run for each model, and read all runs as one. Each row gets a list of the models' scores.

    With the option ``apart``, each run scores a different column, so the list has a score for each column.
    The parameters are those of `start_each`.
    """
    runs = start_each(start, models, tables, columns, sizing, **options)
    names = (
        [column.lstrip("\0") for column in columns]
        if options.get("apart")
        else [own["model"] for own in models]
    )

    def together(readers: Sequence[Iterator[ScoredTable]]) -> Iterator[ScoredTable]:
        return (_together(names, parts) for parts in zip(*readers, strict=True))

    def slowest(progresses: Sequence[Progress]) -> Progress:
        errors = max(part.row_errors for part in progresses)
        return min(progresses, key=attrgetter("rows")).model_copy(update={"row_errors": errors})

    return joined(runs, Join(together, slowest, itemgetter(0)))


def _together(models: Sequence[str], parts: Sequence[ScoredTable]) -> ScoredTable:
    """Join the scored tables of one chunk, one table from each model. Each row gets a list of the models'
    scores.

    If a model has no score for a row, the model's place in the row's list is null.
    """
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
    """Return for each row why scores are missing, or null if the row has all scores.

    The text has ``model: reason`` for each model without a score. If all models have the same reason, the
    text is only this reason.
    """
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
    """Choose the version of model `name` that scores `query`. `versions` has the share of each version.

    With the shares ``{"v1": 0.9, "v2": 0.1}``, ``v2`` scores about one query in ten. The same query always
    gets the same version, whatever the order of `versions`.

    If the version whose name is first or last in natural order gets a larger share, it keeps all queries that
    it had before.
    """
    text = f"{name}\0{query or ''}".encode(errors="replace")
    at = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    ordered = sorted(versions, key=natural_order)
    for version in ordered:
        at -= versions[version]
        if at < 0:
            return version
    return ordered[-1]  # because of rounding, the shares may add up to a little less than 1


def rows_by_version(
    name: str, versions: Mapping[str, float], queries: Iterable[str | None]
) -> dict[str, RowNumbers]:
    """Choose a version of model `name` for each query. Returns the row numbers of each version that gets
    rows.
    """
    version_by_query: dict[str | None, str] = {}
    numbers: dict[str, list[int]] = {}
    for row, query in enumerate(queries):
        if query not in version_by_query:
            version_by_query[query] = version_of(name, versions, query)
        numbers.setdefault(version_by_query[query], []).append(row)
    return {version: np.array(rows, np.int64) for version, rows in numbers.items()}


def split_run(table: pa.Table, rows: Sequence[RowNumbers], runs: Sequence[ScoringRun]) -> ScoringRun:
    """Make one run of several `runs`, each of which scores some rows of `table`.

    The joined run yields all scores together, when all of `runs` have ended. It raises `InputError` if the
    models of `runs` have different labels.

    Parameters
    ----------
    table
        The rows of all runs.
    rows
        For each of `runs`, the numbers of the rows that it scores.
    runs
        The runs to join.
    """
    read: list[list[ScoredTable]] = [[] for _ in runs]

    def tables(readers: Sequence[Iterator[ScoredTable]]) -> Iterator[ScoredTable]:
        for mine, kept in zip(readers, read, strict=True):
            for part in mine:
                kept.append(part)  # keep the part for the next call, if a timeout ends this one
        parts = [part for kept in read for part in kept]
        if len({part.stats.labels for part in parts if part.stats}) > 1:
            names = ", ".join(sorted(run.model for run in runs))
            raise InputError(f"the versions {names} have different labels: name one of them as the model")
        read[:] = [[] for _ in runs]
        if not parts:
            return
        order = pa.array(np.argsort(np.concatenate(rows)))
        tokens = joined_tokens(parts)
        yield ScoredTable(
            table=table,
            scores=joined_scores(parts).take(order),
            errors=pa.concat_arrays([part.errors for part in parts]).take(order),
            stats=None,
            attempts=max(part.attempts for part in parts),
            worker="",
            parts=tuple(parts),
            tokens=None if tokens is None else tokens.take(order),
        )

    def progress(progresses: Sequence[Progress]) -> Progress:
        return Progress(
            rows=sum(part.rows for part in progresses),
            row_errors=sum(part.row_errors for part in progresses),
        )

    return joined(runs, Join(tables, progress, lambda _: len(table), rows))
