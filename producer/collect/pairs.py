"""Cutting pairs, in any form that callers have, into tables: one for each chunk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.wire import is_text, text_bytes

if TYPE_CHECKING:
    import pandas as pd

    class ArrowStream(Protocol):
        """A table of any library that gives Arrow's stream."""

        def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...

    Pairs: TypeAlias = (
        Iterable[tuple[str | None, str | None]] | pd.DataFrame | pa.Table | pa.RecordBatch | ArrowStream
    )

RowsAt: TypeAlias = Callable[[int], int]
"""How many rows the chunk gets that begins at a row of the input; it gets fewer where texts are long."""

_TAKEN = (
    "(query, passage) tuples, or a table: of Arrow, pandas, or another library that gives Arrow's stream "
    "(__arrow_c_stream__), such as Polars or DuckDB"
)

COLUMNS = ("query", "passage")
"""Names of the two columns, where the caller has no others."""

CHUNK_TEXT_BYTES = 16 << 20
"""Most bytes of text in a chunk, counting a repeated query in every row; long texts make smaller chunks."""


def cut_pairs(pairs: Pairs, columns: tuple[str, str], rows_at: RowsAt) -> Iterator[pa.Table]:
    """Cut pairs into tables, one for each chunk.

    Raises
    ------
    InputError
        The pairs are of no kind that is taken, a column does not exist or holds no text, or an item is not a
        pair of texts.
    """
    table = _table_of(pairs)
    if table is None:
        if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes | Mapping | type):
            kind = pairs.__name__ if isinstance(pairs, type) else type(pairs).__name__
            raise InputError(f"pairs are {kind}, which is not taken; give {_TAKEN}")
        items = cast("Iterator[tuple[str | None, str | None]]", iter(pairs))  # looked at one by one
        tables = _tables_from_pairs(items, columns, rows_at)
        return (part for table in tables for part in cut_long(table, columns))
    names = table.column_names
    for name in columns:
        if names.count(name) != 1:
            what = "two columns are named" if name in names else "no column"
            raise InputError(f"{what} {name!r}; there are {', '.join(map(repr, names))}")
        if not is_text(table.schema.field(name).type):
            raise InputError(f"column {name!r} holds {table.schema.field(name).type}, not text")
    return cut_tables(iter([table]), columns, rows_at)


def _table_of(pairs: object) -> pa.Table | None:
    """Pairs as a table; ``None`` if they are no table of any kind."""
    try:
        if isinstance(pairs, pa.Table):
            return pairs
        if hasattr(pairs, "columns") and hasattr(pairs, "iloc"):  # a data frame; pandas is slow to import
            return pa.Table.from_pandas(pairs, preserve_index=False)
        if hasattr(pairs, "__arrow_c_stream__") or hasattr(pairs, "__arrow_c_array__"):
            return pa.table(pairs)
    except (pa.ArrowException, TypeError, ValueError) as error:
        kind, reason = type(pairs).__name__, " ".join(map(str, error.args)) or type(error).__name__
        raise InputError(
            f"pairs are {kind}, which is no table of texts: {' '.join(reason.split())}"
        ) from None
    return None


def cut_tables(
    tables: Iterator[pa.Table], columns: tuple[str, str], rows_at: RowsAt, start: int = 0
) -> Iterator[pa.Table]:
    """Cut tables anew, into one for each chunk; `start` is the number of the first row in the input."""
    waiting = size = 0
    pending: list[pa.Table] = []
    for table in tables:
        at = 0
        while at < len(table):
            size = size or rows_at(start)
            pending.append(table.slice(at, size - waiting))
            waiting += len(pending[-1])
            at += len(pending[-1])
            if waiting == size:
                yield from cut_long(pa.concat_tables(pending), columns)
                start += size
                waiting, size, pending = 0, 0, []
    if pending:
        yield from cut_long(pa.concat_tables(pending), columns)


def cut_long(table: pa.Table, columns: tuple[str, str]) -> Iterator[pa.Table]:
    """Halve a table repeatedly until each part has at most `CHUNK_TEXT_BYTES` of text, or one row."""
    size = sum(text_bytes(table[name]) for name in columns)
    if size <= CHUNK_TEXT_BYTES or len(table) == 1:
        yield table
        return
    middle = len(table) // 2
    yield from cut_long(table.slice(0, middle), columns)
    yield from cut_long(table.slice(middle), columns)


def _tables_from_pairs(
    pairs: Iterator[tuple[str | None, str | None]], columns: tuple[str, str], rows_at: RowsAt
) -> Iterator[pa.Table]:
    part: list[tuple[str | None, str | None]] = []
    size = 0  # in characters; counts repeated texts, because Arrow stores a copy in each row

    def table() -> pa.Table:
        return pa.table([_texts([pair[side] for pair in part]) for side in (0, 1)], names=list(columns))

    rows = rows_at(0)
    for row, pair in enumerate(pairs):
        if not _is_pair(pair):
            raise InputError(f"pair {row} is {pair!r:.80}, not a query and a passage (two strings)")
        length = len(pair[0] or "") + len(pair[1] or "")
        if part and size + length > CHUNK_TEXT_BYTES:
            yield table()
            part, size, rows = [], 0, rows_at(row)
        part.append(pair)
        size += length
        if len(part) == rows:
            yield table()
            part, size, rows = [], 0, rows_at(row + 1)
    if part:
        yield table()


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(text is None or isinstance(text, str) for text in pair)


def holds_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold conversations: lists of messages, or these in JSON."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return is_text(kind) or (any(test(kind) for test in tests) and pa.types.is_struct(kind.value_type))


def as_json(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Conversations as workers get them; a key that Arrow has filled with null is left out."""
    if is_text(column.type):
        return column
    return _texts([None if messages is None else _json_of(messages) for messages in column.to_pylist()])


def _json_of(messages: Iterable[Mapping[str, object] | None]) -> str:
    known = [each and {name: value for name, value in each.items() if value is not None} for each in messages]
    return json.dumps(known, ensure_ascii=False, default=str)


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # lone surrogates have no UTF-8 form
        mended = [
            text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
        ]
        return pa.array(mended, pa.string())
