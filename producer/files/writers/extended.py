"""Parquet output that is its input with more columns: the input's bytes are copied, not encoded again."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputChanged, InputError
from producer.files.readers.parquet import ParquetReader
from producer.files.source import PairSource, Source
from producer.files.stores.paths import ObjectPath
from producer.files.writers.thrift import I32, I64, Items, Struct, Typed, read_struct, write_struct

_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")
"""The end of a file: the size of the footer before it, and the magic."""

_MOST_FOOTER_BYTES = 4 << 20
_MOST_GROUP_ROWS = 64 << 20
"""More rows in a group than this cannot be written."""

_COPIED_BYTES = 1 << 20

_UNCOMPRESSED = 0

# Numbers of fields, as the format's specification has them.
_SCHEMA, _GROUPS, _PAIRS, _ENCRYPTION, _ORDERS = 2, 4, 5, 8, 7
_CHILDREN = 5
_COLUMNS, _GROUP_BYTES, _GROUP_ROWS, _GROUP_COMPRESSED_BYTES = 1, 2, 3, 6
_FILE_PATH, _FILE_OFFSET, _ABOUT, _CRYPTO = 1, 2, 3, 8
_CODEC, _BYTES, _COMPRESSED_BYTES, _OFFSETS = 4, 6, 7, (9, 10, 11)


@dataclass(frozen=True)
class WholeFile:
    """A Parquet file to copy: its footer, where that begins, and the rows of its row groups."""

    path: Path
    footer: Struct
    data_end: int
    group_rows: Sequence[int]


def whole_file(source: PairSource, kept: Sequence[str], schema: pa.Schema) -> WholeFile | None:
    """The file that an output can begin with, so that only the columns after those of `kept` are added.

    Parameters
    ----------
    source
        The input.
    kept, schema
        The input's columns in the output, and all columns of the output, in order.

    Returns
    -------
    The file; ``None`` unless the input is one compressed Parquet file of this host, as a whole and unchanged,
    which says of its columns just what a new file would say.
    """
    if not isinstance(source, Source) or len(source.files) != 1 or not source.rows:
        return None
    (file,), (survey,) = source.files, source.surveys
    is_whole = source.limit is None and source.shard is None and not file.partition
    is_unchanged = source.schema.equals(survey.schema) and list(kept) == survey.schema.names
    if isinstance(file.path, ObjectPath) or not isinstance(source.readers[0], ParquetReader):
        return None
    if not is_whole or not is_unchanged:
        return None
    try:
        whole = _read(file.path)
        template = _empty_footer(schema, {})
        if not _is_copyable(whole, template, len(kept)):
            return None
        _extended(whole, _sample(schema, len(kept), len(whole.group_rows)), template)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, pa.ArrowException):
        return None  # what is wrong with it, if anything is, its reader says
    return whole


class ExtendedWriter:
    """Writes a copy of a file with more columns, which come after all that is copied.

    Parameters
    ----------
    path
        The file to write.
    whole
        The file to copy.
    schema, added
        All columns of the output, and the names of those to add, its last.
    """

    def __init__(self, path: Path, whole: WholeFile, schema: pa.Schema, added: Sequence[str]) -> None:
        self._whole, self._schema = whole, schema
        self._input: IO[bytes] = whole.path.open("rb")
        self._output: IO[bytes] = path.open("wb")
        self._added = path.with_name(f"{path.name}.added")
        own = pa.schema([schema.field(name) for name in added])
        self._writer = pq.ParquetWriter(self._added, own, compression="zstd", use_dictionary=False)
        self._waiting = own.empty_table()
        self._groups = iter(whole.group_rows)
        self._group = next(self._groups)
        self._rows, self._all_rows = 0, sum(whole.group_rows)

    def write(self, table: pa.Table) -> None:
        """Append the added columns of some rows, and copy as large a part of the file as these are of it."""
        self._rows += len(table)
        self._waiting = pa.concat_tables([self._waiting, table])
        while self._group and len(self._waiting) >= self._group:
            self._writer.write_table(self._waiting.slice(0, self._group), row_group_size=self._group)
            self._waiting = self._waiting.slice(self._group)
            self._group = next(self._groups, 0)
        self._copy(self._whole.data_end * self._rows // self._all_rows)

    def close(self, metadata: Mapping[str, str]) -> None:
        """See `Writer.close`."""
        self._writer.close()
        self._copy(self._whole.data_end)
        added = _read(self._added)
        with self._added.open("rb") as file:
            while (at := file.tell()) < added.data_end:
                self._output.write(file.read(min(_COPIED_BYTES, added.data_end - at)))
        template = _empty_footer(self._schema, metadata)
        footer = write_struct(_extended(self._whole, added, template))
        self._output.write(footer + _TAIL.pack(len(footer), _MAGIC))
        self._output.close()

    def abandon(self) -> None:
        """See `Writer.abandon`."""
        for file in (self._input, self._output, self._writer):
            with suppress(OSError, pa.ArrowException):
                file.close()
        self._added.unlink(missing_ok=True)

    def _copy(self, end: int) -> None:
        """Copy the file up to a place."""
        while (at := self._output.tell()) < end:
            try:
                data = self._input.read(min(_COPIED_BYTES, end - at))
            except OSError as error:
                raise InputError(f"{self._whole.path}: cannot be read: {error.strerror}") from None
            if not data:
                raise InputChanged(f"{self._whole.path} has become shorter while it was read")
            self._output.write(data)


def _extended(whole: WholeFile, added: WholeFile, template: Struct) -> Struct:
    """The footer of the output; `template` is one of an empty file with all columns."""
    footer = dict(whole.footer)
    elements, columns = _items(footer, _SCHEMA), _items(template, _SCHEMA)
    count = len(columns) - len(elements)
    root = {**elements[0], _CHILDREN: Typed(I32, elements[0][_CHILDREN].value + count)}
    footer[_SCHEMA] = _replaced(footer[_SCHEMA], [root, *elements[1:], *columns[-count:]])
    groups = zip(_items(footer, _GROUPS), _items(added.footer, _GROUPS), strict=True)
    footer[_GROUPS] = _replaced(
        footer[_GROUPS], [_extended_group(own, other, whole.data_end) for own, other in groups]
    )
    footer.pop(_PAIRS, None)
    if _PAIRS in template:
        footer[_PAIRS] = template[_PAIRS]
    if _ORDERS in footer:
        orders = [*_items(footer, _ORDERS), *_items(template, _ORDERS)[-count:]]
        footer[_ORDERS] = _replaced(footer[_ORDERS], orders)
    return footer


def _extended_group(group: Struct, added: Struct, moved: int) -> Struct:
    """A row group with more columns, which are `moved` by so many bytes."""
    columns = [_moved(column, moved) for column in _items(added, _COLUMNS)]
    found = dict(group)
    found[_COLUMNS] = _replaced(group[_COLUMNS], [*_items(group, _COLUMNS), *columns])
    found[_GROUP_BYTES] = Typed(I64, group[_GROUP_BYTES].value + added[_GROUP_BYTES].value)
    if _GROUP_COMPRESSED_BYTES in group:
        more = sum(column[_ABOUT].value[_COMPRESSED_BYTES].value for column in columns)
        found[_GROUP_COMPRESSED_BYTES] = Typed(I64, group[_GROUP_COMPRESSED_BYTES].value + more)
    return found


def _moved(column: Struct, by: int) -> Struct:
    about = dict(column[_ABOUT].value)
    for place in _OFFSETS:
        if place in about:
            about[place] = Typed(I64, about[place].value + by)
    found = {**column, _ABOUT: column[_ABOUT]._replace(value=about)}
    if column[_FILE_OFFSET].value:
        found[_FILE_OFFSET] = Typed(I64, column[_FILE_OFFSET].value + by)
    return found


def _is_copyable(whole: WholeFile, template: Struct, kept: int) -> bool:
    """Whether a file has its columns as they would be written; compressed, not encrypted, nowhere else."""
    footer = whole.footer
    elements, columns = _items(footer, _SCHEMA), _items(template, _SCHEMA)
    if _ENCRYPTION in footer or elements[0][_CHILDREN].value != kept:
        return False
    if elements[1:] != columns[1 : len(elements)]:
        return False
    if not all(0 < rows <= _MOST_GROUP_ROWS for rows in whole.group_rows):
        return False
    chunks = [column for group in _items(footer, _GROUPS) for column in _items(group, _COLUMNS)]
    return all(
        not {_FILE_PATH, _CRYPTO} & chunk.keys() and chunk[_ABOUT].value[_CODEC].value != _UNCOMPRESSED
        for chunk in chunks
    )


def _sample(schema: pa.Schema, kept: int, groups: int) -> WholeFile:
    """A file of the added columns, with so many row groups; only its footer is one."""
    sink = pa.BufferOutputStream()
    added = list(schema)[kept:]
    pq.write_table(pa.table([pa.nulls(1, field.type) for field in added], pa.schema(added)), sink)
    footer, end = _footer(pa.BufferReader(sink.getvalue()))
    (group,) = _items(footer, _GROUPS)
    return WholeFile(
        Path(), {**footer, _GROUPS: _replaced(footer[_GROUPS], [group] * groups)}, end, [1] * groups
    )


def _empty_footer(schema: pa.Schema, metadata: Mapping[str, str]) -> Struct:
    """The footer of a file with these columns and no rows."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema) as writer:
        writer.add_key_value_metadata(dict(metadata))
    return _footer(pa.BufferReader(sink.getvalue()))[0]


def _read(path: Path) -> WholeFile:
    """Read a file's footer; raises `ValueError` as `_footer`."""
    with path.open("rb") as file:
        footer, end = _footer(file)
    return WholeFile(path, footer, end, [group[_GROUP_ROWS].value for group in _items(footer, _GROUPS)])


def _footer(file: IO[bytes] | pa.NativeFile) -> tuple[Struct, int]:
    """A file's footer, and where it begins; raises `ValueError` if it is not one, or is too large."""
    end = file.seek(-_TAIL.size, os.SEEK_END)
    size, magic = _TAIL.unpack(file.read())
    if magic != _MAGIC or size > min(_MOST_FOOTER_BYTES, end):
        raise ValueError("no footer of the usual kind and size")
    file.seek(end - size)
    return read_struct(file.read(size)), end - size


def _items(struct: Struct, number: int) -> list[Any]:
    """The items of a list."""
    items: Items = struct[number].value
    return items.values


def _replaced(field: Typed, values: list[Any]) -> Typed:
    """The list with other items."""
    return Typed(field.kind, Items(field.value.kind, values))
