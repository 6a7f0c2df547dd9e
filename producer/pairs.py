"""Pairs as callers have them, cut into tables of which each makes a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from jobs.errors import InputError
from jobs.wire import text_bytes

if TYPE_CHECKING:
    import pandas as pd

    Pairs: TypeAlias = Iterable[tuple[str | None, str | None]] | pd.DataFrame | pa.Table | pa.RecordBatch

CHUNK_TEXT_BYTES = 16 << 20
"""Text in a chunk, at most, with a repeated query counted in every row; long texts make smaller chunks."""


def cut_pairs(pairs: Pairs, columns: tuple[str, str], rows: int) -> Iterator[pa.Table]:
    """Any kind of pairs as tables of `rows` rows, and of fewer where their texts are long.

    Raises
    ------
    InputError
        The columns are not there, or something is no pair of texts.
    """
    if isinstance(pairs, pa.RecordBatch):
        pairs = pa.Table.from_batches([pairs])
    elif hasattr(pairs, "columns") and hasattr(pairs, "iloc"):  # a data frame; pandas is slow to import
        pairs = pa.Table.from_pandas(pairs, preserve_index=False)
    if isinstance(pairs, pa.Table):
        for name in columns:
            if name not in pairs.column_names:
                raise InputError(f"no column {name!r}; there are {', '.join(map(repr, pairs.column_names))}")
        tables = iter([pairs.slice(start, rows) for start in range(0, len(pairs), rows)])
    else:
        tables = _tables_from_pairs(iter(pairs), columns, rows)
    return (part for table in tables for part in cut_long(table, columns))


def cut_long(table: pa.Table, columns: tuple[str, str]) -> Iterator[pa.Table]:
    """Cut a table in halves, and these, until each has at most `CHUNK_TEXT_BYTES` of text, or one row."""
    size = sum(text_bytes(table[name]) for name in columns)
    if size <= CHUNK_TEXT_BYTES or len(table) == 1:
        yield table
        return
    middle = len(table) // 2
    yield from cut_long(table.slice(0, middle), columns)
    yield from cut_long(table.slice(middle), columns)


def _tables_from_pairs(
    pairs: Iterator[tuple[str | None, str | None]], columns: tuple[str, str], rows: int
) -> Iterator[pa.Table]:
    part: list[tuple[str | None, str | None]] = []
    size = 0  # in characters: a repeated text is one object here, and a copy for each row in Arrow

    def table() -> pa.Table:
        return pa.table([_texts([pair[side] for pair in part]) for side in (0, 1)], names=list(columns))

    for row, pair in enumerate(pairs):
        if not _is_pair(pair):
            raise InputError(f"pair {row} is {pair!r:.80}, not a query and a passage (two strings)")
        length = len(pair[0] or "") + len(pair[1] or "")
        if part and size + length > CHUNK_TEXT_BYTES:
            yield table()
            part, size = [], 0
        part.append(pair)
        size += length
        if len(part) == rows:
            yield table()
            part, size = [], 0
    if part:
        yield table()


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(text is None or isinstance(text, str) for text in pair)


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # lone surrogates, which no UTF-8 can hold
        mended = [
            text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
        ]
        return pa.array(mended, pa.string())
