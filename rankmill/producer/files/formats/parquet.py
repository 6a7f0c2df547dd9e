"""Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import ReadOptions, Survey, first_null, text_of
from rankmill.producer.files.stores.reading import open_random

ROW_GROUP_ROWS = 65_536

_BUFFER_BYTES = 1 << 20  # read column chunks in parts, so that memory does not grow with the row group


class ParquetReader:
    """Reads row groups in parts; schema and row count come from the footer."""

    def __init__(self, path: Path, texts: Sequence[str], options: ReadOptions) -> None:
        self._path, self._texts = path, texts

    def shown_columns(self) -> pa.Schema:
        """See `Reader.shown_columns`."""
        return self.survey(find_nulls=False).schema

    def survey(self, *, find_nulls: bool) -> Survey:
        """See `Reader.survey`; reads the text columns only if `find_nulls` is set."""
        with _open(self._path) as file:
            schema = file.schema_arrow
            null = None
            if find_nulls:
                present = [name for name in self._texts if name in schema.names]
                start = 0
                for batch in file.iter_batches(columns=present):
                    found = first_null(batch, self._texts)
                    if found is not None:
                        null = start + found
                        break
                    start += batch.num_rows
            return Survey(schema, file.metadata.num_rows, null)

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`."""
        with _open(self._path) as file:
            own = file.schema_arrow.names
            asked = set(schema.names)
            wanted = [name for name in own if name in asked]
            columns = None if len(wanted) == len(own) else wanted
            try:
                yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise InputError(f"{self._path}: damaged Parquet data: {error}") from None


class ParquetWriter:
    """Writes Parquet with zstd; the metadata is in the footer."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def write(self, table: pa.Table) -> None:
        """Append a row group."""
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)

    def close(self, metadata: Mapping[str, str]) -> None:
        """See `Writer.close`."""
        self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()

    def abandon(self) -> None:
        """See `Writer.abandon`."""
        self._writer.close()


def metadata_of(path: Path) -> dict[str, str]:
    """What the footer of a file says besides its columns; raises `InputError` if it is not whole."""
    with _open(path) as file:
        found = file.metadata.metadata or {}
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in found.items()}


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(open_random(path), buffer_size=_BUFFER_BYTES, pre_buffer=False)
        _ = file.schema_arrow.names
        return file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: not a whole Parquet file (truncated or damaged?): {text_of(error)}"
        ) from None
