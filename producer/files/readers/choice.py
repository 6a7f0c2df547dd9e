"""The reader of each file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankmill.jobs.protocol.submitted.request import DELIMITERS
from rankmill.producer.files.inputs import PARQUET, InputFile
from rankmill.producer.files.readers import Reader
from rankmill.producer.files.readers.delimited import DelimitedReader, notice_delimiter
from rankmill.producer.files.readers.jsonl import JsonlReader
from rankmill.producer.files.readers.lists import ListReader
from rankmill.producer.files.readers.parquet import ParquetReader


@dataclass(frozen=True)
class Options:
    """How to read files.

    ``delimiter`` is the character between two fields of CSV and TSV, or its name; ``None``: noticed in CSV,
    a tab in TSV. ``lists`` are columns to unroll: a row becomes one row for each item. ``max_field_mib`` is
    the longest field of CSV and TSV; ``None``: as of `MAX_FIELD_MIB`.
    """

    delimiter: str | None = None
    lists: Sequence[str] = ()
    max_field_mib: int | None = None


def choose(file: InputFile, texts: Sequence[str], options: Options) -> Reader:
    """The reader of a file with the text columns `texts`.

    Raises
    ------
    InputError
        The file cannot be read.
    """
    reader = _plain(file, texts, options)
    return ListReader(reader, options.lists) if options.lists else reader


def _plain(file: InputFile, texts: Sequence[str], options: Options) -> Reader:
    if file.kind in PARQUET:
        return ParquetReader()
    if file.kind not in {".csv", ".tsv"}:
        return JsonlReader()
    is_csv = file.kind == ".csv"
    delimiter = options.delimiter and DELIMITERS.get(options.delimiter, options.delimiter)
    delimiter = delimiter or (notice_delimiter(file.path, texts) if is_csv else "\t")
    return DelimitedReader(delimiter, has_quotes=is_csv, max_field_mib=options.max_field_mib)
