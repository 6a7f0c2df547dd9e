r"""JSON Lines, or a JSON array of objects; plain or compressed with gzip or zstd.

A file is read in blocks of whole lines, and Arrow parses each block. Types are inferred for each
block and unified over the file, and an error can name its line. Lone surrogates (``\ud800``), which
are not valid in Unicode text, become U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.readers import Survey, first_null
from rankmill.producer.files.readers.json_array import array_blocks
from rankmill.producer.files.readers.json_bounds import (
    MAX_KEYS,
    MAX_LINE_BYTES,
    check_depth,
    check_integers,
    cut,
    is_plain,
    slices,
)
from rankmill.producer.files.stores.reading import open_stream

_BLOCK_BYTES = 16 << 20

_FIRST_BYTES = 1 << 20
"""Size of the first block, in which all columns are new and must be counted."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonlReader:
    """Reads one JSON object on each line; in .json also an array of objects, whose items count as lines."""

    def survey(self, path: Path, texts: Sequence[str], *, find_nulls: bool) -> Survey:
        """See `Reader.survey`; parses the file once."""
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

    def batches(self, path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`; a batch is a block of the file."""
        for first, whole in _blocks(path):
            for line, block in cut(first, whole, len(schema)):
                yield from _parse(path, line, block, schema, "ignore").to_batches()


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
        for line, block in slices(path, first, whole):
            table = _parse(path, line, block, texts, "infer")
            known = _without_times(table.schema)
            check_integers(path, line, block, known)
            yield table


def _same(path: Path, line: int, block: bytes, schema: pa.Schema) -> pa.Table | None:
    """Parse the block with `schema`; ``None`` if it has other columns or types, or needs cutting."""
    if len(schema) * block.count(b"\n") > len(block):
        return None  # rows have few of the keys: the block must be cut
    try:
        return _read_json(block, schema, "error") if line > 1 and is_plain(path, line, block) else None
    except pa.ArrowInvalid:
        return None


def _is_array(path: Path, start: bytes) -> bool:
    """Whether a file holds an array: its name ends in .json, and it begins with a bracket."""
    is_json = ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]
    return is_json and start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line, block)``: blocks of whole lines, about `_BLOCK_BYTES`, and their first line (from 1)."""
    line, rest = 1, b""
    try:
        with open_stream(path) as stream:
            size = _FIRST_BYTES
            while data := stream.read(min(size, _BLOCK_BYTES)):
                if size == _FIRST_BYTES and _is_array(path, data):
                    yield from array_blocks(path, stream, data)
                    return
                size = _BLOCK_BYTES
                end = data.rfind(b"\n") + 1
                if len(rest) + (data.find(b"\n") if end else len(data)) > MAX_LINE_BYTES:
                    raise InputError(f"{path}, line {line}: longer than {MAX_LINE_BYTES >> 20} MiB")
                if end == 0:
                    rest += data
                    continue
                block = rest + data[:end]
                if not block.isspace():
                    yield line, block
                line += rest.count(b"\n") + data.count(b"\n", 0, end)
                rest = data[end:]
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if rest.strip():
        yield line, rest


def _parse(path: Path, line: int, block: bytes, schema: pa.Schema, others: str) -> pa.Table:
    if line == 1:
        block = block.removeprefix(b"\xef\xbb\xbf")
    try:
        block.decode()
        if is_plain(path, line, block):
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
    check_depth(path, number, text)
    try:
        record = json.loads(text, strict=False)
    except UnicodeDecodeError:
        raise InputError(
            f"{path}, line {number}: not valid UTF-8; "
            "convert the file first, for example: iconv -f latin1 -t utf-8"
        ) from None
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
    return " ".join(str(error).split())


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
