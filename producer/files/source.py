"""The input: one or many files as one stream of tables, checked before scoring begins."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rankmill.jobs.contract.errors import InputChanged, InputError
from rankmill.jobs.contract.wire import is_text
from rankmill.producer.collect.pairs import RowsAt, cut_tables
from rankmill.producer.collect.splitting import ScoredTable
from rankmill.producer.files.formats.base import Reader, ReadOptions, Survey, TextColumns, text_of
from rankmill.producer.files.formats.table import open_reader
from rankmill.producer.files.inputs import InputFile
from rankmill.producer.files.manifest import fingerprint
from rankmill.producer.files.schema import conform, to_ask_for, unify, with_partition

_BATCH_ROWS = 1024
"""Rows that are read at once, about; more would read faster, and take more memory where texts are long."""

_SELECT_ROWS = 65_536

_AHEAD_BYTES = 16 << 20
_AHEAD_BATCHES = 64
"""Most bytes and batches that are read before they are asked for; one batch always is."""


Shard = tuple[int, int]
"""The number of a shard (from 1), and the number of shards."""


def shard_range(rows: int, shard: Shard | None) -> tuple[int, int]:
    """The first row of a shard, and the row after its last, of `rows` rows; all rows without a shard."""
    number, shards = shard or (1, 1)
    return rows * (number - 1) // shards, rows * number // shards


def cut_range(batches: Iterator[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows from `start` to before `stop`; nothing after them is read."""
    row = 0
    while row < stop and (batch := next(batches, None)) is not None:
        first, last = max(start - row, 0), min(stop - row, len(batch))
        if first < last:
            yield batch.slice(first, last - first)
        row += len(batch)


class PairSource(Protocol):
    """An input: pairs in order, checked before scoring begins."""

    @property
    def columns(self) -> TextColumns:
        """Names of the columns with the texts."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The columns of every table."""
        ...

    @property
    def rows(self) -> int:
        """Number of pairs."""
        ...

    def tables(self, rows_at: RowsAt, start: int = 0) -> Iterator[pa.Table]:
        """Yield the pairs from row `start` on, in order, as a table for each chunk."""
        ...

    def select(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of all pairs in order."""
        ...

    def check_unchanged(self) -> None:
        """Raise `InputChanged` if a file has changed since the source was opened."""
        ...

    def explain(self, part: ScoredTable) -> ScoredTable:
        """Say more in the errors of rows, where the source knows more than a worker."""
        ...


@dataclass(frozen=True)
class Source:
    """Checked input files in order, with ``rows`` rows in all and one schema."""

    files: tuple[InputFile, ...]
    fingerprints: tuple[str, ...]
    surveys: tuple[Survey, ...]
    columns: TextColumns
    schema: pa.Schema
    readers: tuple[Reader, ...]
    limit: int | None = None
    shard: Shard | None = None

    @property
    def rows(self) -> int:
        """Number of rows: those of all files, at most `limit`, and of them the shard's."""
        start, stop = self._range
        return stop - start

    @property
    def _range(self) -> tuple[int, int]:
        rows = sum(survey.rows for survey in self.surveys)
        return shard_range(rows if self.limit is None else min(rows, self.limit), self.shard)

    def tables(self, rows_at: RowsAt, start: int = 0) -> Iterator[pa.Table]:
        """Yield the rows from `start` on, in order, as a table for each chunk; files before it are not read.

        Raises
        ------
        InputChanged
            A file has changed since the source was opened.
        InputError
            A file is damaged in a way that `open_source` could not find.
        """
        return cut_batches(self._batches(_BATCH_ROWS, start=start), self.schema, self.columns, rows_at, start)

    def select(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of all rows in order; Parquet files are read only in part."""
        wanted = list(names)
        for batch in self._batches(_SELECT_ROWS, wanted):
            yield batch.select(wanted)

    def check_unchanged(self) -> None:
        """Raise `InputChanged` if a file has changed since the source was opened."""
        for file, before in zip(self.files, self.fingerprints, strict=True):
            check_file_unchanged(file.path, before)

    def explain(self, part: ScoredTable) -> ScoredTable:
        """See `PairSource.explain`."""
        return part

    def _batches(
        self, rows: int, names: Sequence[str] | None = None, start: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the limit and the shard, from row `start` of them on."""
        first, stop = self._range
        first += start
        whole = self.limit is None and self.shard is None and not start
        if whole:
            yield from self._all_batches(rows, names, 0)
            return
        ends = list(accumulate((survey.rows for survey in self.surveys), initial=0))
        files = max(bisect_right(ends, first) - 1, 0)
        yield from cut_range(self._all_batches(rows, names, files), first - ends[files], stop - ends[files])

    def _all_batches(self, rows: int, names: Sequence[str] | None, skipped: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all files but the first `skipped` ones."""
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        every = zip(self.files, self.fingerprints, self.surveys, self.readers, strict=True)
        for file, before, survey, reader in islice(every, skipped, None):
            found = 0
            try:
                for batch in reader.batches(to_ask_for(survey, schema), rows):
                    found += batch.num_rows
                    self._check_texts(file.path, batch, found)
                    yield conform(batch, schema, file)
            except (InputError, pa.ArrowException) as error:
                check_file_unchanged(file.path, before)
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{file.path}: {text_of(error)}") from None
            check_file_unchanged(file.path, before)
            if found != survey.rows:
                raise _changed(file.path, f"{survey.rows:,} rows", f"{found:,} rows")

    def _check_texts(self, path: Path, batch: pa.RecordBatch, rows: int) -> None:
        for name in self.columns.names:
            try:
                if name in batch.schema.names:
                    batch[name].validate(full=True)
            except pa.ArrowInvalid:
                raise InputError(
                    f"{path}: column {name!r} is not valid UTF-8 in one of the rows "
                    f"{rows - len(batch)} to {rows - 1} (counted from 0)"
                ) from None


def _read_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield `batches`, which a thread reads before they are asked for; Arrow decodes without Python's lock.

    An exception comes when the batch is asked for whose reading has raised it.
    """
    thread = ThreadPoolExecutor(1, "rankmill-ahead")
    pending: deque[Future[pa.RecordBatch | None]] = deque([thread.submit(next, batches, None)])
    try:
        while (batch := pending.popleft().result()) is not None:
            most = min(_AHEAD_BYTES // max(batch.nbytes, 1), _AHEAD_BATCHES)
            while len(pending) < max(most, 1):
                pending.append(thread.submit(next, batches, None))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)


def cut_batches(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    columns: TextColumns,
    rows_at: RowsAt,
    start: int = 0,
) -> Iterator[pa.Table]:
    """Yield the rows of `batches`, the first of which is row `start`, as a table for each chunk."""
    tables = (pa.Table.from_batches([batch], schema) for batch in _read_ahead(batches))
    return cut_tables(tables, columns.names, rows_at, start)


def open_source(
    files: Sequence[InputFile],
    columns: TextColumns,
    *,
    allow_nulls: bool,
    as_text: Collection[str] = (),
    fingerprints: Sequence[str] | None = None,
    options: ReadOptions | None = None,
    limit: int | None = None,
    shard: Shard | None = None,
) -> Source:
    """Survey all files and check that they can be scored.

    Parameters
    ----------
    files
        From `rankmill.producer.files.inputs.find_files`.
    columns
        Names of the query and passage columns.
    allow_nulls
        Whether rows with a null query or passage are accepted (they become row errors).
    as_text
        Columns to read as text, whatever their values look like.
    fingerprints
        The expected `fingerprint` of each file; default: the current ones.
    options
        How to read the files.
    limit
        Most rows to read; default: all.
    shard
        The part of these rows to read; default: all.

    Raises
    ------
    InputError
        A file cannot be scored; the message names the file, column and row, and how to fix it.
    """
    before = fingerprints or [fingerprint(file.path) for file in files]
    surveys, readers = [], []
    for file in files:
        reader = open_reader(file.path, columns.names, options)
        readers.append(reader)
        found = reader.survey(find_nulls=not allow_nulls)
        survey = with_partition(file, found)
        surveys.append(survey)
        if found.schema.names or found.rows:
            _check_columns(file.path, survey.schema, columns)
        within = limit is None or (survey.first_null or 0) + sum(each.rows for each in surveys[:-1]) < limit
        if survey.first_null is not None and not allow_nulls and within:
            raise InputError(
                f"{file.path}: row {survey.first_null} (counted from 0) has a null query or passage; "
                "remove it, or leave out --on-null fail to have it reported as a row error"
            )
    schema = unify(files, surveys, columns.names, as_text)
    return Source(tuple(files), tuple(before), tuple(surveys), columns, schema, tuple(readers), limit, shard)


def check_file_unchanged(path: Path, before: str) -> None:
    """Raise `InputChanged` if the file's fingerprint is no longer `before`."""
    try:
        now = fingerprint(path)
    except InputError:
        now = "not there"
    if now != before:
        raise _changed(path, before, now)


def _changed(path: Path, before: str, now: str) -> InputChanged:
    return InputChanged(
        f"{path} has changed while it was read (it was {before} and is {now}); no output was written. "
        "When nothing writes to it any more, give the same command again: it starts over"
    )


def _check_columns(path: Path, schema: pa.Schema, columns: TextColumns) -> None:
    twice = {name for name, number in Counter(schema.names).items() if number > 1}
    if twice:
        raise InputError(f"{path}: two columns are named {min(twice)!r}; rename one")
    for option, name in zip(("--query-column", "--passage-column"), columns.names, strict=True):
        if name not in schema.names:
            raise InputError(
                f"{path}: no column {name!r}; it has {', '.join(map(repr, schema.names)) or 'none'} "
                f"(choose with {option})"
            )
        kind = schema.field(name).type
        if not is_text(kind):
            way_out = f"choose another with {option}"
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                way_out = f"--list-columns {name} makes a row of each item"
            raise InputError(f"{path}: column {name!r} holds {kind}, not text ({way_out})")
