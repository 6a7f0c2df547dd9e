"""The formats of files: what their names end in, and how they are read and written.

A new format is a module in this folder, and its line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import Reader, ReadOptions, Writer
from rankmill.producer.files.formats.delimited import CsvReader, CsvWriter, TsvReader, TsvWriter
from rankmill.producer.files.formats.ipc import ArrowReader, ArrowWriter
from rankmill.producer.files.formats.jsonl import JsonlReader, JsonlWriter
from rankmill.producer.files.formats.lists import ListReader
from rankmill.producer.files.formats.parquet import ParquetReader, ParquetWriter
from rankmill.producer.files.formats.trec import TrecWriter
from rankmill.producer.files.stores.paths import AnyPath

MakeReader = Callable[[AnyPath, Sequence[str], ReadOptions], Reader]


@dataclass(frozen=True)
class Format:
    """A format of files.

    ``name`` is that of --output-format, ``endings`` are those of files' names, which may be followed by one
    of `COMPRESSIONS` if it is text. ``reader`` and ``writer`` are ``None`` where pairs cannot be read from
    it, or rows not written to it (a ranking in TREC's format has no texts; `corpus.rankings` reads it).
    """

    name: str
    endings: Sequence[str]
    reader: MakeReader | None
    writer: Callable[..., Writer] | None
    is_text: bool = True


PARQUET = Format("parquet", (".parquet", ".pq"), ParquetReader, ParquetWriter, is_text=False)
CSV = Format("csv", (".csv",), CsvReader, CsvWriter)
TSV = Format("tsv", (".tsv",), TsvReader, TsvWriter)
JSONL = Format("jsonl", (".jsonl", ".ndjson"), JsonlReader, JsonlWriter)
JSON = Format("json", (".json",), JsonlReader, None)
TREC = Format("trec", (".trec",), None, TrecWriter)

FORMATS = (
    PARQUET,
    CSV,
    TSV,
    JSONL,
    JSON,
    TREC,
    Format("arrow", (".arrow", ".feather"), ArrowReader, ArrowWriter, is_text=False),
    Format("arrow stream", (".arrows",), ArrowReader, None, is_text=False),
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

READ_ENDINGS = (
    ", ".join(ending for each in FORMATS if each.reader for ending in each.endings)
    + " (text also as .gz or .zst)"
)
"""Endings of files that are read as pairs, for messages."""

WRITTEN_ENDINGS = ", ".join(ending for each in FORMATS if each.writer for ending in each.endings)


def format_of(path: AnyPath) -> Format | None:
    """The format that a file's name says; ``None`` if it says none."""
    ending, compression = split_ending(path)
    found = next((each for each in FORMATS if ending in each.endings), None)
    return None if found and compression and not found.is_text else found


def split_ending(path: AnyPath) -> tuple[str, str | None]:
    """The ending that gives a file's format, and the compression by the one behind it."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    compression = COMPRESSIONS.get(suffixes[-1])
    return suffixes[-2 if compression else -1], compression


def stem(path: AnyPath) -> str:
    """The file's name without the endings that give its format: ``a.b`` for ``a.b.csv.gz``."""
    return (path.with_suffix("") if split_ending(path)[1] else path).stem


def is_output_name(name: str) -> bool:
    """Whether an output can have this name."""
    return any(
        name.lower().endswith(ending + compression)
        for each in FORMATS
        if each.writer
        for ending in each.endings
        for compression in ("", *(COMPRESSIONS if each.is_text else ()))
    )


def is_readable(path: AnyPath) -> bool:
    """Whether a file's name says that it holds pairs, or other tables."""
    found = format_of(path)
    return found is not None and found.reader is not None


def check_readable(path: AnyPath) -> MakeReader:
    """What makes the reader of a file; raises `InputError` if its name does not say that it can be read."""
    found = format_of(path)
    if found is None or found.reader is None:
        raise InputError(f"{path}: cannot tell what is in it; its name must end in {READ_ENDINGS}")
    return found.reader


def open_reader(path: AnyPath, texts: Sequence[str] = (), options: ReadOptions | None = None) -> Reader:
    """The reader of a file with the text columns `texts`.

    Raises
    ------
    InputError
        The file cannot be read, or its name does not say its format.
    """
    options = options or ReadOptions()
    reader = check_readable(path)(path, [name for name in texts if name not in options.lists], options)
    return ListReader(path, reader, texts, options.lists) if options.lists else reader
