"""The output's format, from its name or from options."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.inputs import COMPRESSED
from rankmill.producer.files.stores.own_folder import kind_of
from rankmill.producer.files.stores.paths import ObjectPath, check_container
from rankmill.producer.files.writers import Writer
from rankmill.producer.files.writers.parquet import ParquetWriter
from rankmill.producer.files.writers.text import CsvWriter, JsonlWriter, TrecWriter, TsvWriter

_ENDINGS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl",
    ".ndjson": "jsonl", ".trec": "trec",
}  # fmt: skip

QUERY_IDS = ("query_id", "qid", "query-id", "topic_id")
PASSAGE_IDS = ("passage_id", "pid", "doc_id", "docid", "docno", "corpus_id", "corpus-id")


@dataclass(frozen=True)
class OutputFormat:
    """What the output looks like.

    Parameters
    ----------
    kind
        One of `OUTPUT_FORMATS`; ``None``: the name of the output says it.
    top_k
        Number of passages to keep of each query, ranked by score; ``None``: all rows in input order.
    rank_column
        Name of the column with the rank (from 1), where there is one.
    query_id, passage_id
        Columns with the ids; ``None``: the first column with one of the usual names.
    tag
        Name of the run, in the last column of TREC.
    """

    kind: str | None = None
    top_k: int | None = None
    rank_column: str = "rank"
    query_id: str | None = None
    passage_id: str | None = None
    tag: str = "rankmill"

    def of(self, path: Path) -> str:
        """The format of the file at `path`, one of `OUTPUT_FORMATS`.

        Raises
        ------
        InputError
            The name does not say it, or says another one.
        """
        ending = next((end for end in _suffixes(path)[-1:]), "")
        named = _ENDINGS.get(ending)
        kind = self.kind or named
        if kind is None:
            raise InputError(
                f"{path}: cannot tell the format from the name; end it in {', '.join(_ENDINGS)} (text also "
                "in .gz or .zst), or name it with --output-format"
            )
        if named not in {None, kind}:
            raise InputError(f"{path}: --output-format {kind} does not fit the name's ending {ending}")
        if kind == "parquet" and _compression(path):
            raise InputError(f"{path}: Parquet is compressed inside; leave {path.suffix} out of the name")
        return kind

    def ranks(self, path: Path) -> bool:
        """Whether the rows are ranked by score within their query."""
        return self.top_k is not None or self.of(path) == "trec"

    def group(self, schema: pa.Schema, query: str) -> str:
        """The column that says which rows belong to one query: its id, or else its text."""
        return _id_column(schema, self.query_id, QUERY_IDS, "--query-id-column") or query

    def ids(self, schema: pa.Schema) -> tuple[str, str]:
        """The columns with the ids of query and passage.

        Raises
        ------
        InputError
            There is no such column.
        """
        query = _id_column(schema, self.query_id, QUERY_IDS, "--query-id-column")
        passage = _id_column(schema, self.passage_id, PASSAGE_IDS, "--passage-id-column")
        for option, found, usual in (
            ("--query-id-column", query, QUERY_IDS),
            ("--passage-id-column", passage, PASSAGE_IDS),
        ):
            if found is None:
                raise InputError(
                    f"a TREC run needs ids, and the input has no column {' or '.join(usual)}; "
                    f"name the column with {option}"
                )
        assert query is not None
        assert passage is not None
        return query, passage

    def writer(self, path: Path, target: Path, schema: pa.Schema, score: str) -> Writer:
        """Open `path` to write what becomes the file at `target`."""
        kind, compression = self.of(target), _compression(target)
        if kind == "parquet":
            return ParquetWriter(path, schema)
        if kind == "trec":
            columns = (*self.ids(schema), self.rank_column, score)
            return TrecWriter(path, schema, compression, columns, self.tag)
        return {"csv": CsvWriter, "tsv": TsvWriter, "jsonl": JsonlWriter}[kind](path, schema, compression)


def default_ending(kind: str | None) -> str:
    """The ending of an output that the user has not named."""
    return f".{kind or 'parquet'}"


def check_target(path: Path, form: OutputFormat) -> None:
    """Check that a file can be written at `path`; raises `InputError` if not."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file with -o, or add --rows-per-part")
    check_replaceable(path)
    if form.of(path) == "trec" and not re.fullmatch(r"\S+", form.tag):
        raise InputError(f"--tag {form.tag!r}: a TREC run needs a name without spaces")
    if isinstance(path, ObjectPath):
        check_container(path)
        return
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such directory to write the output to")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent} is not writable; name another place with -o")


def check_replaceable(path: Path) -> None:
    """Check that what is at the place of an output, if anything, is a file; raises `InputError` if not."""
    if isinstance(path, ObjectPath):
        return
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {kind_of(mode)}, which no output replaces; name a file with -o")


def _id_column(schema: pa.Schema, named: str | None, usual: Sequence[str], option: str) -> str | None:
    if named is not None and named not in schema.names:
        raise InputError(f"{option}: no column {named!r} in the input")
    found = named or next((name for name in usual if name in schema.names), None)
    if found and pa.types.is_nested(schema.field(found).type):
        raise InputError(f"column {found!r} holds {schema.field(found).type}, not ids; choose with {option}")
    return found


def _suffixes(path: Path) -> list[str]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[:-1] if suffixes and suffixes[-1] in COMPRESSED else suffixes


def _compression(path: Path) -> str | None:
    return {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
