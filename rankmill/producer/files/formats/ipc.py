"""Reads Arrow's IPC files (Feather version 2 is the same format) and IPC streams, and writes IPC files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

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
    undictionaried,
)
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_random

MAGIC = b"ARROW1"
"""First bytes of an Arrow file with a footer. If a file does not begin with these bytes, it is a stream, as
files in the cache of Hugging Face's datasets are.
"""

STREAM_MAGIC = b"\xff\xff\xff\xff"
"""First bytes of an Arrow stream, unless a release before Arrow 0.15 wrote it."""

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Last bytes of an Arrow stream. They are checked, because Arrow accepts a stream that was cut off between
two batches.
"""

_BATCH_ROWS = 65_536


class ArrowReader:
    """Reads an Arrow file, one record batch at a time. To count the rows, all batches are read, because the
    file does not say the number of rows.
    """

    def __init__(self, path: AnyPath, texts: Sequence[str], options: ReadOptions) -> None:
        self._path, self._texts = path, texts

    def shown_columns(self) -> pa.Schema:
        with self._open([]) as (schema, _):
            return schema

    def survey(self, *, find_nulls: bool) -> Survey:
        """Count the rows by reading one column. If `find_nulls` is set, read all text columns."""
        texts = self._texts if find_nulls else []
        with self._open(texts) as (schema, batches):
            return Survey(schema, *count_rows(batches, texts))

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        with self._open(schema.names) as (_, batches):
            for batch in batches:
                for start in range(0, len(batch), rows):
                    yield batch.slice(start, rows)

    @contextmanager
    def _open(self, wanted: Sequence[str]) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """Open the Arrow file; yield its schema, and its batches with the `wanted` columns."""
        try:
            source = open_random(self._path)
            with pa.OSFile(str(source)) if isinstance(source, Path) else source as file:
                is_file = file.read(len(MAGIC)) == MAGIC
                file.seek(0)
                schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).schema
                check_types(self._path, schema)
                file.seek(0)
                places = [place for place, name in enumerate(schema.names) if name in set(wanted)]
                # if no column is wanted, read the first one, so that rows can be counted
                first_column = [*range(len(schema))][:1]
                options = pa.ipc.IpcReadOptions(included_fields=places or first_column, use_threads=False)
                yield plain_schema(schema), map(plain_batch, _batches(file, is_file, options))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{self._path}: not a whole Arrow file (truncated or damaged?): {text_of(error)}"
            ) from None


def _batches(file: pa.NativeFile, is_file: bool, options: pa.ipc.IpcReadOptions) -> Iterator[pa.RecordBatch]:
    opened = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file, options=options)
    for batch in map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened:
        # without this check, Arrow would follow the offsets of a damaged file to any place in memory
        batch.validate(full=True)
        yield batch
    if not is_file:
        end = file.tell()
        file.seek(max(end - len(_END), 0))
        if file.read(len(_END)) != _END or end != file.size():
            raise pa.ArrowInvalid("the stream does not end where the file does")


class ArrowWriter:
    """Writes an Arrow file, compressed with zstd. The metadata that `close` gets are ignored, because an
    Arrow file has its metadata in the schema, which is written first.

    Columns with dictionaries are written as plain values, because a file has one dictionary for all rows.
    """

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        plain = pa.schema(
            [field.with_type(undictionaried(field.type)) for field in schema],
            schema.metadata,
        )
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._schema = plain
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, plain, options=options)

    def write(self, table: pa.Table) -> None:
        # Only cast where necessary: Arrow makes mistakes when it casts a slice with nulls of type null.
        columns = [
            column if column.type == kind else column.cast(kind)
            for column, kind in zip(table.columns, self._schema.types, strict=True)
        ]
        plain = pa.Table.from_arrays(columns, schema=self._schema)
        self._writer.write_table(plain, max_chunksize=_BATCH_ROWS)

    def close(self, metadata: Mapping[str, str]) -> None:
        self._writer.close()
        self._sink.close()

    def abandon(self) -> None:
        self._sink.close()


ARROW = Format((".arrow", ".feather"), ArrowReader, ArrowWriter, is_text=False)
ARROWS = Format((".arrows",), ArrowReader, None, is_text=False)
"""The format of files with an Arrow stream. A file whose name ends in .arrow may hold a stream, too."""
