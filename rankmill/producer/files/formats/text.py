"""The base class of writers of text, and functions that turn columns into text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import every_type, mapped_type, undictionaried

Column: TypeAlias = pa.Array | pa.ChunkedArray


class TextWriter:
    """Writes a file of text; a subclass turns tables into bytes."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        self._schema = schema
        self._stream = pa.output_stream(str(path), compression=compression)

    def write(self, table: pa.Table) -> None:
        if len(table):
            self._stream.write(self._lines(table))

    def close(self, metadata: Mapping[str, str]) -> None:
        self._stream.close()

    def abandon(self) -> None:
        self._stream.close()

    def _lines(self, table: pa.Table) -> bytes | pa.Buffer:
        raise NotImplementedError


def joined(fields: Sequence[pa.ChunkedArray | pa.Scalar], separator: str) -> pa.Buffer:
    """Join columns of texts into one line for each row. The `separator` stands between two fields."""
    whole = [part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part for part in fields]
    lines = pc.binary_join_element_wise(*whole, separator) if len(whole) > 1 else whole[0]
    ended = pc.binary_join_element_wise(lines, "\n", "")
    _, ends, data = ended.buffers()
    places = np.frombuffer(ends, np.int32)[ended.offset :][: len(ended) + 1]
    # one buffer has all texts, one after the other
    return data.slice(int(places[0]), int(places[-1] - places[0]))


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column to text, as `texts_of` does, with null as an empty text."""
    return pc.fill_null(texts_of(column), "")


def texts_of(column: Column) -> Column:
    """Convert a column to text as Arrow prints it, but with UUIDs in hexadecimal.

    Null stays null. Bytes become text that may not be valid UTF-8.
    """
    column = undictionary(column)
    if isinstance(column.type, pa.UuidType):
        values = (value if value is None else str(value) for value in column.to_pylist())
        texts = pa.array(values, pa.string())
        column = pa.chunked_array([texts]) if isinstance(column, pa.ChunkedArray) else texts
    return pc.cast(column, options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))


def valid_texts(column: Column) -> Column:
    """Convert a column as `texts_of` does. Raises `ArrowInvalid` for a text that is not valid UTF-8, and
    `ArrowNotImplementedError` for a column that cannot become text, such as a column of lists.
    """
    texts = texts_of(column)
    texts.validate(full=True)
    return texts


def values_for_text(column: Column) -> list[Any]:
    """Convert a column to Python values, in which times are text, at any depth.

    Arrow prints the times, because Python has no times with nanoseconds, and none in far years.
    """
    bare = without_times(column.type)
    values: list[Any] = (column if bare == column.type else column.cast(bare)).to_pylist()
    return values


def undictionary(column: Column) -> Column:
    """Return a column with plain values in place of a dictionary."""
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def refuse(schema: pa.Schema, name: str, is_bad: Callable[[pa.DataType], bool]) -> None:
    """Raise `InputError` if a column has a type that the format `name` cannot hold."""
    for field in schema:
        if is_bad(field.type):
            others = ((".parquet", cannot_be_parquet), (".jsonl", cannot_be_text))
            endings = [ending for ending, cannot in others if not cannot(field.type)] or [".arrow"]
            raise InputError(
                f"{name} cannot hold column {field.name!r} ({field.type}); "
                f"name an output that ends in {' or '.join(endings)}"
            )


def without_times(kind: pa.DataType) -> pa.DataType:
    """Replace, at any depth of a type, times by text."""
    return mapped_type(kind, _without_time)


def _without_time(kind: pa.DataType) -> pa.DataType:
    kind = undictionaried(kind)
    return pa.string() if pa.types.is_temporal(kind) else kind


def cannot_be_text(kind: pa.DataType) -> bool:
    """Whether a type has, at any depth, a part that JSON cannot hold: bytes, a duration, an interval, or a
    struct with two fields of the same name.
    """
    tests = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
        pa.types.is_binary_view,
        pa.types.is_duration,
        pa.types.is_interval,
        _repeats_a_name,
    )
    return any(test(each) for each in every_type(kind) for test in tests)


def _repeats_a_name(kind: pa.DataType) -> bool:
    names = [field.name for field in kind] if pa.types.is_struct(kind) else []
    return len(set(names)) < len(names)


def cannot_be_parquet(kind: pa.DataType) -> bool:
    """Whether a type holds intervals, unions or structs without fields, which Arrow does not write to
    Parquet.
    """
    tests = (pa.types.is_interval, pa.types.is_union, _is_empty_struct)
    return any(test(each) for each in every_type(kind) for test in tests)


def _is_empty_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and not kind.num_fields


def far_time(column: pa.Array) -> int | None:
    """Return the index of the first row whose time Arrow cannot print, because the year is too far away.
    Returns ``None`` if Arrow can print all times.
    """
    text = column.cast(without_times(column.type))
    if not pa.types.is_string(text.type):
        text = pa.array(map(str, text.to_pylist()), pa.string())
    place = int(pc.index(pc.match_substring(text, "<value out of range: "), True).as_py())
    return None if place < 0 else place
