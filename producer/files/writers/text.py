"""Text output: CSV, TSV, JSON Lines and TREC runs, plain or compressed with gzip or zstd."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from rankmill.jobs.contract.errors import InputError

_BREAKS = r"[\t\r\n]"
"""Characters that a TSV file cannot hold: it has no quotes."""

logger = logging.getLogger(__name__)


class _TextWriter:
    """A file that is written as text; a subclass turns tables into bytes."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        self._schema = schema
        self._stream = pa.output_stream(str(path), compression=compression)

    def write(self, table: pa.Table) -> None:
        """Append rows."""
        if len(table):
            self._stream.write(self._lines(table))

    def close(self, metadata: Mapping[str, str]) -> None:
        """Complete the file; text formats have no place for metadata."""
        self._stream.close()

    def abandon(self) -> None:
        """See `Writer.abandon`."""
        self._stream.close()

    def _lines(self, table: pa.Table) -> bytes | pa.Buffer:
        raise NotImplementedError


class CsvWriter(_TextWriter):
    """Writes CSV: text in quotes, null as an empty field without quotes."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        _refuse(schema, "CSV", pa.types.is_nested)
        super().__init__(path, schema, compression)
        self._stream.write(self._csv(schema.empty_table(), header=True))

    def _lines(self, table: pa.Table) -> pa.Buffer:
        return self._csv(table, header=False)

    @staticmethod
    def _csv(table: pa.Table, *, header: bool) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        columns = [_undictionary(column) for column in table.columns]
        options = pcsv.WriteOptions(include_header=header, quoting_style="needed")
        pcsv.write_csv(pa.table(columns, names=table.column_names), sink, options)
        return sink.getvalue()


class TsvWriter(_TextWriter):
    """Writes TSV without quotes: null as an empty field, tabs and line ends inside a value as spaces."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        _refuse(schema, "TSV", pa.types.is_nested)
        super().__init__(path, schema, compression)
        self._replaced = 0
        names = pc.replace_substring_regex(pa.array(schema.names, pa.string()), _BREAKS, " ")
        self._stream.write(("\t".join(names.to_pylist()) + "\n").encode())

    def close(self, metadata: Mapping[str, str]) -> None:
        """Complete the file; log how many values had tabs or line ends."""
        super().close(metadata)
        if self._replaced:
            logger.warning(
                "%s values had tabs or line ends, which TSV cannot hold: they are spaces now",
                f"{self._replaced:,}",
            )

    def _lines(self, table: pa.Table) -> pa.Buffer:
        return _joined([self._field(column) for column in table.columns], "\t")

    def _field(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        text = _as_text(column)
        broken = pc.sum(pc.match_substring_regex(text, _BREAKS)).as_py() or 0
        self._replaced += broken
        return pc.replace_substring_regex(text, _BREAKS, " ") if broken else text


class JsonlWriter(_TextWriter):
    """Writes one JSON object for each row; times and decimals as strings, NaN as null."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        _refuse(schema, "JSON", _holds_bytes)
        super().__init__(path, schema, compression)

    def _lines(self, table: pa.Table) -> bytes:
        columns = [_for_json(column).to_pylist() for column in table.columns]
        names = table.column_names
        rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        return "".join(map(_json_line, rows)).encode()


class TrecWriter(_TextWriter):
    """Writes ``query Q0 document rank score tag``; `columns` are query id, document id, rank and score."""

    def __init__(
        self, path: Path, schema: pa.Schema, compression: str | None, columns: Sequence[str], tag: str
    ) -> None:
        super().__init__(path, schema, compression)
        self._columns = columns
        self._tag = tag

    def _lines(self, table: pa.Table) -> pa.Buffer:
        query, document, rank, score = (_as_text(table[name]) for name in self._columns)
        return _joined([query, pa.scalar("Q0"), document, rank, score, pa.scalar(self._tag)], " ")


def _joined(fields: Sequence[pa.ChunkedArray | pa.Scalar], separator: str) -> pa.Buffer:
    """Join fields to lines."""
    whole = [each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in fields]
    lines = pc.binary_join_element_wise(*whole, separator) if len(whole) > 1 else whole[0]
    ended = pc.binary_join_element_wise(lines, "\n", "")
    _, ends, data = ended.buffers()
    places = np.frombuffer(ends, np.int32)[ended.offset :][: len(ended) + 1]
    return data.slice(int(places[0]), int(places[-1] - places[0]))  # Arrow keeps texts one after the other


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as text, as Arrow prints its values; null is empty."""
    options = pc.CastOptions(pa.string(), allow_invalid_utf8=True)
    return pc.fill_null(pc.cast(_undictionary(column), options=options), "")


def _undictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def _for_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replace 32-bit floats by the 64-bit floats with the same shortest notation: 0.1 stays 0.1."""
    if pa.types.is_float32(column.type):
        return column.cast(pa.string()).cast(pa.float64())
    return column


def _json_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    except ValueError:  # NaN or infinity
        return json.dumps(_finite(row), ensure_ascii=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _holds_bytes(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        inner = [kind.value_type]
    return any(test(kind) for test in tests) or any(map(_holds_bytes, inner))


def _refuse(schema: pa.Schema, name: str, is_bad: Callable[[pa.DataType], bool]) -> None:
    for field in schema:
        if is_bad(field.type):
            raise InputError(
                f"{name} cannot hold column {field.name!r} ({field.type}); "
                "name an output that ends in .parquet"
            )
