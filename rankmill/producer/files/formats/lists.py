"""Reads files whose rows have a query and a list of passages; each passage becomes a row with the query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import ROW, Reader, Survey, count_rows
from rankmill.producer.files.formats.jsonl import with_items
from rankmill.producer.files.stores.paths import AnyPath

_ROWS = 64
"""This many rows are read at a time. The number is small, because a row may have a thousand passages."""


class ListReader:
    """Unrolls the lists in another reader's rows, so that each item becomes a row.

    The values of all other columns are repeated. A row whose lists are empty or null is left out.

    Parameters
    ----------
    path, inner, texts
        The file, its reader, and the columns to read as text.
    lists
        Columns to unroll; the lists of a row must have the same length.
    """

    def __init__(self, path: AnyPath, inner: Reader, texts: Sequence[str], lists: Sequence[str]) -> None:
        self._path, self._inner, self._texts, self._lists = path, inner, texts, lists
        self._types = pa.schema([])

    def shown_columns(self) -> pa.Schema:
        return self._inner.shown_columns()

    def survey(self, *, find_nulls: bool) -> Survey:
        """Survey the file, then read its lists to count their items, because each item becomes a row."""
        plain = [name for name in self._texts if name not in self._lists]
        inner = self._inner.survey(find_nulls=False)
        if not inner.schema.names:
            return inner
        self._types = inner.schema
        schema = pa.schema([self._unrolled(field) for field in inner.schema])
        missing = [name for name in self._lists if name not in schema.names]
        if missing:
            raise InputError(f"{self._path}: --list-columns: no column {missing[0]!r} in the input")
        wanted = [name for name in schema.names if name in {*self._lists, *(plain if find_nulls else [])}]
        batches = self._unroll(pa.schema([inner.schema.field(name) for name in wanted]))
        rows, null = count_rows(batches, self._texts if find_nulls else ())
        return replace(inner, schema=schema, rows=rows, first_null=null)

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield a row for each item of the lists. A batch has the items of a few rows of the file, so `rows`
        is ignored.
        """
        fields = [
            field.with_type(pa.list_(field.type)) if field.name in self._lists else field for field in schema
        ]
        if not set(self._lists) & set(schema.names):
            # a list is needed in any case: its length says how often a row is repeated
            fields.append(self._types.field(self._lists[0]))
        yield from self._unroll(pa.schema(fields))

    def _unroll(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        row = 0
        for batch in self._inner.batches(schema, _ROWS):
            yield self._pairs(batch, row)
            row += len(batch)

    def _pairs(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        lists = [name for name in batch.schema.names if name in self._lists]
        for place, name in enumerate(batch.schema.names):
            if name in lists and pa.types.is_null(batch[name].type):  # no row of the file has a list
                batch = batch.set_column(place, name, batch[name].cast(pa.list_(pa.null())))
        lengths = {name: _lengths(batch[name]) for name in lists}
        for name in lists[1:]:
            wrong = np.flatnonzero(lengths[name] != lengths[lists[0]])
            if len(wrong):
                row = int(wrong[0])
                raise InputError(
                    f"{self._path}: row {first + row} (counted from 0) has {lengths[lists[0]][row]} items in "
                    f"{lists[0]!r} and {lengths[name][row]} in {name!r}; lists that are unrolled together "
                    "need the same length (--list-columns)"
                )
        repeats = pa.array(np.repeat(np.arange(len(batch)), lengths[lists[0]]))
        columns = {
            name: pc.list_flatten(batch[name]) if name in lists else batch[name].take(repeats)
            for name in batch.schema.names
        }
        if ROW in columns:
            rows = (with_items(row, self._lists) for row in batch[ROW].to_pylist())
            columns[ROW] = pa.array(chain.from_iterable(rows), pa.string())
        return pa.record_batch(list(columns.values()), names=batch.schema.names)

    def _unrolled(self, field: pa.Field) -> pa.Field:
        if field.name not in self._lists or pa.types.is_null(field.type):
            return field
        if not is_list(field.type):
            raise InputError(
                f"{self._path}: column {field.name!r} holds {field.type}, not lists (--list-columns)"
            )
        return pa.field(field.name, field.type.value_type)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type can be unrolled."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def _lengths(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]]
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    return lengths
