"""A format with fields between ASCII's unit separators, in records that end in its record separator."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import Format, ReadOptions, Survey
from rankmill.producer.files.formats.text import TextWriter, as_text
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream

UNIT, RECORD = "\x1f", "\x1e"


class UsvReader:
    """Reads a file as a whole; the first record names the columns, and all columns are text."""

    def __init__(self, path: AnyPath, texts: Sequence[str], options: ReadOptions) -> None:
        self._path = path

    def shown_columns(self) -> pa.Schema:
        return self._table().schema

    def survey(self, *, find_nulls: bool) -> Survey:
        table = self._table()
        return Survey(table.schema, len(table), first_null=None, typed=False)

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        table = self._table()
        wanted = [name for name in schema.names if name in table.schema.names]
        yield from table.select(wanted).to_batches(max_chunksize=rows)

    def _table(self) -> pa.Table:
        with open_stream(self._path) as stream:
            names, *rows = [each.split(UNIT) for each in stream.read().decode().split(RECORD)[:-1]]
        for number, row in enumerate(rows):
            if len(row) != len(names):
                raise InputError(f"{self._path}, row {number}: {len(row)} fields, not {len(names)}")
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        return pa.table([pa.array(column, pa.string()) for column in columns], names)


class UsvWriter(TextWriter):
    """Writes the names of the columns, and a record for each row; null is empty."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        super().__init__(path, schema, compression)
        self._stream.write(_records([schema.names]))

    def _lines(self, table: pa.Table) -> bytes:
        return _records(zip(*(as_text(column).to_pylist() for column in table.columns), strict=True))


def _records(rows: Iterable[Sequence[str]]) -> bytes:
    return "".join(UNIT.join(row) + RECORD for row in rows).encode()


USV = Format((".usv",), UsvReader, UsvWriter)
