"""Reads and writes Parquet files, and reads columns of earlier outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import (
    Format,
    ReadOptions,
    Survey,
    check_types,
    count_rows,
    plain_batch,
    plain_schema,
    text_of,
)
from rankmill.producer.files.formats.text import cannot_be_parquet, refuse
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_random

ROW_GROUP_ROWS = 65_536

_BUFFER_BYTES = 1 << 20  # read column chunks in parts, so that memory does not grow with the row group


class ParquetReader:
    """Reads a Parquet file, each row group in several batches. The schema and the number of rows are read
    from the footer.
    """

    def __init__(self, path: AnyPath, texts: Sequence[str], options: ReadOptions) -> None:
        self._path, self._texts = path, texts

    def shown_columns(self) -> pa.Schema:
        return self.survey(find_nulls=False).schema

    def survey(self, *, find_nulls: bool) -> Survey:
        """Read the schema and the number of rows. The text columns are read only if `find_nulls` is set."""
        with _open(self._path) as file, _reading(self._path):
            schema = plain_schema(file.schema_arrow)
            present = [name for name in self._texts if name in schema.names] if find_nulls else []
            null = count_rows(file.iter_batches(columns=present), present)[1] if present else None
            return Survey(schema, file.metadata.num_rows, null)

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        with _open(self._path) as file, _reading(self._path):
            own = file.schema_arrow.names
            names = set(schema.names)
            wanted = [name for name in own if name in names] or own[:1]  # no columns would mean no rows
            columns = None if len(wanted) == len(own) else wanted
            for group in range(file.num_row_groups):  # Arrow cannot join lists of dictionaries of two groups
                batches = file.iter_batches(rows, [group], columns, use_threads=False)
                yield from map(plain_batch, batches)


class ParquetWriter:
    """Writes Parquet with zstd and checksums; the metadata is in the footer."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        refuse(schema, "Parquet", cannot_be_parquet)
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)

    def close(self, metadata: Mapping[str, str]) -> None:
        self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()


def metadata_of(path: AnyPath) -> dict[str, str]:
    """Read the metadata in the footer of a Parquet file; raises `InputError` if the file cannot be read."""
    with _open(path) as file:
        raw = file.metadata.metadata or {}
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in raw.items()}


@dataclass(frozen=True)
class ScoredRows:
    """Columns of an earlier output: their schema, their number of rows, and the rows in batches. The batches
    can be read only once.
    """

    schema: pa.Schema
    rows: int
    batches: Iterator[pa.RecordBatch]


def scored_rows(path: AnyPath, names: Sequence[str], option: str) -> ScoredRows:
    """Read columns of an earlier output of score-file.

    Parameters
    ----------
    path
        The output.
    names
        The columns to read.
    option
        The option of the command that needs the columns, for messages.

    Raises
    ------
    InputError
        The file lacks a column or is damaged; reading the batches may raise this too.
    """
    reader = ParquetReader(path, (), ReadOptions())
    survey = reader.survey(find_nulls=False)
    if missing := [name for name in names if name not in survey.schema.names]:
        raise InputError(
            f"{path}: no column {missing[0]!r}, which {option} needs; the output of a run has texts with "
            "--with-texts"
        )
    schema = pa.schema([survey.schema.field(name) for name in names])
    return ScoredRows(schema, survey.rows, reader.batches(schema, ROW_GROUP_ROWS))


def _open(path: AnyPath) -> pq.ParquetFile:
    """Open a Parquet file. Reading a page verifies its checksum, if it has one."""
    try:
        file = pq.ParquetFile(
            open_random(path), buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        schema = file.schema_arrow
        _ = schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: not a whole Parquet file (truncated or damaged?): {text_of(error)}"
        ) from None
    check_types(path, schema)
    return file


@contextmanager
def _reading(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: damaged Parquet data: {text_of(error)}; get the file again") from None


PARQUET = Format((".parquet", ".pq"), ParquetReader, ParquetWriter, is_text=False)
