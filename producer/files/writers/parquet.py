"""Parquet output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 65_536


class ParquetWriter:
    """Writes Parquet with zstd; the metadata is in the footer."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
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
