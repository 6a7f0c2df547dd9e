"""Cutting pairs, in any form that callers have, into tables: one for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from jobs.errors import InputError
from jobs.wire import text_bytes

if TYPE_CHECKING:
    import pandas as pd

    Pairs: TypeAlias = Iterable[tuple[str | None, str | None]] | pd.DataFrame | pa.Table | pa.RecordBatch

RowsAt: TypeAlias = Callable[[int], int]
"""How many rows the chunk gets that begins at a row of the input; it gets fewer where texts are long."""

COLUMNS = ("query", "passage")
"""Names of the two columns, where the caller has no others."""

CHUNK_TEXT_BYTES = 16 << 20
"""Most bytes of text in a chunk, counting a repeated query in every row; long texts make smaller chunks."""


def cut_pairs(pairs: Pairs, columns: tuple[str, str], rows_at: RowsAt) -> Iterator[pa.Table]:
    """Cut pairs into tables, one for each chunk.

    Raises
    ------
    InputError
        A column does not exist, or an item is not a pair of texts.
    """
    if isinstance(pairs, pa.RecordBatch):
        pairs = pa.Table.from_batches([pairs])
    elif hasattr(pairs, "columns") and hasattr(pairs, "iloc"):  # a data frame; pandas is slow to import
        pairs = pa.Table.from_pandas(pairs, preserve_index=False)
    if not isinstance(pairs, pa.Table):
        tables = _tables_from_pairs(iter(pairs), columns, rows_at)
        return (part for table in tables for part in cut_long(table, columns))
    for name in columns:
        if name not in pairs.column_names:
            raise InputError(f"no column {name!r}; there are {', '.join(map(repr, pairs.column_names))}")
    return cut_tables(iter([pairs]), columns, rows_at)


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


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # lone surrogates have no UTF-8 form
        mended = [
            text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
        ]
        return pa.array(mended, pa.string())
