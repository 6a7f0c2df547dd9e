"""TREC's files, which have a ranking (a run file) or judgements (qrels). Tabs or spaces separate the fields
of a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import NOT_UTF8, Format, is_empty, line_blocks, text_of
from rankmill.producer.files.formats.text import TextWriter, as_text, joined
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream

_BLOCK_BYTES = 4 << 20
_SPACES = re.compile(rb"[ \t]+")


@dataclass(frozen=True)
class LineFormat:
    """A kind of file with one row on each line.

    Parameters
    ----------
    schema
        The columns.
    by_count
        The names of the fields on a line, for each number of fields. The name of a field that is not used is
        empty.
    header
        Words with which a header may begin.
    kinds
        The end of the error message for a first line with a wrong number of fields. For example: "judgements
        have four (query, 0, document, relevance) or three (query, document, relevance)".
    """

    schema: pa.Schema
    by_count: Mapping[int, Sequence[str]]
    header: Sequence[str]
    kinds: str


def read_lines(
    path: AnyPath, lines: LineFormat, fields_of: Callable[[Sequence[str]], Sequence[str]] = lambda words: ()
) -> Iterator[pa.RecordBatch]:
    """Yield the lines of a file in order, as batches of ``lines.schema``; missing columns are null.

    Parameters
    ----------
    path
        The file.
    lines
        The kind of file: its columns, and the fields that a line may have.
    fields_of
        Returns the names of the fields, given the words of the first line. If it returns none, the number of
        words says which fields they are.

    Raises
    ------
    InputError
        The file is empty or cannot be read, or a line has another number of fields or a wrong value.
    """
    fields: Sequence[str] = ()
    try:
        with open_stream(path) as stream:
            for first, raw in line_blocks(path, stream, stream.read(_BLOCK_BYTES), _BLOCK_BYTES):
                block, line = _spaced(raw), first
                if not fields:
                    block = block.lstrip(b"\n")
                    line += raw.count(b"\n") - block.count(b"\n")
                    if not block:
                        continue
                    words = block.split(b"\n", 1)[0].decode("utf-8", "replace").split()
                    has_header = bool(words) and words[0].lower() in lines.header
                    fields = fields_of(words) or lines.by_count.get(len(words), ())
                    if not fields:
                        raise InputError(f"{path}, line {line}: {len(words)} fields; {lines.kinds}")
                    if has_header:
                        block, line = block.partition(b"\n")[2], line + 1
                if block.strip():
                    yield from _parsed(path, line, block, fields, lines.schema)
            if not fields:
                raise is_empty(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


class TrecWriter(TextWriter):
    """Writes ``query Q0 document rank score tag``; `columns` are query id, document id, rank and score."""

    def __init__(
        self, path: Path, schema: pa.Schema, compression: str | None, columns: Sequence[str], tag: str
    ) -> None:
        super().__init__(path, schema, compression)
        self._columns = columns
        self._tag = tag

    def _lines(self, table: pa.Table) -> pa.Buffer:
        query, document, rank, score = (as_text(table[name]) for name in self._columns)
        return joined([query, pa.scalar("Q0"), document, rank, score, pa.scalar(self._tag)], " ")


def _spaced(block: bytes) -> bytes:
    """Separate the fields in a block of lines by single spaces, and delete carriage returns."""
    block = block.translate(bytes.maketrans(b"\t", b" "), b"\r")
    if b"  " in block:
        block = _SPACES.sub(b" ", block)
    if b" \n" in block or b"\n " in block or block[:1] == b" " or block[-1:] == b" ":
        block = b"\n".join(line.strip(b" ") for line in block.split(b"\n"))
    return block


def _parsed(
    path: AnyPath, line: int, block: bytes, fields: Sequence[str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    names = [name or f"unused {place}" for place, name in enumerate(fields)]
    kinds = {name: schema.field(name).type for name in names if name in schema.names}
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
        raise _explained(path, line, block, fields, schema, error) from None
    for batch in table.combine_chunks().to_batches():
        columns = [
            batch[field.name] if field.name in kinds else pa.nulls(len(batch), field.type) for field in schema
        ]
        yield pa.record_batch(columns, schema=schema)


def _explained(
    path: AnyPath, line: int, block: bytes, fields: Sequence[str], schema: pa.Schema, error: Exception
) -> InputError:
    """Make the error for the first line of a block that has a wrong number of fields, or a value of the wrong
    type.
    """
    for number, text in enumerate(block.split(b"\n"), line):
        words = text.split()
        if text.decode("utf-8", "replace").encode() != text:
            return InputError(f"{path}, line {number}: {NOT_UTF8}")
        if words and len(words) != len(fields):
            return InputError(f"{path}, line {number}: {len(words)} fields, not {len(fields)} as in line 1")
        for name, word in zip(fields, words, strict=False):
            kind = schema.field(name).type if name else pa.string()
            try:
                _ = int(word) if pa.types.is_integer(kind) else pa.types.is_floating(kind) and float(word)
            except ValueError:
                shown = word.decode("utf-8", "replace")
                lacks = "not a whole number" if pa.types.is_integer(kind) else "not a number"
                return InputError(f"{path}, line {number}: {name.removeprefix('run_')} is {shown!r}, {lacks}")
    return InputError(f"{path}, from line {line} on: {text_of(error)}")


TREC = Format((".trec",), None, TrecWriter)
"""The format of TREC's run files, which are rankings of ids. It has no reader of pairs, because rankings have
no texts; `corpus.rankings` reads them.
"""
