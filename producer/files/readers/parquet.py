"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.readers import Survey, first_null
from rankmill.producer.files.stores.reading import open_random

_BUFFER_BYTES = 1 << 20  # read column chunks in parts, so that memory does not grow with the row group


class ParquetReader:
    """Reads row groups in parts; schema and row count come from the footer."""

    def survey(self, path: Path, texts: Sequence[str], *, find_nulls: bool) -> Survey:
        """See `Reader.survey`; reads the text columns only if `find_nulls` is set."""
        with _open(path) as file:
            schema = file.schema_arrow
            null = None
            if find_nulls:
                present = [name for name in texts if name in schema.names]
                start = 0
                for batch in file.iter_batches(columns=present):
                    found = first_null(batch, texts)
                    if found is not None:
                        null = start + found
                        break
                    start += batch.num_rows
            return Survey(schema, file.metadata.num_rows, null)

    def batches(self, path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`; reads only columns of `schema`."""
        with _open(path) as file:
            own = file.schema_arrow.names
            asked = set(schema.names)
            wanted = [name for name in own if name in asked]
            columns = None if len(wanted) == len(own) else wanted
            try:
                yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: damaged Parquet data: {error}") from None


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(open_random(path), buffer_size=_BUFFER_BYTES, pre_buffer=False)
        _ = file.schema_arrow.names
        return file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a whole Parquet file (truncated or damaged?): {reason}") from None
