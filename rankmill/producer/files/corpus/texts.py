"""Reads files of queries or of a corpus, in any readable format. Such files have texts with ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import ReadOptions
from rankmill.producer.files.formats.delimited import CSV, TSV
from rankmill.producer.files.formats.jsonl import JSON, JSONL
from rankmill.producer.files.formats.table import format_of, open_reader
from rankmill.producer.files.formats.text import valid_texts
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS, known_column
from rankmill.producer.files.stores.paths import AnyPath

Side = Literal["queries", "corpus"]

_IDS = ("_id", "id")
_KNOWN_IDS: dict[Side, tuple[str, ...]] = {
    "queries": (*_IDS, *QUERY_IDS), "corpus": (*_IDS, *PASSAGE_IDS)
}  # fmt: skip
_KNOWN_TEXTS: dict[Side, tuple[str, ...]] = {
    "queries": ("text", "query", "question", "query_text", "contents"),
    "corpus": (
        "text", "passage", "contents", "content", "body", "segment", "abstract", "passage_text", "doc_text",
        "document",
    ),
}  # fmt: skip
_TITLE = "title"
"""The column of titles, which are put in front of the passages' texts, as in BEIR."""

_ROWS = 16_384


@dataclass(frozen=True)
class TextFields:
    """Names the columns with the ids and texts of queries, or of a corpus.

    Parameters
    ----------
    side
        ``"queries"`` or ``"corpus"``.
    id
        The column of ids. By default, it is the only column with a known name, such as ``_id``.
    texts
        The columns that make up a text. The text is in the last of these columns; values of the others, such
        as a title, go in front of it. By default, the text is the only column with a known name.
    columns
        All columns of CSV or TSV without a header.
    """

    side: Side
    id: str | None = None
    texts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        *before, text = self.texts
        with_title = f" behind {' and '.join(map(repr, before))}, where there is one" if before else ""
        return f"id {self.id!r}, text {text!r}{with_title}"

    def among(self, path: AnyPath, names: Sequence[str]) -> TextFields:
        """Return a copy that names every column, after guessing those that the caller did not name.

        Parameters
        ----------
        path
            The file that has the columns.
        names
            The columns that the beginning of the file shows.

        Raises
        ------
        InputError
            The file lacks a column that the caller named, or a column cannot be guessed.
        """
        is_json = format_of(path) in {JSON, JSONL}  # later records may have columns that the first one lacks
        for option, name in (("id", self.id), *(("text", text_name) for text_name in self.texts)):
            if name and name not in names and not is_json:
                raise InputError(
                    f"{path}: no column {name!r} (--{self.side}-{option}); it has {_listed(names)}"
                )
        key = self.id or self._guessed(path, names, "id", _KNOWN_IDS[self.side])
        texts = self.texts
        if not texts:
            text = self._guessed(path, names, "text", _KNOWN_TEXTS[self.side])
            has_title = self.side == "corpus" and (is_json or _TITLE in names)
            texts = (_TITLE, text) if has_title else (text,)
        return TextFields(self.side, key, texts, self.columns)

    def _guessed(self, path: AnyPath, names: Sequence[str], role: str, usual: Sequence[str]) -> str:
        option = f"--{self.side}-{role}"
        column = known_column(
            names, usual, f"{path}: the {role} of the {self.side}", f"name it with {option}"
        )
        if column is None:
            raise InputError(
                f"{path}: which of its columns ({_listed(names)}) is the {role} of the {self.side}? "
                f"Name it with {option}"
            )
        return column


QUERIES, CORPUS = TextFields("queries"), TextFields("corpus")


def read_texts(path: AnyPath, fields: TextFields = CORPUS) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield ``(ids, texts)``, two string arrays of one length, in the file's order. A missing text is null.

    CSV or TSV without a header has two columns, an id and a text, unless `fields` names its columns.

    Raises
    ------
    InputError
        The file lacks the columns or is damaged, an id is null, or no row has a text in the named column.
    """
    row, has_text = 0, False
    opened = _open(path, fields)
    if opened is None:
        return
    taken, batches = opened
    assert taken.id
    for batch in batches:
        ids = _texts(path, batch, taken.id, row)
        if ids.null_count:
            place = pc.index(pc.is_null(ids), True).as_py()
            raise InputError(f"{path}: row {row + place} (counted from 0) has no {taken.id}")
        *before, text = (_texts(path, batch, name, row) for name in taken.texts)
        has_text = has_text or text.null_count < len(text)
        yield ids, _joined(before, text)
        row += len(batch)
    if row and not has_text and fields.texts:
        raise InputError(f"{path}: no row has a text in {taken.texts[-1]!r} (--{fields.side}-text)")


def _texts(path: AnyPath, batch: pa.RecordBatch, name: str, first: int) -> pa.Array:
    """Return a column of a batch as text. `first` is the number of the batch's first row in the file."""
    try:
        return valid_texts(batch[name])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        rows = f"one of the rows {first} to {first + len(batch) - 1} (counted from 0)"
        raise InputError(
            f"{path}: column {name!r} ({batch[name].type}) is not text, or not valid UTF-8, in {rows}; "
            "write it as text first"
        ) from None


def taken_fields(path: AnyPath, fields: TextFields) -> TextFields | None:
    """Return the columns that `read_texts` reads from a file, or ``None`` if the file is empty.

    Raises `InputError` if the file lacks a column or cannot be read.
    """
    opened = _open(path, fields)
    return opened and opened[0]


def taken(paths: Sequence[AnyPath], fields: TextFields) -> dict[str, str]:
    """Return the names of the columns that `read_texts` reads, as one text.

    For a corpus, this can be ``{"corpus": "id '_id', text 'text'"}``.
    """
    columns = dict.fromkeys(str(of_file) for path in paths if (of_file := taken_fields(path, fields)))
    return {fields.side: "; ".join(columns)}


def _joined(before: Sequence[pa.Array], text: pa.Array) -> pa.Array:
    """Put values such as a title in front of each row's text, with a space between them. A null text stays
    null.
    """
    whole = text
    for values in reversed(before):
        first = pc.utf8_trim_whitespace(pc.fill_null(values, ""))
        both = pc.binary_join_element_wise(first, whole, " ")
        both = pc.if_else(pc.equal(pc.utf8_trim_whitespace(whole), ""), first, both)
        whole = pc.if_else(pc.equal(first, ""), whole, both)
    return whole


def _open(path: AnyPath, fields: TextFields) -> tuple[TextFields, Iterator[pa.RecordBatch]] | None:
    """Open a file of texts. Return its columns of ids and texts, and an iterator over its rows. Returns
    ``None`` if the file is empty.
    """
    options = ReadOptions(way_out="write the texts as Parquet", names=fields.columns)
    form = format_of(path)
    schema = open_reader(path, options=options).shown_columns()
    if not schema.names:
        return None
    is_named = fields.id or fields.texts or fields.columns
    if form in {CSV, TSV} and not is_named and not set(_KNOWN_IDS[fields.side]) & set(schema.names):
        if len(schema.names) != 2:
            raise InputError(
                f"{path}: {len(schema.names)} columns and no header; without one there must be two, id and "
                f"text{', or --columns names them' if fields.side == 'corpus' else ''}"
            )
        options = replace(options, names=("id", "text"))
        schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    taken = fields.among(path, schema.names)
    names = dict.fromkeys([taken.id, *taken.texts])
    if twice := next((name for name in names if schema.names.count(name) > 1), None):
        raise InputError(f"{path}: two columns are named {twice!r}; rename one")
    wanted = [schema.field(name) if name in schema.names else pa.field(name, pa.string()) for name in names]
    return taken, open_reader(path, taken.texts, options).batches(pa.schema(wanted), _ROWS)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
