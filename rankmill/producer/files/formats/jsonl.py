r"""JSON Lines, or a JSON array of objects; plain or compressed with gzip or zstd.

A file is read in blocks of whole lines, and Arrow parses each block. Types are inferred for each
block and unified over the file, and an error can name its line. Lone surrogates (``\ud800``), which
are not valid in Unicode text, become U+FFFD.

Arrow's parser recurses without a limit, and makes a column of every key with a value for each row of the
block: a few megabytes could crash the process or take all memory. So each block is checked before; the checks
are cheap for usual lines.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import (
    BYTE_ORDER_MARK,
    NOT_UTF8,
    ReadOptions,
    Survey,
    first_null,
    line_blocks,
    text_of,
)
from rankmill.producer.files.formats.json_array import MAX_DEPTH, array_blocks
from rankmill.producer.files.formats.text import TextWriter, refuse
from rankmill.producer.files.stores.reading import open_stream

_BLOCK_BYTES = 16 << 20

_FIRST_BYTES = 1 << 20
"""Size of the first block, in which all columns are new and must be counted."""

_SURROGATE = re.compile("[\ud800-\udfff]")

MAX_KEYS = 10_000
"""Most different keys in a block."""

_MAX_CELLS = 20_000_000
"""Most cells (columns times rows) that are parsed at a time."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_KEY = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")(\s*+:)?', re.DOTALL)
_LONG_INTEGER = re.compile(rb"[:\s,\[]-?[0-9]{16,}(?![0-9.eE])")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_OPENING = bytes(set(range(256)) - set(b"[{\n"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class JsonlReader:
    """Reads one JSON object on each line; in .json also an array of objects, whose items count as lines."""

    def __init__(self, path: Path, texts: Sequence[str], options: ReadOptions) -> None:
        self._path, self._texts = path, texts

    def shown_columns(self) -> pa.Schema:
        """See `Reader.shown_columns`: the keys of the first record."""
        for line, block in _blocks(self._path):
            try:
                first = _record(self._path, line, block.lstrip().split(b"\n", 1)[0])
            except InputError:
                raise InputError(f"{self._path}: does not begin with a JSON object") from None
            return pa.schema(
                {name: pa.int64() if type(value) is int else pa.string() for name, value in first.items()}
            )
        return pa.schema([])

    def survey(self, *, find_nulls: bool) -> Survey:
        """See `Reader.survey`; parses the file once."""
        path, texts = self._path, self._texts
        fields = pa.schema([(name, pa.string()) for name in texts])
        schema, rows, null, seen = pa.schema([]), 0, None, set[str]()
        for table in _infer(path, fields):
            schema = _unify(path, schema, _without_times(table.schema))
            if len(schema) > MAX_KEYS:
                raise InputError(f"{path}: more than {MAX_KEYS:,} columns; are some of the keys data?")
            seen.update(name for name in texts if table[name].null_count < len(table))
            if null is None:
                found = first_null(table, texts)
                null = None if found is None else rows + found
            rows += len(table)
        if rows:  # remove text columns that no line has: Arrow adds every column of the schema it is given
            schema = pa.schema([field for field in schema if field.name in seen or field.name not in texts])
        return Survey(schema, rows, null)

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`; a batch is a block of the file."""
        for first, whole in _blocks(self._path):
            for line, block in _cut(first, whole, len(schema)):
                yield from _parse(self._path, line, block, schema, "ignore").to_batches()


class JsonlWriter(TextWriter):
    """Writes one JSON object for each row; times and decimals as strings, NaN as null."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        refuse(schema, "JSON", _holds_bytes)
        super().__init__(path, schema, compression)

    def _lines(self, table: pa.Table) -> bytes:
        columns = [_for_json(column).to_pylist() for column in table.columns]
        names = table.column_names
        rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        return "".join(map(_json_line, rows)).encode()


def _infer(path: Path, texts: pa.Schema) -> Iterator[pa.Table]:
    """Yield the file in blocks, with inferred types; the types of `texts` are given.

    A block without a new column or type is parsed with the schema of the block before it. So the keys, of
    which a hostile file could have millions, are counted only in blocks with new ones.
    """
    known: pa.Schema | None = None
    for first, whole in _blocks(path):
        table = None if known is None else _same(path, first, whole, known)
        if table is not None:
            yield table
            continue
        for line, block in _slices(path, first, whole):
            table = _parse(path, line, block, texts, "infer")
            known = _without_times(table.schema)
            _check_integers(path, line, block, known)
            yield table


def _same(path: Path, line: int, block: bytes, schema: pa.Schema) -> pa.Table | None:
    """Parse the block with `schema`; ``None`` if it has other columns or types, or needs cutting."""
    if len(schema) * block.count(b"\n") > len(block):
        return None  # rows have few of the keys: the block must be cut
    try:
        return _read_json(block, schema, "error") if line > 1 and _is_plain(path, line, block) else None
    except pa.ArrowInvalid:
        return None


def _is_array(path: Path, start: bytes) -> bool:
    """Whether a file holds an array: its name ends in .json, and it begins with a bracket."""
    is_json = ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]
    return is_json and start.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line, block)``: blocks of whole lines, about `_BLOCK_BYTES`, and their first line (from 1)."""
    try:
        with open_stream(path) as stream:
            start = stream.read(min(_FIRST_BYTES, _BLOCK_BYTES))
            if _is_array(path, start):
                yield from array_blocks(path, stream, start)
                return
            for line, block in line_blocks(path, stream, start, _BLOCK_BYTES):
                if not block.isspace():
                    yield line, block
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _parse(path: Path, line: int, block: bytes, schema: pa.Schema, others: str) -> pa.Table:
    try:
        block.decode()
        if _is_plain(path, line, block):
            return _read_json(block, schema, others)
    except (UnicodeDecodeError, pa.ArrowInvalid):
        pass
    lines = enumerate(block.split(b"\n"), line)
    records = [_record(path, number, text) for number, text in lines if text.strip()]
    try:
        return _read_json("\n".join(map(json.dumps, records)).encode(), schema, others)
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}, from line {line} on: {_reason(error)}") from None


def _read_json(block: bytes, schema: pa.Schema, others: str) -> pa.Table:
    if not block.strip():
        return schema.empty_table()
    return pajson.read_json(
        pa.BufferReader(block),
        read_options=pajson.ReadOptions(block_size=len(block) + 1),
        parse_options=pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others),
    )


def _record(path: Path, number: int, text: bytes) -> Any:
    """Parse one line in Python, which is slow, to find the line of an error or to replace surrogates."""
    _check_depth(path, number, text)
    try:
        record = json.loads(text, strict=False)
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {number}: {NOT_UTF8}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{path}, line {number}: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}: not a JSON object but {type(record).__name__}")
    return _mended(record)


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


def _reason(error: Exception) -> str:
    changed = re.search(r"Column\(/(.+?)\) changed from (\w+) to (\w+) in row (\d+)", str(error))
    if changed:
        return f"column {changed[1]!r} holds {changed[3]} values where {changed[2]} is expected"
    return text_of(error)


def _unify(path: Path, known: pa.Schema, found: pa.Schema) -> pa.Schema:
    try:
        return pa.unify_schemas([known, found], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"{path}: a column holds values of different types: {error}") from None


def _without_times(schema: pa.Schema) -> pa.Schema:
    """Replace time types by text: Arrow reads some strings as times and would write them differently."""
    return pa.schema([field.with_type(_without_time(field.type)) for field in schema])


def _without_time(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_time(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_time(field.type)) for field in kind])
    return kind


def _is_plain(path: Path, line: int, block: bytes) -> bool:
    """Whether Arrow may parse `block`, which begins at `line`: each line is an object, not nested too deeply.

    A value that spans lines or hides a line's end may be deeper than any of its lines, so such a block is
    not plain. A block with spaces around its lines is not plain either. Python parses these blocks.

    Raises
    ------
    InputError
        A line is nested too deeply.
    """
    opened = block.translate(None, _NOT_OPENING).split(b"\n")
    if max(map(len, opened)) > MAX_DEPTH:
        lines = block.split(b"\n")
        for number, brackets in enumerate(opened):
            if len(brackets) > MAX_DEPTH:
                _check_depth(path, line + number, lines[number])
    raw = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(raw))
    starts = np.concatenate([[0], ends[:-1] + 1])
    starts, ends = starts[starts < ends], ends[starts < ends]  # without blank lines
    last = ends - 1
    if b"\r" in block:
        last = last - (raw[last] == ord("\r"))
        if block.count(b"\r") != int((raw[ends - 1] == ord("\r")).sum()):
            return False
    return bool((raw[starts] == ord("{")).all() and (raw[last] == ord("}")).all())


def _check_depth(path: Path, number: int, text: bytes) -> None:
    """Raise `InputError` if the line is nested too deeply."""
    if text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InputError(f"{path}, line {number}: lists and objects nested deeper than {MAX_DEPTH}")


def _slices(path: Path, line: int, block: bytes) -> Iterator[tuple[int, bytes]]:
    """Cut the block into pieces with few enough lines that all keys of the block can be columns of each.

    Raises
    ------
    InputError
        There are too many keys.
    """
    keys = block.count(b'":')
    if keys > MAX_KEYS or any(b'"' + space in block for space in (b" ", b"\t", b"\r", b"\n")):
        keys = len({key for key, colon in _KEY.findall(block) if colon})
    if keys > MAX_KEYS:
        raise InputError(
            f"{path}, from line {line} on: {keys:,} different keys; at most {MAX_KEYS:,} can be columns. "
            "Are some of them data?"
        )
    yield from _cut(line, block, keys)


def _cut(line: int, block: bytes, columns: int) -> Iterator[tuple[int, bytes]]:
    """Cut the block into pieces with few enough lines that each can have that many columns."""
    rows = max(_MAX_CELLS // max(columns, 1), 1)
    if block.count(b"\n") <= rows:
        yield line, block
        return
    lines = block.split(b"\n")
    for start in range(0, len(lines), rows):
        yield line + start, b"\n".join(lines[start : start + rows])


def _check_integers(path: Path, line: int, block: bytes, schema: pa.Schema) -> None:
    """Raise `InputError` if a float column contains an integer that a float cannot hold exactly."""
    floating = [field.name for field in schema if pa.types.is_floating(field.type)]
    if not floating or not _LONG_INTEGER.search(block):
        return
    for number, text in enumerate(block.split(b"\n"), line):
        if not _LONG_INTEGER.search(text):
            continue
        try:
            record = json.loads(text, strict=False)
            lossy = [
                name for name in floating if isinstance(record.get(name), int) and _is_lossy(record[name])
            ]
        except ValueError as error:  # thousands of digits
            raise InputError(f"{path}, line {number}: {error}") from None
        if lossy:
            raise InputError(
                f"{path}, line {number}: column {lossy[0]!r} holds {str(record[lossy[0]])[:40]}, which a "
                "floating-point number cannot hold exactly; write it as a string"
            )


def _is_lossy(value: int) -> bool:
    try:
        return int(float(value)) != value
    except OverflowError:
        return True


def _for_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replace 32-bit floats by the 64-bit floats with the same shortest notation: 0.1 stays 0.1."""
    if pa.types.is_float32(column.type):
        return column.cast(pa.string()).cast(pa.float64())
    return column


def _json_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    except ValueError:  # NaN or infinity
        return json.dumps(_finite(row), ensure_ascii=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _holds_bytes(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        inner = [kind.value_type]
    return any(test(kind) for test in tests) or any(map(_holds_bytes, inner))
