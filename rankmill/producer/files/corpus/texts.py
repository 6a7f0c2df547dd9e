"""Files of texts with ids: queries and corpora, as TSV, CSV, JSON Lines or Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import ReadOptions
from rankmill.producer.files.formats.table import CSV, JSON, JSONL, TSV, format_of, open_reader

IDS = ("_id", "id", "query_id", "qid", "doc_id", "docid", "docno", "pid", "passage_id", "corpus_id")
TEXTS = ("text", "query", "passage", "contents", "body", "question", "title")
TITLE = "title"

_ROWS = 16_384


def read_texts(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield ``(ids, texts)``: string arrays of one length, in the file's order; a missing text is null.

    A text is ``title + " " + text`` where the file has both and the title is not empty, as in BEIR. The
    columns have one of the usual names (`IDS`, `TEXTS`). TSV without a header has an id and a text.

    Raises
    ------
    InputError
        The file has no such columns, is damaged, or has an id that is null.
    """
    row = 0
    for batch in _batches(path):
        names = _columns(path, batch.schema.names)
        ids = batch[names[0]].cast(pa.string())
        if ids.null_count:
            place = pc.index(pc.is_null(ids), True).as_py()
            raise InputError(f"{path}: row {row + place} (counted from 0) has no {names[0]}")
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


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the needed columns alone: the beginning of the file says which."""
    options = ReadOptions(way_out="write the texts as Parquet")
    found = format_of(path)
    if found is CSV:
        options = replace(options, delimiter=",")
    schema = open_reader(path, options=options).shown_columns()
    if not schema.names:
        return
    if found in {CSV, TSV} and not set(IDS) & set(schema.names):
        if len(schema.names) != 2:
            raise InputError(
                f"{path}: {len(schema.names)} columns and no header; "
                "without one there must be two, id and text"
            )
        options = replace(options, names=("id", "text"))
        schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    names = _columns(path, schema.names)
    asked = [schema.field(name) for name in names]
    if found in {JSON, JSONL}:  # the first record need not have a title, or one that is text
        asked = [asked[0], *(pa.field(name, pa.string()) for name in dict.fromkeys([names[1], TITLE]))]
    yield from open_reader(path, options=options).batches(pa.schema(asked), _ROWS)
