"""What the writers of text have in common: a stream, plain or compressed, and lines of fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError


class TextWriter:
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


def joined(fields: Sequence[pa.ChunkedArray | pa.Scalar], separator: str) -> pa.Buffer:
    """Join fields to lines."""
    whole = [each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in fields]
    lines = pc.binary_join_element_wise(*whole, separator) if len(whole) > 1 else whole[0]
    ended = pc.binary_join_element_wise(lines, "\n", "")
    _, ends, data = ended.buffers()
    places = np.frombuffer(ends, np.int32)[ended.offset :][: len(ended) + 1]
    return data.slice(int(places[0]), int(places[-1] - places[0]))  # Arrow keeps texts one after the other


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as text, as Arrow prints its values; null is empty."""
    options = pc.CastOptions(pa.string(), allow_invalid_utf8=True)
    return pc.fill_null(pc.cast(undictionary(column), options=options), "")


def undictionary(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """The column with its values, if it has places in a dictionary."""
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def refuse(schema: pa.Schema, name: str, is_bad: Callable[[pa.DataType], bool]) -> None:
    """Raise `InputError` if a column has a type that the format `name` cannot hold."""
    for field in schema:
        if is_bad(field.type):
            raise InputError(
                f"{name} cannot hold column {field.name!r} ({field.type}); "
                "name an output that ends in .parquet"
            )


def without_times(kind: pa.DataType) -> pa.DataType:
    """The type with text in place of times and durations, at any depth."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(without_times(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(without_times(kind.key_type), without_times(kind.item_type))
    for is_list, make in _LISTS:
        if is_list(kind):
            return make(without_times(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(without_times(kind.value_type), kind.list_size)
    return kind


_LISTS = ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list))


def cannot_be_text(kind: pa.DataType) -> bool:
    """Whether a type holds bytes, or intervals, which Arrow does not print."""
    kind = undictionary(pa.array([], kind)).type
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    tests = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
        pa.types.is_binary_view,
        pa.types.is_interval,
    )
    return any(test(kind) for test in tests) or any(map(cannot_be_text, inner))


def far_time(column: pa.Array) -> int | None:
    """The first row with a time that Arrow cannot print, as its year is too far away."""
    text = column.cast(without_times(column.type))
    if pa.types.is_nested(text.type):
        text = pa.array(map(str, text.to_pylist()), pa.string())
    place = int(pc.index(pc.match_substring(text, "<value out of range: "), True).as_py())
    return None if place < 0 else place
