"""The input: one or many files as one stream of tables, checked before scoring begins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from jobs.errors import InputChanged, InputError
from jobs.wire import is_text
from producer.files.inputs import InputFile
from producer.files.manifest import fingerprint
from producer.files.readers import Reader, Survey, TextColumns
from producer.files.readers.delimited import DelimitedReader
from producer.files.readers.jsonl import JsonlReader
from producer.files.readers.parquet import ParquetReader
from producer.files.schema import conform, to_ask_for, unify, with_partition
from producer.pairs import RowsAt, cut_tables

_READERS: dict[str, Reader] = {
    ".parquet": ParquetReader(),
    ".csv": DelimitedReader(","),
    ".tsv": DelimitedReader("\t"),
    ".jsonl": JsonlReader(),
    ".ndjson": JsonlReader(),
}

_BATCH_ROWS = 1024
"""Rows that are read at once, about."""


@dataclass(frozen=True)
class Source:
    """Checked input files in order, with ``rows`` rows in all and one schema."""

    files: tuple[InputFile, ...]
    fingerprints: tuple[str, ...]
    surveys: tuple[Survey, ...]
    columns: TextColumns
    schema: pa.Schema

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(survey.rows for survey in self.surveys)

    def tables(self, rows_at: RowsAt) -> Iterator[pa.Table]:
        """Yield all rows in order, as a table for each chunk.

        Raises
        ------
        InputChanged
            A file has changed since the source was opened.
        InputError
            A file is damaged in a way that `open_source` could not find.
        """
        batches = self._batches(_BATCH_ROWS)
        tables = (pa.Table.from_batches([batch], self.schema) for batch in batches)
        return cut_tables(tables, self.columns.names, rows_at)

    def check_unchanged(self) -> None:
        """Raise `InputChanged` if a file has changed since the source was opened."""
        for file, before in zip(self.files, self.fingerprints, strict=True):
            _check_unchanged(file.path, before)

    def _batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        for file, before, survey in zip(self.files, self.fingerprints, self.surveys, strict=True):
            found = 0
            asked = to_ask_for(survey, self.schema)
            try:
                for batch in _READERS[file.kind].batches(file.path, asked, rows):
                    found += batch.num_rows
                    self._check_texts(file.path, batch, found)
                    yield conform(batch, self.schema, file)
            except (InputError, pa.ArrowException) as error:
                _check_unchanged(file.path, before)
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{file.path}: {' '.join(str(error).split())}") from None
            _check_unchanged(file.path, before)
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


def open_source(
    files: Sequence[InputFile],
    columns: TextColumns,
    *,
    allow_nulls: bool,
    as_text: Collection[str] = (),
    fingerprints: Sequence[str] | None = None,
) -> Source:
    """Survey all files and check that they can be scored.

    Parameters
    ----------
    files
        From `producer.files.inputs.find_files`.
    columns
        Names of the query and passage columns.
    allow_nulls
        Whether rows with a null query or passage are accepted (they become row errors).
    as_text
        Columns to read as text, whatever their values look like.
    fingerprints
        The expected `fingerprint` of each file; default: the current ones.

    Raises
    ------
    InputError
        A file cannot be scored; the message names the file, column and row, and how to fix it.
    """
    before = fingerprints or [fingerprint(file.path) for file in files]
    surveys = []
    for file in files:
        found = _READERS[file.kind].survey(file.path, columns, find_nulls=not allow_nulls)
        survey = with_partition(file, found)
        surveys.append(survey)
        if found.schema.names or found.rows:
            _check_columns(file.path, survey.schema, columns)
        if survey.first_null is not None and not allow_nulls:
            raise InputError(
                f"{file.path}: row {survey.first_null} (counted from 0) has a null query or passage; "
                "remove it, or leave out --on-null fail to have it reported as a row error"
            )
    schema = unify(files, surveys, columns.names, as_text)
    return Source(tuple(files), tuple(before), tuple(surveys), columns, schema)


def _check_unchanged(path: Path, before: str) -> None:
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
    twice = {name for name in schema.names if schema.names.count(name) > 1}
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
            raise InputError(f"{path}: column {name!r} holds {kind}, not text (choose another with {option})")
