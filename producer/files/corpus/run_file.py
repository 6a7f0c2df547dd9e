"""Runs: which passages were found for each query, as TREC, TSV, CSV, JSON Lines or Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.inputs import PARQUET, InputFile
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS
from rankmill.producer.files.readers import Reader
from rankmill.producer.files.readers.choice import Options, choose
from rankmill.producer.files.stores.reading import open_stream

SCHEMA = pa.schema(
    [
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        ("run_rank", pa.int64()),
        ("run_score", pa.float64()),
    ]
)
"""Columns of every run; rank and score are null where the file has none."""

_BLOCK_BYTES = 4 << 20
_ROWS = 65_536
_SPACES = re.compile(rb"[ \t]+")
_RANKS = ("rank", "run_rank", "position")
_SCORES = ("score", "run_score", "sim", "similarity")
_PLAIN = {
    2: ("query_id", "doc_id"),
    3: ("query_id", "doc_id", "run_rank"),
    4: ("query_id", "doc_id", "run_rank", "run_score"),
    6: ("query_id", "", "doc_id", "run_rank", "run_score", ""),
}
"""Columns of text without a header, by their number; six are TREC's."""


def read_run(file: InputFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a run in order, as batches of `SCHEMA`.

    Text has fields between tabs or spaces: query and passage, or these and the rank (a whole number) or the
    score, or all four, or the six of TREC; or a header names them. A row of JSON or Parquet may hold lists
    of passages, ranks and scores.

    Raises
    ------
    InputError
        The file is damaged, or no run.
    """
    if file.kind in PARQUET or file.kind in {".jsonl", ".ndjson", ".json", ".csv"}:
        yield from _records(file)
    else:
        yield from _lines(file.path)


def _records(file: InputFile) -> Iterator[pa.RecordBatch]:
    reader: Reader = choose(file, [], Options())
    schema = reader.survey(file.path, [], find_nulls=False).schema
    if not schema.names:
        return
    names = _named(file.path, schema.names)
    lists = [name for name in names.values() if name and pa.types.is_list(schema.field(name).type)]
    if lists:
        reader = choose(file, [], Options(lists=lists))
    asked = [schema.field(name) for name in schema.names if name in names.values()]
    if file.kind == ".csv":
        asked = [pa.field(name, pa.string()) for name in schema.names]
    elif lists:
        asked = [field.with_type(field.type.value_type) if field.name in lists else field for field in asked]
    row = 0
    for batch in reader.batches(file.path, pa.schema(asked), _ROWS):
        columns = [
            _column(file.path, batch[names[name]] if names[name] else None, field, len(batch), row)
            for name, field in zip(SCHEMA.names, SCHEMA, strict=True)
        ]
        row += len(batch)
        yield pa.record_batch(columns, schema=SCHEMA)


def _column(path: Path, column: pa.Array | None, field: pa.Field, rows: int, first: int) -> pa.Array:
    if column is None:
        return pa.nulls(rows, field.type)
    try:
        found = column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(f"{path}: {field.name} holds {column.type}, not {field.type}") from None
    if field.name in {"query_id", "doc_id"} and found.null_count:
        row = first + pc.index(pc.is_null(found), True).as_py()
        raise InputError(f"{path}: row {row} (counted from 0) has no {field.name}")
    return found


def _named(path: Path, names: Sequence[str]) -> dict[str, str]:
    """The file's column for each of `SCHEMA`; empty where there is none."""
    usual = {"query_id": QUERY_IDS, "doc_id": PASSAGE_IDS, "run_rank": _RANKS, "run_score": _SCORES}
    found = {name: next((each for each in known if each in names), "") for name, known in usual.items()}
    for name in ("query_id", "doc_id"):
        if not found[name]:
            raise InputError(
                f"{path}: no column {' or '.join(usual[name])}; it has {', '.join(map(repr, names))}"
            )
    return found


@dataclass(frozen=True)
class _Fields:
    """The fields of a line: the name of each, empty for those that are not used."""

    names: tuple[str, ...]
    has_header: bool


def _lines(path: Path) -> Iterator[pa.RecordBatch]:
    fields: _Fields | None = None
    for first, block in _blocks(path):
        line, text = first, block
        if fields is None:
            text = text.lstrip(b"\n")
            line += len(block) - len(text)
            if not text:
                continue
            fields = _fields(path, text.split(b"\n", 1)[0])
            if fields.has_header:
                text, line = text.partition(b"\n")[2], line + 1
        if text.strip():
            yield from _parsed(path, line, text, fields)


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, with one space between two fields, and the number of their first line."""
    line, rest = 1, b""
    try:
        with open_stream(path) as stream:
            while data := stream.read(_BLOCK_BYTES):
                data = rest + data.removeprefix(b"\xef\xbb\xbf") if line == 1 else rest + data
                end = data.rfind(b"\n") + 1
                block, rest = data[:end], data[end:]
                if block:
                    yield line, _spaced(block)
                line += block.count(b"\n")
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if rest.strip():
        yield line, _spaced(rest)


def _spaced(block: bytes) -> bytes:
    block = block.translate(bytes.maketrans(b"\t", b" "), b"\r")
    if b"  " in block:
        block = _SPACES.sub(b" ", block)
    if b" \n" in block or b"\n " in block or block[:1] == b" " or block[-1:] == b" ":
        block = b"\n".join(line.strip(b" ") for line in block.split(b"\n"))
    return block


def _fields(path: Path, first: bytes) -> _Fields:
    """What the first line says about the fields."""
    words = first.decode("utf-8", "replace").split()
    if words and words[0].lower() in QUERY_IDS:
        named = _named(path, words)
        roles = {column: name for name, column in named.items() if column}
        return _Fields(tuple(roles.get(word, "") for word in words), has_header=True)
    if len(words) not in _PLAIN:
        raise InputError(
            f"{path}, line 1: {len(words)} fields; a run has two (query, passage), three (and the rank or "
            "the score), four (rank and score), or the six of TREC, between tabs or spaces"
        )
    names = _PLAIN[len(words)]
    if len(words) == 3 and not re.fullmatch(r"[0-9]+", words[2]):
        names = ("query_id", "doc_id", "run_score")
    return _Fields(names, has_header=False)


def _parsed(path: Path, line: int, block: bytes, fields: _Fields) -> Iterator[pa.RecordBatch]:
    names = [name or f"unused {place}" for place, name in enumerate(fields.names)]
    kinds = {name: SCHEMA.field(name).type for name in names if name in SCHEMA.names}
    try:
        table = pcsv.read_csv(
            pa.BufferReader(block),
            read_options=pcsv.ReadOptions(column_names=names, block_size=len(block) + 1, use_threads=False),
            parse_options=pcsv.ParseOptions(delimiter=" ", quote_char=False),
            convert_options=pcsv.ConvertOptions(
                column_types=kinds, include_columns=list(kinds), strings_can_be_null=False
            ),
        )
    except pa.ArrowException as error:
        raise _explained(path, line, block, fields, error) from None
    for batch in table.combine_chunks().to_batches():
        columns = [
            batch[name] if name in kinds else pa.nulls(len(batch), SCHEMA.field(name).type)
            for name in SCHEMA.names
        ]
        yield pa.record_batch(columns, schema=SCHEMA)


def _explained(path: Path, line: int, block: bytes, fields: _Fields, error: Exception) -> InputError:
    """The first line that has another number of fields, or a value of the wrong type."""
    tests = {"run_rank": int, "run_score": float}
    for number, text in enumerate(block.split(b"\n"), line):
        words = text.split()
        if words and len(words) != len(fields.names):
            return InputError(
                f"{path}, line {number}: {len(words)} fields, not {len(fields.names)} as in line 1"
            )
        for name, word in zip(fields.names, words, strict=False):
            try:
                tests.get(name, bytes)(word)
            except ValueError:
                shown = word.decode("utf-8", "replace")
                return InputError(
                    f"{path}, line {number}: {name.removeprefix('run_')} is {shown!r}, no number"
                )
    return InputError(f"{path}, from line {line} on: {' '.join(str(error).split())}")
