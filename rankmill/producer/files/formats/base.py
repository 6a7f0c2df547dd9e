"""The interface of a file format: a reader, which reads a file in two passes, and a writer.

`Reader.survey` finds, before scoring begins, the number of rows and a schema that fits every row.
`Reader.batches` then reads the rows.

A package adds a format by an entry point of the group ``rankmill.formats``, which names its `Format`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.wire import is_text
from rankmill.producer.files.stores.paths import AnyPath

MAX_LINE_BYTES = 16 << 20
"""A line of a text file may have at most this many bytes, and so may a field in quotes. Longer ones are
refused before they are parsed.
"""

TOO_LONG = f"longer than {MAX_LINE_BYTES >> 20} MiB; shorten it, or write the file as Parquet"

NOT_UTF8 = "not valid UTF-8; convert the file first: iconv -f latin1 -t utf-8 (or -f utf-16, if it is that)"

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

ROW = "\0"
"""Name of a column that has each row as it stands in the file, for example as a line of JSON. Only some
readers have this column.

``ROW + "x"`` is the name of column ``x`` as text; values that are not strings become JSON.
"""


@dataclass(frozen=True)
class TextColumns:
    """Names the columns to score, which have pairs, texts or conversations."""

    query: str
    passage: str | None = None
    inputs: Inputs = "pairs"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.query,) if self.passage is None else (self.query, self.passage)

    @property
    def texts(self) -> tuple[str, ...]:
        return () if self.inputs == "conversations" else self.names

    @property
    def messages(self) -> tuple[str, ...]:
        return self.names if self.inputs == "conversations" else ()

    @property
    def sent(self) -> tuple[str, ...]:
        """The columns that workers get: the texts, or the conversations as JSON."""
        return tuple(f"{ROW}{name}" for name in self.names) if self.inputs == "conversations" else self.names

    @property
    def options(self) -> tuple[str, ...]:
        of_kind = {"texts": ("--text-column",), "conversations": ("--messages-column",) * len(self.names)}
        return of_kind.get(self.inputs, ("--query-column", "--passage-column"))


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file.

    Parameters
    ----------
    delimiter
        The character between two fields of CSV or TSV, or its name. By default, the character is detected in
        CSV, and is a tab in TSV.
    lists
        Columns to unroll: a row becomes one row for each item.
    way_out
        The end of the error message for a file that cannot be read. With ``None``, the message names options
        of score-file. Commands that lack these options give other advice here.
    names
        The columns of CSV or TSV without a header.
    typed
        Whether columns of JSON get types. If not, all columns except `lists` are text.
    messages
        Columns of conversations.
    """

    delimiter: str | None = None
    lists: Sequence[str] = ()
    way_out: str | None = None
    names: Sequence[str] = ()
    typed: bool = True
    messages: Sequence[str] = ()


@dataclass(frozen=True)
class Survey:
    """What a first reading of a file has found.

    Parameters
    ----------
    schema
        The columns, with types that fit every row.
    rows
        The number of rows.
    first_null
        The first row (from 0) with a null in a text column, or ``None`` if no such row was found.
    typed
        Whether the format has types, as Parquet does and CSV does not.
    as_asked
        Whether the reader converts columns to the types that the caller asks for. Such a reader also has the
        column `ROW`.
    mixed
        Columns that become text, or lists of text, because no other type fits all values.
    """

    schema: pa.Schema
    rows: int
    first_null: int | None
    typed: bool = True
    as_asked: bool = False
    mixed: Sequence[str] = ()


class Reader(Protocol):
    """Reads one file. A reader is made from a path, the columns to read as text, and `ReadOptions`.

    Raises
    ------
    InputError
        From any method: the file is damaged. The message names the file and, if known, column and row.
    StoreError, RunnerError
        From any method: the store does not serve, or this process may not read the file.
    """

    def shown_columns(self) -> pa.Schema:
        """Read the columns that the beginning of the file shows. In formats without types, all are text."""
        ...

    def survey(self, *, find_nulls: bool) -> Survey:
        """Find the schema and the number of rows of the file.

        With `find_nulls`, also find the first null in a text column, even if the file must be read once more.
        """
        ...

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Read those columns of `schema` that the file has. If possible, a batch has about `rows` rows."""
        ...


class Writer(Protocol):
    """Writes one file. A writer is made from a path, the schema of the tables, and the compression of text.

    Raises
    ------
    InputError
        From the constructor: the format cannot hold a column.
    OSError, pa.ArrowException
        From any method: the file cannot be written.
    """

    def write(self, table: pa.Table) -> None: ...

    def close(self, metadata: Mapping[str, str]) -> None:
        """Complete the file, with `metadata` where the format has a place for it."""
        ...

    def abandon(self) -> None: ...


MakeReader = Callable[[AnyPath, Sequence[str], ReadOptions], Reader]


@dataclass(frozen=True)
class Format:
    """A format of files, which an entry point of ``rankmill.formats`` names.

    Parameters
    ----------
    endings
        The endings of files' names. The first is a dot and the entry point's name.
    reader
        Makes a reader of pairs; ``None`` if the format has none.
    writer
        Makes a writer of rows; ``None`` if the format has none.
    is_text
        Whether files are text. Text may be compressed: .gz or .zst then follows the ending.
    """

    endings: Sequence[str]
    reader: MakeReader | None
    writer: Callable[..., Writer] | None
    is_text: bool = True

    @property
    def name(self) -> str:
        """The name that the option --output-format takes."""
        return self.endings[0].removeprefix(".")


def count_rows(batches: Iterable[pa.RecordBatch], texts: Sequence[str]) -> tuple[int, int | None]:
    """Count the rows, and find the first row (from 0) with a null in a column of `texts`, if there is one."""
    rows, null = 0, None
    for batch in batches:
        if null is None and (first := _first_null(batch, texts)) is not None:
            null = rows + first
        rows += len(batch)
    return rows, null


def _first_null(batch: pa.RecordBatch, texts: Sequence[str]) -> int | None:
    rows = [
        int(pa.compute.index(pa.compute.is_null(batch[name]), value=True).as_py())
        for name in texts
        if batch.schema.names.count(name) == 1 and batch[name].null_count
    ]
    return min(rows, default=None)


def line_blocks(
    path: AnyPath, stream: pa.NativeFile, start: bytes, block_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line, block)``: a block of whole lines, with the number (from 1) of its first line.

    `start` is what was already read from the stream. About `block_bytes` are read at a time.

    Raises
    ------
    InputError
        A line is longer than `MAX_LINE_BYTES`.
    """
    line, rest, data = 1, b"", start.removeprefix(BYTE_ORDER_MARK)
    while data:
        end = data.rfind(b"\n") + 1
        if len(rest) + (data.find(b"\n") if end else len(data)) > MAX_LINE_BYTES:
            raise InputError(f"{path}, line {line}: {TOO_LONG}")
        if end:
            yield line, rest + data[:end]
            line += rest.count(b"\n") + data.count(b"\n", 0, end)
            rest = b""
        rest += data[end:]
        data = stream.read(block_bytes)
    if rest.strip():
        yield line, rest


def check_types(path: AnyPath, schema: pa.Schema) -> None:
    """Raise `InputError` if Arrow cannot cast the type of a column, or casts it wrongly. The same holds for
    types inside of that type.
    """
    for field in schema:
        if _is_uncastable(field.type):
            raise InputError(
                f"{path}: column {field.name!r} holds {field.type}, which cannot be read; write plain lists "
                "in place of list views, and plain values in place of run-end-encoded ones, dictionaries of "
                "lists or structs, and lists of size 0"
            )


def _is_uncastable(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return bool(pa.types.is_nested(kind.value_type)) or _is_uncastable(kind.value_type)
    tests = (pa.types.is_list_view, pa.types.is_large_list_view, pa.types.is_run_end_encoded)
    is_empty_list = pa.types.is_fixed_size_list(kind) and not kind.list_size
    inner = (kind.field(place).type for place in range(kind.num_fields))
    return is_empty_list or any(test(kind) for test in tests) or any(map(_is_uncastable, inner))


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema that a batch has after `plain_batch`, without metadata that an earlier score-file has
    written.
    """
    metadata = {key: value for key, value in (schema.metadata or {}).items() if not key.startswith(_OURS)}
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], metadata or None)


_OURS = b"rankmill."
"""Prefix of the keys of all metadata that score-file writes into an output."""


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert Arrow's string views and binary views in a batch, at any depth, to plain text and bytes. Polars
    writes views, but Arrow's ``take``, which picks rows by their numbers, does not work with them.

    A dictionary of texts stays a dictionary, but a null among its texts is removed, because Parquet cannot
    hold that null. The indices get 32 bits. The 8 bits that pandas writes may be too few when dictionaries of
    several batches are joined into one. All other dictionaries become plain values.
    """
    schema = plain_schema(batch.schema)
    columns = map(_plain_column, batch.columns, schema.types)
    return pa.record_batch(list(columns), schema=schema)


def _plain_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # Two casts, because Arrow cannot turn a dictionary of views into plain values at once.
    for step in (mapped_type(column.type, _without_view), kind):
        column = column if column.type == step else column.cast(step)
    if pa.types.is_dictionary(kind) and column.dictionary.null_count:
        return column.dictionary_decode().dictionary_encode().cast(kind)
    return column


def _plain(kind: pa.DataType) -> pa.DataType:
    kind = mapped_type(kind, _without_view)
    is_category = pa.types.is_dictionary(kind) and is_text(kind) and not pa.types.is_null(kind.value_type)
    if is_category:
        return pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return mapped_type(kind, undictionaried)


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_view(kind.value_type), kind.ordered)
    return _OF_VIEWS.get(kind, kind)


def undictionaried(kind: pa.DataType) -> pa.DataType:
    """Return the type of a dictionary's values if `kind` is a dictionary, else `kind` itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def every_type(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and all types inside of it. For a dictionary, yield the type of its values instead."""
    kind = undictionaried(kind)
    yield kind
    for place in range(kind.num_fields):
        yield from every_type(kind.field(place).type)


def mapped_type(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Apply `change` to a type, or to the types inside of a struct, map or list, and return the result."""

    def mapped(field: pa.Field) -> pa.Field:
        return field.with_type(mapped_type(field.type, change))

    if pa.types.is_struct(kind):
        return pa.struct([mapped(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(mapped(kind.key_field), mapped(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(mapped(kind.value_field), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(mapped(kind.value_field))
    return change(kind)


_OF_VIEWS = {
    pa.string_view(): pa.large_string(),
    pa.binary_view(): pa.large_binary(),
    pa.json_(pa.string_view()): pa.large_string(),
}
"""The type to which each of Arrow's view types is converted. Types with 32-bit offsets would be too small: a
column of views may have more than 2 GiB of text.
"""


def is_empty(path: AnyPath) -> InputError:
    """Make the error to raise for a file without any content, not even the names of its columns."""
    return InputError(f"{path}: is empty; write it again, or leave it out of the input")


def text_of(error: BaseException) -> str:
    """Return the message of an error of another library, in one line."""
    return " ".join(str(error).split())
