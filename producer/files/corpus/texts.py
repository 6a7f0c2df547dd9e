"""Files of texts with ids: queries and corpora, as TSV, CSV, JSON Lines or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.inputs import PARQUET, InputFile
from rankmill.producer.files.readers.choice import Options, choose
from rankmill.producer.files.readers.jsonl import JsonlReader
from rankmill.producer.files.readers.quotes import MAX_FIELD_MIB, open_quoted
from rankmill.producer.files.stores.reading import open_stream

IDS = ("_id", "id", "query_id", "qid", "doc_id", "docid", "docno", "pid", "passage_id", "corpus_id")
TEXTS = ("text", "query", "passage", "contents", "body", "question", "title")
TITLE = "title"

_ROWS = 16_384
_BLOCK_BYTES = 16 << 20
_START_BYTES = 1 << 20
_WAY_OUT = "write the texts as Parquet"


def read_texts(file: InputFile) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield ``(ids, texts)``: string arrays of one length, in the file's order; a missing text is null.

    A text is ``title + " " + text`` where the file has both and the title is not empty, as in BEIR. The
    columns have one of the usual names (`IDS`, `TEXTS`). TSV without a header has an id and a text.

    Raises
    ------
    InputError
        The file has no such columns, is damaged, or has an id that is null.
    """
    row = 0
    for batch in _batches(file):
        names = _columns(file.path, batch.schema.names)
        ids = batch[names[0]].cast(pa.string())
        if ids.null_count:
            place = pc.index(pc.is_null(ids), True).as_py()
            raise InputError(f"{file.path}: row {row + place} (counted from 0) has no {names[0]}")
        texts = batch[names[1]].cast(pa.string())
        if len(names) > 2:
            titles = pc.utf8_trim_whitespace(pc.fill_null(batch[names[2]].cast(pa.string()), ""))
            whole = pc.binary_join_element_wise(titles, pc.fill_null(texts, ""), " ")
            texts = pc.if_else(pc.equal(titles, ""), texts, whole)
        yield ids, texts
        row += len(batch)


def _columns(path: Path, names: Sequence[str]) -> list[str]:
    """Names of the columns with the id, the text and perhaps the title."""
    key = next((name for name in IDS if name in names), None)
    text = next((name for name in TEXTS if name in names), None)
    if key is None or text is None:
        raise InputError(
            f"{path}: needs a column with ids (one of {', '.join(IDS)}) and one with texts "
            f"({', '.join(TEXTS)}); it has {', '.join(map(repr, names)) or 'none'}"
        )
    return [key, text, TITLE] if TITLE in names and text != TITLE else [key, text]


def _batches(file: InputFile) -> Iterator[pa.RecordBatch]:
    if file.kind in PARQUET:
        reader = choose(file, [], Options())
        schema = reader.survey(file.path, [], find_nulls=False).schema
        names = _columns(file.path, schema.names)
        yield from reader.batches(file.path, pa.schema([schema.field(name) for name in names]), _ROWS)
    elif file.kind in {".csv", ".tsv"}:
        yield from _delimited(file)
    else:
        yield from _json(file.path)


def _json(path: Path) -> Iterator[pa.RecordBatch]:
    """Read only the needed keys; the first record says which, and whether ids are numbers."""
    try:
        with open_stream(path) as stream:
            start = stream.read(_START_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not start:
        return
    try:
        line = start.split(b"\n", 1)[0] if start.startswith(b"{") else start.lstrip(b"[ \t\r\n")
        first, _ = json.JSONDecoder(strict=False).raw_decode(line.decode("utf-8", "replace"))
        names = _columns(path, list(first))
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"{path}: does not begin with a JSON object of at most 1 MiB") from None
    key = pa.int64() if type(first[names[0]]) is int else pa.string()
    kinds = {TITLE: pa.string(), names[0]: key, names[1]: pa.string()}
    for batch in JsonlReader().batches(path, pa.schema(list(kinds.items())), _ROWS):
        yield batch.select([names[0], *(name for name in kinds if name != names[0])])


def _delimited(file: InputFile) -> Iterator[pa.RecordBatch]:
    try:
        with open_stream(file.path) as stream:
            start = stream.read(_START_BYTES).decode("utf-8-sig", "replace")
        is_tsv = file.kind == ".tsv"
        quoting = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
        first = next(csv.reader(io.StringIO(start), delimiter="\t" if is_tsv else ",", quoting=quoting), [])  # type: ignore[arg-type]
        if not first:
            return
        has_header = bool({*IDS} & {*first})
        if not has_header and len(first) != 2:
            raise InputError(
                f"{file.path}: {len(first)} columns and no header; without one there must be two, id and text"
            )
        names = first if has_header else ["id", "text"]
        reader = pcsv.open_csv(
            open_stream(file.path) if is_tsv else open_quoted(file.path, ",", MAX_FIELD_MIB, _WAY_OUT),
            read_options=pcsv.ReadOptions(
                block_size=_BLOCK_BYTES, use_threads=False, column_names=names, skip_rows=int(has_header)
            ),
            parse_options=pcsv.ParseOptions(
                delimiter="\t" if is_tsv else ",",
                quote_char=False if is_tsv else '"',
                newlines_in_values=not is_tsv,
            ),
            convert_options=pcsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=_columns(file.path, names),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        yield from reader
    except (OSError, csv.Error, pa.ArrowException) as error:
        raise InputError(f"{file.path}: {' '.join(str(error).split())}") from None
