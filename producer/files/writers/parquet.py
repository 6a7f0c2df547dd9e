"""Parquet output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 65_536

_DICTIONARY_BYTES = 1 << 20
"""Arrow gives up a larger dictionary of a row group, after the work of making it."""


class ParquetWriter:
    """Writes Parquet with zstd; the metadata is in the footer.

    A column whose values are seldom repeated in the first rows, as passages are, gets no dictionaries.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._begun = False

    def write(self, table: pa.Table) -> None:
        """Append a row group."""
        if not self._begun:
            self._begin(table)
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)

    def close(self, metadata: Mapping[str, str]) -> None:
        """See `Writer.close`."""
        self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()

    def abandon(self) -> None:
        """See `Writer.abandon`."""
        self._writer.close()

    def _begin(self, table: pa.Table) -> None:
        """Open the file again, if columns are better off without dictionaries."""
        self._begun = True
        varied = {name for name in table.column_names if _is_varied(table[name])}
        if not varied:
            return
        self._writer.close()
        columns = pq.read_metadata(self._path).schema
        paths = [columns.column(at).path for at in range(len(columns))]
        repeated = [path for path in paths if path not in varied]
        self._writer = pq.ParquetWriter(
            self._path, self._schema, compression="zstd", use_dictionary=repeated or False
        )


def _is_varied(column: pa.ChunkedArray) -> bool:
    """Whether a dictionary of a column's values would save nothing, or be too large."""
    kind = column.type
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
        pa.types.is_integer, pa.types.is_float32, pa.types.is_float64,
    )  # fmt: skip
    if not any(test(kind) for test in tests):
        return False
    distinct = column.unique()
    return 2 * len(distinct) > len(column) or distinct.nbytes > _DICTIONARY_BYTES
