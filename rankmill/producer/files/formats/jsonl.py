r"""Reads JSON Lines or a JSON array of objects, and writes JSON Lines; gzip or zstd may compress them.

Rows are parsed to get the texts to score. An output in JSON Lines has the lines of the input, with keys
added. The rest of a line changes only where a list is unrolled, or a column is read as text.

In an output with types, such as Parquet, a column has the type that fits all of its values. If no type fits,
the column is text. Lone surrogates (``\ud800``), which are not valid in Unicode text, become U+FFFD in texts
that are sent or converted.

A hostile file could be nested so deeply that parsers crash, or have a column for every row, so the depth and
the number of columns are bounded.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.wire import is_text
from rankmill.producer.files.formats.base import (
    BYTE_ORDER_MARK,
    NOT_UTF8,
    ROW,
    Format,
    ReadOptions,
    Survey,
    every_type,
    is_empty,
    line_blocks,
    undictionaried,
)
from rankmill.producer.files.formats.json_array import MAX_DEPTH, array_blocks
from rankmill.producer.files.formats.text import (
    TextWriter,
    cannot_be_parquet,
    cannot_be_text,
    refuse,
    undictionary,
    values_for_text,
)
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20

MAX_KEYS = 10_000
"""The rows of a file together may have at most this many different keys; a file with more is refused. A
nested column with more fields becomes text.
"""

_PART_ROWS = 128

_SAFE_INTEGER = 2**53
"""A 64-bit floating-point number holds every integer up to this size exactly."""

_NUMBERS = "write numbers as text, in quotes"
_LISTS = "; --list-columns {} makes a row of each item of lists, and --messages-column is for conversations"

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACES = " \t\r\n"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_OPENING = bytes(set(range(256)) - set(b"[{\n"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_decode = json.JSONDecoder(strict=False).decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode
_encode_row = json.JSONEncoder(ensure_ascii=False).encode

Record = dict[str, Any]


class JsonlReader:
    """Reads JSON Lines, or an array of objects in a .json file, whose items count as lines.

    A column is converted to the type that the caller asks for. In a column of text, strings stay as they are,
    and other values become JSON. But in the columns of texts to score, all values must be strings or null.
    The column `ROW` holds the lines.
    """

    def __init__(self, path: AnyPath, texts: Sequence[str], options: ReadOptions) -> None:
        self._path, self._texts, self._options = path, texts, options

    def shown_columns(self) -> pa.Schema:
        """Return the keys of the first record, as columns of text."""
        first = next((part.records[0] for part in _parts(self._path)), {})
        _check_keys(self._path, 1, first)
        return pa.schema([(name, pa.string()) for name in first])

    def survey(self, *, find_nulls: bool) -> Survey:
        """Parse the file to find its columns. If the type of a nested column was widened meanwhile, parse the
        file again, to check that all values fit.
        """
        rows, null = 0, None
        columns = _Columns(self._path, self._texts, self._options)
        way_out = _NUMBERS if self._options.way_out else f"{_NUMBERS}{_LISTS}"
        for part in _parts(self._path):
            columns.add(part)
            for name in self._options.messages:
                part.values_of(name, (list, str), "a conversation: a list of {role, content}, or its JSON")
            texts = [part.values_of(name, (str,), f"text ({way_out.format(name)})") for name in self._texts]
            if null is None and (lacking := [values.index(None) for values in texts if None in values]):
                null = rows + min(lacking)
            rows += len(part.records)
        if columns.unsure:
            for part in _parts(self._path):
                columns.check(part)
        columns.finish()
        schema = pa.schema(list(columns.types.items()))
        return Survey(schema, rows, null, typed=False, as_asked=True, mixed=sorted(columns.mixed))

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows, at most `_PART_ROWS` at a time."""
        for part in _parts(self._path):
            yield self._batch(part, schema)

    def _batch(self, part: _Part, schema: pa.Schema) -> pa.RecordBatch:
        arrays = [self._array(part, field) for field in schema]
        if not arrays:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(part.records), pa.struct([])))
        return pa.record_batch(arrays, names=schema.names)

    def _array(self, part: _Part, field: pa.Field) -> pa.Array:
        name, kind = field.name, field.type
        if name == ROW:
            return _array(part.lines, pa.string())
        if name in self._texts:
            return _array(part.values_of(name, (str,), "text"), pa.string())
        values = part.values(name.removeprefix(ROW))
        if is_text(kind) and not pa.types.is_null(kind):
            return _array(list(map(value_as_text, values)), pa.string())
        if kind == pa.list_(pa.string()):
            values = [
                list(map(value_as_text, value)) if isinstance(value, list) else value for value in values
            ]
        try:
            return _array(values, kind)
        except (pa.ArrowException, OverflowError):
            wanted = f"{kind}, which fits the other files (--text-columns {name} reads it as text)"
            raise part.error(_first_bad(values, kind), name, wanted) from None


class JsonlWriter(TextWriter):
    """Writes one JSON object for each row, with times and decimals as strings, and NaN and infinity as null.

    If the schema has a column `ROW`, this column has the objects, and the other columns are added to the
    objects.
    """

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        refuse(schema, "JSON", cannot_be_text)
        super().__init__(path, schema, compression)
        self._not_finite = 0

    def close(self, metadata: Mapping[str, str]) -> None:
        super().close(metadata)
        if self._not_finite:
            logger.warning(
                "%s values held NaN or infinity, which JSON cannot hold: they are null now",
                f"{self._not_finite:,}",
            )

    def _lines(self, table: pa.Table) -> bytes:
        names = [name for name in self._schema.names if name != ROW]
        columns = [map(self._json_of, _for_json(name, table[name])) for name in names]
        named = [
            [f"{_encode(name)}: {text}" for text in column]
            for name, column in zip(names, columns, strict=True)
        ]
        added = map(", ".join, zip(*named, strict=True))
        lines: Iterable[str] = (f"{{{fields}}}" for fields in added)
        if ROW in self._schema.names:
            lines = map(_with_fields, table[ROW].to_pylist(), added)
        return "".join(f"{line}\n" for line in lines).encode()

    def _json_of(self, value: object) -> str:
        if type(value) is float and math.isfinite(value):
            return repr(value)  # the same text as the encoder's, in a tenth of the time
        try:
            return _encode(value)
        except ValueError:  # NaN or infinity
            self._not_finite += 1
            return _encode(_finite(value))


def with_keys(row: str, added: Mapping[str, object]) -> str:
    """Return the JSON object `row` with the keys and values of `added` at its end."""
    return _with_fields(row, _encode(added)[1:-1]) if added else row


def _with_fields(row: str, fields: str) -> str:
    before = row[:-1].rstrip(_SPACES)
    return f"{before}{'' if before == '{' else ', '}{fields}}}"


def with_items(row: str, lists: Sequence[str]) -> Iterator[str]:
    """Unroll lists of a JSON object: ``{"p": [1, 2]}`` gives ``{"p": 1}`` and ``{"p": 2}``."""
    record = _decode(row)
    for items in zip(*(record.get(name) or () for name in lists), strict=True):
        yield _row_of({**record, **dict(zip(lists, items, strict=True))})


def with_text(row: str, names: Collection[str]) -> str:
    """Return the JSON object `row` with the values of its keys `names` turned into text."""
    record = _decode(row)
    return _row_of({**record, **{name: value_as_text(record[name]) for name in names if name in record}})


def _row_of(record: Record) -> str:
    """Encode a row as JSON, with lone surrogates as escapes, because Arrow takes only valid UTF-8."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", _encode_row(record))


def value_as_text(value: object) -> str | None:
    """A value as text: a string stays as it is, any other value becomes its JSON, and null stays null."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class _Part:
    """Consecutive rows of a file of JSON Lines: the lines, the objects in them, and the line numbers."""

    path: AnyPath
    lines: Sequence[str]
    records: Sequence[Record]
    numbers: Sequence[int]

    def values(self, name: str) -> list[Any]:
        return [record.get(name) for record in self.records]

    def values_of(self, name: str, kinds: tuple[type, ...], wanted: str) -> list[Any]:
        """Return the value of the key `name` in each row. Raises `InputError` if a value is neither null nor
        of one of these `kinds`.
        """
        values = self.values(name)
        if not set(map(type, values)) <= {*kinds, type(None)}:
            place = next(at for at, value in enumerate(values) if not isinstance(value, (*kinds, type(None))))
            raise self.error(place, name, wanted)
        return values

    def error(self, place: int, name: str, wanted: object) -> InputError:
        value = value_as_text(self.records[place].get(name))
        where = f"{self.path}, line {self.numbers[place]}"
        return InputError(f"{where}: column {name!r} holds {value!r:.60}, not {wanted}")


class _Columns:
    """Finds the columns of a file of JSON Lines and their types, by reading its rows."""

    def __init__(self, path: AnyPath, texts: Sequence[str], options: ReadOptions) -> None:
        self.types: dict[str, pa.DataType] = {}
        self.mixed: set[str] = set()
        self.unsure: set[str] = set()
        """Nested columns whose type was widened. Values that were read before may not fit the new type."""
        self._path, self._texts, self._options = path, texts, options
        self._largest: dict[str, int] = {}

    def add(self, part: _Part) -> None:
        names = dict.fromkeys(chain.from_iterable(part.records))
        new = [name for name in names if name not in self.types]
        _check_keys(self._path, part.numbers[-1], new)
        self.types |= {name: pa.null() if self._has_type(name) else pa.string() for name in new}
        if len(self.types) > MAX_KEYS:
            raise InputError(
                f"{self._path}, up to line {part.numbers[-1]}: {len(self.types):,} different keys; at most "
                f"{MAX_KEYS:,} can be columns. Are some of them data?"
            )
        wanted = {name for name in names if self._has_type(name)} - self.mixed
        for name, values in _present(part.records, wanted).items() if wanted else ():
            self._narrow(name, values)

    def check(self, part: _Part) -> None:
        """Turn each column of `unsure` into text if its values in these rows do not fit its type."""
        for name in list(self.unsure):
            try:
                _array(part.values(name), self.types[name])
            except (pa.ArrowException, OverflowError):
                self._mix(name)

    def finish(self) -> None:
        """Turn columns that Parquet cannot hold into text."""
        for name, kind in list(self.types.items()):
            if cannot_be_parquet(kind):
                self._mix(name)

    def _has_type(self, name: str) -> bool:
        """Whether the type of a column is found from its values. If not, the column is text."""
        return (self._options.typed or name in self._options.lists) and name not in self._texts

    def _narrow(self, name: str, values: Sequence[Any]) -> None:
        """Widen the type of a column so that it fits further values. If no type does, turn the column into
        text.
        """
        before, new = self.types[name], _type_of(values)
        if new is not None and pa.types.is_integer(new):
            numbers = [value for value in values if value is not None] if None in values else values
            self._largest[name] = max(self._largest.get(name, 0), *numbers, -min(numbers))
        both = None if new is None else _unified(before, new)
        if both is None or (pa.types.is_floating(both) and self._largest.get(name, 0) > _SAFE_INTEGER):
            self._mix(name)
            return
        if pa.types.is_nested(both) and not pa.types.is_null(before) and not before == new == both:
            self.unsure.add(name)
        self.types[name] = both

    def _mix(self, name: str) -> None:
        """Turn a column into text. A column that is to be unrolled becomes lists of text."""
        self.types[name] = pa.list_(pa.string()) if name in self._options.lists else pa.string()
        self.mixed.add(name)
        self.unsure.discard(name)


def _check_keys(path: AnyPath, number: int, keys: Iterable[str]) -> None:
    """Refuse a key with a lone surrogate, because no column can have such a name."""
    if (key := next(filter(_SURROGATE.search, keys), None)) is not None:
        raise InputError(f"{path}, up to line {number}: the key {key!r} has a lone surrogate: rename it")


def _present(records: Sequence[Record], wanted: set[str]) -> Mapping[str, Sequence[Any]]:
    """Collect the values of each `wanted` column. A record without the column adds no value."""
    by_name: dict[str, list[Any]] = {}
    for record in records:
        for name, value in record.items():
            if name in wanted:
                by_name.setdefault(name, []).append(value)
    return by_name


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """Find the Arrow type that fits all of the values. Returns ``None`` if no type fits, or if the type would
    have too many fields.
    """
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.null()
    if kinds in ({dict}, {list}):
        keys: set[str] = set()
        _add_keys(values, keys)
        # the values become text, because no field's name can have a lone surrogate
        if len(keys) > MAX_KEYS or any(map(_SURROGATE.search, keys)):
            return None
    try:
        kind = _array(values).type
    except (pa.ArrowException, OverflowError):
        return None
    return None if _has_truth_as_number(values, kind) else kind


def _has_truth_as_number(values: Iterable[Any], kind: pa.DataType) -> bool:
    """Whether Arrow would silently turn true or false in `values` into a floating-point number."""
    if pa.types.is_floating(kind):
        return bool in set(map(type, values))
    there = [value for value in values if value is not None] if pa.types.is_nested(kind) else []
    if pa.types.is_struct(kind):
        return any(
            _has_truth_as_number([value.get(each.name) for value in there], each.type) for each in kind
        )
    return bool(there) and _has_truth_as_number(chain.from_iterable(there), kind.value_type)


def _unified(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if one == other:
        return one
    both = unified([one, other])
    return both if both is not None and _width(both) <= MAX_KEYS else None


def unified(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """Find a type that fits all values of several types, such as double for int64 and double. Returns
    ``None`` if there is no such type.
    """
    if len(set(kinds)) > 1:  # Arrow cannot unify a dictionary with plain values
        kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds]
    try:
        schemas = [pa.schema([("", kind)]) for kind in dict.fromkeys(kinds)]
        both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    # Arrow would silently round decimals to floating-point numbers
    return both if set().union(*map(_decimals, kinds)) <= _decimals(both) else None


def _decimals(kind: pa.DataType) -> set[tuple[str, ...]]:
    """Return the places of the decimals in a type: the names of the structs' fields on the way to each."""
    kind = undictionaried(kind)
    if pa.types.is_decimal(kind):
        return {()}
    names = [field.name for field in kind] if pa.types.is_struct(kind) else map(str, range(kind.num_fields))
    inside = (kind.field(place).type for place in range(kind.num_fields))
    return {(name, *place) for name, each in zip(names, inside, strict=True) for place in _decimals(each)}


def _add_keys(value: Any, keys: set[str]) -> None:
    if isinstance(value, dict):
        keys.update(value)
        value = value.values()
    for item in value:
        if len(keys) > MAX_KEYS:
            return
        if isinstance(item, dict | list):
            _add_keys(item, keys)


def _width(kind: pa.DataType) -> int:
    """Count a type and all types inside of it."""
    return sum(1 for _ in every_type(kind))


def _array(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # the text has lone surrogates
        return pa.array([_mended(value) for value in values], kind)


def _first_bad(values: Sequence[Any], kind: pa.DataType) -> int:
    """Return the index of the first value that does not fit the type `kind`. If each value fits when it
    stands alone, return 0.
    """
    for place, value in enumerate(values):
        try:
            _array([value], kind)
        except (pa.ArrowException, OverflowError):
            return place
    return 0


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


def _is_array(path: AnyPath, start: bytes) -> bool:
    """Whether a file holds an array: its name ends in .json, and the text begins with a bracket."""
    is_json = ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]
    return is_json and start.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _blocks(path: AnyPath) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line, block)``. A block has whole lines; ``line`` is the number (from 1) of the first one. The
    items of an array count as lines.
    """
    try:
        with open_stream(path) as stream:
            start = stream.read(_BLOCK_BYTES)
            if _is_array(path, start):
                yield from array_blocks(path, stream, start)
                return
            has_lines = False
            for line, block in line_blocks(path, stream, start, _BLOCK_BYTES):
                if not block.isspace():
                    yield line, block
                    has_lines = True
            if not has_lines:
                raise is_empty(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _parts(path: AnyPath) -> Iterator[_Part]:
    """Yield the parsed rows of a file, only a few at a time, so that their Python objects fit into the caches
    of the processor.
    """
    for first, block in _blocks(path):
        _check_depths(path, first, block)
        try:
            every = [line.strip(_SPACES) for line in block.decode().split("\n")]
        except UnicodeDecodeError:
            every = [_utf8(path, number, line) for number, line in enumerate(block.split(b"\n"), first)]
        numbers = [number for number, line in enumerate(every, first) if line]
        lines = [line for line in every if line]
        for start in range(0, len(lines), _PART_ROWS):
            some = slice(start, start + _PART_ROWS)
            records = list(map(partial(_record, path), numbers[some], lines[some]))
            yield _Part(path, lines[some], records, numbers[some])


def _utf8(path: AnyPath, number: int, line: bytes) -> str:
    try:
        return line.decode().strip(_SPACES)
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {number}: {NOT_UTF8}") from None


def _record(path: AnyPath, number: int, line: str) -> Record:
    try:
        record = _decode(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # the line has an integer of thousands of digits
        raise InputError(f"{path}, line {number}: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}: not a JSON object but {type(record).__name__}")
    return record


def _check_depths(path: AnyPath, first: int, block: bytes) -> None:
    opened = block.translate(None, _NOT_OPENING).split(b"\n")
    if max(map(len, opened)) > MAX_DEPTH:
        for number, line in enumerate(block.split(b"\n"), first):
            _check_depth(path, number, line)


def _check_depth(path: AnyPath, number: int, line: bytes) -> None:
    if line.count(b"{") + line.count(b"[") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", line).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InputError(f"{path}, line {number}: lists and objects nested deeper than {MAX_DEPTH}")


def _for_json(name: str, column: pa.ChunkedArray) -> list[Any]:
    """Convert a column to values for the JSON encoder. A 32-bit float becomes the 64-bit float that is
    written with the same few digits, so that 0.1 stays 0.1. Raises `InputError` for text that is not valid
    UTF-8.
    """
    column = undictionary(column)
    if pa.types.is_float32(column.type):
        values: list[Any] = column.cast(pa.string()).cast(pa.float64()).to_pylist()
        return values
    try:
        return values_for_text(column)
    except UnicodeDecodeError:
        raise InputError(
            f"column {name!r} holds text that is not valid UTF-8, which JSON cannot hold; name an output "
            "that ends in .parquet"
        ) from None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


JSONL = Format((".jsonl", ".ndjson"), JsonlReader, JsonlWriter)
JSON = Format((".json",), JsonlReader, None)
