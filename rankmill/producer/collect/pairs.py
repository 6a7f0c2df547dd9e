"""Cuts pairs or other rows, in any form that callers have, into one table for each chunk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.spec import SpecOptions
from rankmill.jobs.contract.wire import is_pair, is_text, mended, text_bytes
from rankmill.producer.collect.sizing import Sizing

if TYPE_CHECKING:

    class ArrowStream(Protocol):
        """A table or a column of any library that supports Arrow's stream interface."""

        def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...

    class Relation(Protocol):
        """A relation of DuckDB. Its type hints do not show that it supports Arrow's stream interface."""

        def fetchone(self) -> object: ...

    # Libraries without type hints are left out: a type checker would take their classes for `Any`, and accept
    # any argument.
    Table: TypeAlias = ArrowStream | Relation
    Array: TypeAlias = np.ndarray[Any, Any]
    Texts: TypeAlias = Iterable[str | None] | Iterable[Mapping[str, str | None]] | Array | Table
    Conversations: TypeAlias = Iterable[Sequence[Mapping[str, Any]] | None] | Table
    Pairs: TypeAlias = (
        Iterable[tuple[str | None, str | None]]
        | Iterable[list[str]]
        | Iterable[list[str | None]]
        | Iterable[Mapping[str, str | None]]
        | Array
        | Table
    )
    Rows: TypeAlias = Pairs | Texts | Conversations

_ITEMS: Mapping[Inputs, str] = {
    "pairs": "(query, passage) tuples",
    "texts": "strings",
    "conversations": "lists of {role, content}",
    "tokens": "strings of JSON",
}
_TAKEN = (
    "dicts, or a table: of Arrow, pandas, Hugging Face's datasets, or another "
    "library that gives Arrow's stream (__arrow_c_stream__), such as Polars or DuckDB"
)

COLUMNS = ("query", "passage")
"""Names of the columns of pairs, if the caller does not name others."""

USUAL_COLUMNS: Mapping[Inputs, tuple[str, ...]] = {
    "pairs": COLUMNS,
    "texts": ("text",),
    "conversations": ("messages",),
    "tokens": ("asked",),
}


class OpenTables(Iterator[pa.Table]):
    """Tables from opened sources, such as files that a thread reads ahead, or a caller's stream.

    The code that opens the sources must close them with `close`. Do not leave this to the garbage collector:
    it may run in a thread that already holds a lock, and closing may need this lock.

    Parameters
    ----------
    tables
        The tables.
    opened
        The sources that `close` closes, in this order, if they can be closed.
    """

    def __init__(self, tables: Iterator[pa.Table], *opened: object) -> None:
        self._tables, self._opened = tables, opened

    def __next__(self) -> pa.Table:
        return next(self._tables)

    def close(self) -> None:
        """Stop reading, and close the sources. While a thread reads, only that thread may call this."""
        opened, self._opened, self._tables = self._opened, (), iter(())
        for source in opened:
            if close := getattr(source, "close", None):
                close()


_DATASET_ROWS = 4096
"""This many rows of a dataset, a Polars frame or an array are converted at a time."""

CHUNK_TEXT_BYTES = 16 << 20
"""A chunk has at most this many bytes of text, unless it has only one row; so long texts make smaller chunks.
A query that several rows repeat counts once for each of these rows.
"""


def rows_given(
    pairs: Pairs | None, texts: Texts | None, messages: Conversations | None, spec: SpecOptions
) -> tuple[Rows, SpecOptions]:
    """Return the rows to score, which must be given as exactly one of `pairs`, `texts` and `messages`.

    Also returns `spec`, to which the kind of rows is added for texts and messages.

    Raises
    ------
    InputError
        No parameter is given, or several are.
    """
    named: dict[Inputs, Rows | None] = {"pairs": pairs, "texts": texts, "conversations": messages}
    given = [(rows, kind) for kind, rows in named.items() if rows is not None]
    if len(given) != 1:
        raise InputError(f"give one of pairs, texts and messages, not {len(given)} of them")
    ((rows, kind),) = given
    return rows, spec if kind == "pairs" else {**spec, "inputs": kind}


def cut_pairs(pairs: Rows, columns: tuple[str, ...], sizing: Sizing, inputs: Inputs = "pairs") -> OpenTables:
    """Cut pairs or other rows into tables, one for each chunk. Closing the tables also closes the stream or
    generator that the rows come from.

    Raises
    ------
    InputError
        The type of the rows is not supported; or a column does not exist, exists twice or has no text; or an
        item is not a row of the kind `inputs`.
    """
    if given := _table_of(pairs, columns, inputs):
        _check_columns(given.schema, columns, inputs)
        tables = given.tables
        if inputs == "conversations":
            (name,) = columns
            tables = (pa.table({name: as_json(table[name]).cast(pa.large_string())}) for table in tables)
        return OpenTables(cut_tables(tables, columns, sizing), given.opened)
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes | Mapping | type):
        kind = pairs.__name__ if isinstance(pairs, type) else type(pairs).__name__
        raise InputError(f"{inputs} are {kind}, which cannot be read; give {_ITEMS[inputs]}, {_TAKEN}")
    items = rows_of(pairs, inputs) if isinstance(pairs, np.ndarray) else iter(pairs)
    rows = (row_of(item, row, columns, inputs) for row, item in enumerate(items))
    opened = items if isinstance(items, GeneratorType) else None
    tables = chain.from_iterable(_cut_long(table, columns) for table in _tables_from(rows, columns, sizing))
    return OpenTables(tables, opened)


def _check_columns(schema: pa.Schema, columns: tuple[str, ...], inputs: Inputs) -> None:
    names = schema.names
    for name in columns:
        if names.count(name) != 1:
            problem = "two columns are named" if name in names else "no column"
            raise InputError(f"{problem} {name!r}; there are {', '.join(map(repr, names))}")
        kind = schema.field(name).type
        if not (holds_messages(kind) if inputs == "conversations" else is_text(kind)):
            wanted = _ITEMS[inputs] if inputs == "conversations" else "text"
            raise InputError(f"column {name!r} holds {kind}, not {wanted}")


class _Tables(NamedTuple):
    """Tables that have the same schema, and can be read once. ``opened`` is the source to close after
    reading, or ``None``.
    """

    schema: pa.Schema
    tables: Iterator[pa.Table]
    opened: object = None


def _table_of(pairs: Any, columns: tuple[str, ...], inputs: Inputs) -> _Tables | None:
    """Read pairs as tables, or return ``None`` if `pairs` are not a table of any kind.

    Do not import a library of tables here: that would be slow. If a data frame or a dataset has `columns`,
    its other columns are not converted.
    """
    try:
        if len(columns) == 1 and _is_column(pairs):
            column = pa.chunked_array([pairs] if isinstance(pairs, pa.Array) else pairs)
            pairs = pa.table([column], names=list(columns))
        elif hasattr(pairs, "columns") and hasattr(pairs, "iloc"):
            # A data frame of pandas, recognized without a slow import of pandas.
            has_both = set(columns) <= set(pairs.columns)
            pairs = pa.Table.from_pandas(pairs[list(columns)] if has_both else pairs, preserve_index=False)
        elif hasattr(pairs, "with_format") and isinstance(pairs, Mapping):
            splits = ", ".join(map(repr, pairs))
            raise InputError(f"{inputs} are a {type(pairs).__name__}; give one of its splits: {splits}")
        elif hasattr(pairs, "with_format") and hasattr(pairs, "select_columns"):
            return _of_dataset(pairs, columns) if pairs.features else None
        elif hasattr(pairs, "iter_slices") and hasattr(pairs, "select"):
            return _of_polars(pairs, columns)
        elif hasattr(pairs, "__arrow_c_array__"):
            pairs = pa.table(pairs)
        if isinstance(pairs, pa.Table):
            return _Tables(pairs.schema, iter([pairs]))
        if hasattr(pairs, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(pairs)
            return _Tables(reader.schema, _read(reader, f"{inputs} are {type(pairs).__name__}"), reader)
    except (pa.ArrowException, TypeError, ValueError) as error:
        kind, reason = type(pairs).__name__, " ".join(map(str, error.args)) or type(error).__name__
        raise InputError(
            f"{inputs} are {kind}, which is not a table of texts: {' '.join(reason.split())}"
        ) from None
    return None


def _is_column(given: Any) -> bool:
    """Whether the argument is a single column, such as an Arrow array or a data frame's series."""
    if isinstance(given, pa.Array | pa.ChunkedArray):
        return True
    # a table has several types, so it does not have ``dtype``
    return hasattr(given, "__arrow_c_stream__") and hasattr(given, "dtype")


def _of_dataset(dataset: Any, columns: tuple[str, ...]) -> _Tables:
    if set(columns) <= set(dataset.column_names):
        dataset = dataset.select_columns(list(columns))
    tables: Iterator[pa.Table] = iter(dataset.with_format("arrow").iter(_DATASET_ROWS))
    return _Tables(dataset.features.arrow_schema, tables, tables)


def _of_polars(frame: Any, columns: tuple[str, ...]) -> _Tables:
    """Read a Polars frame in slices, because its own stream begins with a copy of the whole frame."""
    if set(columns) <= set(frame.columns):
        frame = frame.select(columns)
    slices = frame.iter_slices(_DATASET_ROWS)
    return _Tables(pa.table(frame[:0]).schema, (pa.table(part) for part in slices), slices)


def _read(reader: pa.RecordBatchReader, name: str) -> Iterator[pa.Table]:
    try:
        for batch in reader:
            yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).partition(". Detail: Python exception")[0]
        raise InputError(f"{name}, which could not be read to its end: {reason}") from None


def cut_tables(
    tables: Iterator[pa.Table], columns: tuple[str, ...], sizing: Sizing, start: int = 0
) -> Iterator[pa.Table]:
    """Cut or join `tables` into one table for each chunk. `start` is the row number in the input at which
    `tables` begin.
    """
    waiting = size = 0
    pending: list[pa.Table] = []
    for table in tables:
        at = 0
        while at < len(table):
            size = size or sizing.rows_at(start)
            pending.append(table.slice(at, size - waiting))
            waiting += len(pending[-1])
            at += len(pending[-1])
            if waiting == size:
                yield from _cut_long(pa.concat_tables(pending), columns)
                start += size
                waiting, size, pending = 0, 0, []
    if pending:
        yield from _cut_long(pa.concat_tables(pending), columns)


def _cut_long(table: pa.Table, columns: tuple[str, ...]) -> Iterator[pa.Table]:
    """Halve a table repeatedly until each part has at most `CHUNK_TEXT_BYTES` of text, or one row."""
    if len(table) == 1 or sum(text_bytes(table[name]) for name in columns) <= CHUNK_TEXT_BYTES:
        yield table
        return
    middle = len(table) // 2
    yield from _cut_long(table.slice(0, middle), columns)
    yield from _cut_long(table.slice(middle), columns)


def rows_of(array: np.ndarray[Any, Any], inputs: Inputs = "pairs") -> Iterator[object]:
    """Yield the rows of a numpy array as Python objects.

    The array has pairs ``[n, 2]`` or texts ``[n]``, or is a structured array ``[n]``. Raises `InputError` for
    other shapes.
    """
    if inputs != "pairs" and array.ndim != 1:
        raise InputError(f"{inputs} are an array of shape {array.shape}; give one of shape [n]")
    if inputs == "pairs" and array.shape[1:] != (() if array.dtype.names else (2,)):
        raise InputError(f"pairs are an array of shape {array.shape}; give one of shape [n, 2]")
    for start in range(0, len(array), _DATASET_ROWS):
        for row in array[start : start + _DATASET_ROWS].tolist():
            yield dict(zip(array.dtype.names, row, strict=True)) if array.dtype.names else row


def row_of(item: object, row: int, columns: tuple[str, ...], inputs: Inputs) -> tuple[str | None, ...]:
    """Return the texts of a row that the caller gave; raises `InputError` if `item` is not a row of the kind
    `inputs`.
    """
    kind = inputs.removesuffix("s")
    if isinstance(item, Mapping):
        missing = [name for name in columns if name not in item]
        if missing:
            raise InputError(f"{kind} {row} has no {missing[0]!r}; it has {', '.join(map(repr, item))}"[:300])
        item = [item[name] for name in columns] if inputs == "pairs" else item[columns[0]]
    if inputs == "pairs":
        if not is_pair(item):
            raise InputError(f"pair {row} is {item!r:.80}, not a query and a passage (two strings)")
        return cast("tuple[str | None, str | None]", item)
    try:
        if inputs == "conversations" and isinstance(item, list | tuple):
            item = json.dumps(item, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{kind} {row} cannot be written as JSON: {error}") from None
    if item is not None and not isinstance(item, str):
        wanted = "a list of {role, content}" if inputs == "conversations" else "a string"
        raise InputError(f"{kind} {row} is {item!r:.80}, not {wanted}")
    return (item,)


def _tables_from(
    pairs: Iterator[tuple[str | None, ...]], columns: tuple[str, ...], sizing: Sizing
) -> Iterator[pa.Table]:
    part: list[tuple[str | None, ...]] = []
    size = 0  # characters of all rows of `part`; Arrow stores a repeated text once for each row

    def table() -> pa.Table:
        texts = [_texts([pair[side] for pair in part]) for side in range(len(columns))]
        return pa.table(texts, names=list(columns))

    rows = sizing.rows_at(0)
    for row, pair in enumerate(pairs):
        length = sum(len(text or "") for text in pair)
        if part and size + length > CHUNK_TEXT_BYTES:
            yield table()
            part, size, rows = [], 0, sizing.rows_at(row)
        part.append(pair)
        size += length
        if len(part) == rows:
            yield table()
            part, size, rows = [], 0, sizing.rows_at(row + 1)
    if part:
        yield table()


def holds_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type can contain conversations, which are lists of messages, as values or as
    JSON.
    """
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return is_text(kind) or (any(test(kind) for test in tests) and pa.types.is_struct(kind.value_type))


def as_json(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Turn a column of conversations into JSON. At all depths, the nulls that Arrow has filled in are left
    out.
    """
    if is_text(column.type):
        return column
    return _texts([None if messages is None else _json_of(messages) for messages in column.to_pylist()])


def _json_of(messages: Iterable[Mapping[str, object] | None]) -> str:
    return json.dumps([_known(message) for message in messages], ensure_ascii=False, default=str)


def _known(value: object) -> object:
    if isinstance(value, dict):
        return {name: _known(item) for name, item in value.items() if item is not None}
    return [_known(item) for item in value] if isinstance(value, list) else value


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array([mended(text) for text in texts], pa.string())
