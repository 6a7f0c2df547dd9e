"""The input: one or many files as one stream of tables, checked before any work."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import InputError
from jobs.wire import is_text
from producer.files.readers import Reader, Survey, TextColumns
from producer.files.readers.delimited import DelimitedReader
from producer.files.readers.jsonl import JsonlReader
from producer.files.readers.parquet import ParquetReader

CHUNK_TEXT_BYTES = 16 << 20
"""Text in a chunk, at most; long passages make chunks of fewer rows."""

_COMPRESSED = (".gz", ".zst")

_READERS: dict[str, Reader] = {
    ".parquet": ParquetReader(),
    ".csv": DelimitedReader(","),
    ".tsv": DelimitedReader("\t"),
    ".jsonl": JsonlReader(),
    ".ndjson": JsonlReader(),
}


@dataclass(frozen=True)
class Source:
    """Files that were found fit to be scored: ``rows`` in all, in this order, with one schema."""

    paths: tuple[Path, ...]
    columns: TextColumns
    schema: pa.Schema
    rows: int

    def tables(self, rows: int) -> Iterator[pa.Table]:
        """All rows in order, in tables of `rows` rows (the last, and those of long texts: fewer)."""
        pending: list[pa.RecordBatch] = []
        waiting = 0
        for batch in self._batches(rows):
            start = 0
            while waiting + batch.num_rows - start >= rows:
                pending.append(batch.slice(start, rows - waiting))
                start += rows - waiting
                yield from self._split(pa.Table.from_batches(pending, self.schema))
                pending, waiting = [], 0
            if start < batch.num_rows:
                pending.append(batch.slice(start))
                waiting += batch.num_rows - start
        if pending:
            yield from self._split(pa.Table.from_batches(pending, self.schema))

    def _batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        for path in self.paths:
            reader = _reader(path)
            for batch in reader.batches(path, self.schema, rows):
                yield _conform(batch, self.schema)

    def _split(self, table: pa.Table) -> Iterator[pa.Table]:
        size = sum(_text_bytes(table[name]) for name in self.columns.names)
        if size <= CHUNK_TEXT_BYTES or len(table) == 1:
            yield table
            return
        middle = len(table) // 2
        yield from self._split(table.slice(0, middle))
        yield from self._split(table.slice(middle))


def find_files(inputs: Sequence[str]) -> tuple[Path, ...]:
    """The files that paths, directories (searched through) and globs stand for, each in order.

    Raises
    ------
    InputError
        Nothing is there, or a file is of no kind that can be read.
    """
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in _READERS)
            if not inside:
                raise InputError(f"{name}: no file with one of the endings {_endings()} in this directory")
            found += inside
        elif path.exists():
            found.append(path)
        elif matches := sorted(glob.glob(name, recursive=True)):  # noqa: PTH207
            found += map(Path, matches)
        else:
            raise InputError(f"{name}: no such file")
    for path in found:
        _reader(path)
    return tuple(found)


def open_source(paths: Sequence[Path], columns: TextColumns, *, allow_nulls: bool) -> Source:
    """Look at all of the files and check that every row can be read.

    Parameters
    ----------
    paths
        From `find_files`.
    columns
        Where the pairs are.
    allow_nulls
        Whether rows with a null query or passage may pass (they end as row errors).

    Raises
    ------
    InputError
        Names the file, column and row, and the way out.
    """
    surveys = [_reader(path).survey(path, columns, find_nulls=not allow_nulls) for path in paths]
    for path, survey in zip(paths, surveys, strict=True):
        if survey.schema.names or survey.rows:
            _check_columns(path, survey.schema, columns)
        if survey.first_null is not None and not allow_nulls:
            raise InputError(
                f"{path}: row {survey.first_null} (counted from 0) has a null query or passage; "
                "remove it, or leave out --on-null fail to have it reported as a row error"
            )
    return Source(
        tuple(paths), columns, _unify(paths, surveys, columns), sum(survey.rows for survey in surveys)
    )


def stem(path: Path) -> str:
    """The file's name without the endings that say what is in it: ``a.b`` for ``a.b.csv.gz``."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).stem


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


def _unify(paths: Sequence[Path], surveys: Sequence[Survey], columns: TextColumns) -> pa.Schema:
    merged = pa.schema([])
    for path, survey in zip(paths, surveys, strict=True):
        try:
            options = "permissive" if merged.names else "default"
            merged = pa.unify_schemas([merged, survey.schema], promote_options=options)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(
                f"{path}: its columns do not fit those of the files before it: {error}"
            ) from None
        if survey.schema.metadata and not merged.metadata:
            merged = merged.with_metadata(survey.schema.metadata)
    return merged if merged.names else pa.schema([(name, pa.string()) for name in columns.names])


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of `schema`; files may lack some or have narrower types."""
    if batch.schema.equals(schema):
        return batch
    columns = [
        batch[field.name].cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.record_batch(columns, schema=schema)


def _kind(path: Path) -> str:
    """The ending that says what is in a file: that before ``.gz`` or ``.zst``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED and suffixes[-2:-1] != [".parquet"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _reader(path: Path) -> Reader:
    reader = _READERS.get(_kind(path))
    if reader is None:
        raise InputError(f"{path}: cannot tell what is in it; its name must end in {_endings()}")
    return reader


def _endings() -> str:
    return ", ".join(_READERS) + " (all but Parquet also with .gz or .zst after it)"


def _text_bytes(column: pa.ChunkedArray) -> int:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        column = column.cast(pa.large_string())
    return pc.sum(pc.binary_length(column)).as_py() or 0
