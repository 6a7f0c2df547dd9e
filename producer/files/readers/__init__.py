"""Reading input files as a stream of record batches, one module for each kind of file.

Two passes: `Reader.survey` looks at a file before any work, so that what is wrong with it is
known while nothing is lost, and its schema holds for every row; `Reader.batches` then reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from producer.files.readers.forms import Forms


@dataclass(frozen=True)
class TextColumns:
    """Names of the columns that hold the pairs."""

    query: str
    passage: str

    @property
    def names(self) -> tuple[str, str]:
        """Both names."""
        return (self.query, self.passage)


@dataclass(frozen=True)
class Survey:
    """What a file holds. ``first_null`` is the first row (from 0) with a null in a text column.

    Columns of files without types are text in ``schema``; ``forms`` says what else they could be.
    """

    schema: pa.Schema
    rows: int
    first_null: int | None
    forms: Mapping[str, Forms] = field(default_factory=dict)


class Reader(Protocol):
    """One kind of file."""

    def survey(self, path: Path, columns: TextColumns, *, find_nulls: bool) -> Survey:
        """Look at the whole file; `find_nulls` asks for ``first_null`` even where that costs a read.

        Raises
        ------
        InputError
            The file is damaged; names the file and, where it can, column and row.
        """
        ...

    def batches(self, path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Read the file in order, in batches of about `rows` rows where the format has a say."""
        ...


def first_null(batch: pa.RecordBatch | pa.Table, columns: TextColumns) -> int | None:
    """First row of `batch` with a null in a text column."""
    found = [
        int(pa.compute.index(pa.compute.is_null(batch[name]), value=True).as_py())
        for name in columns.names
        if batch.schema.names.count(name) == 1 and batch[name].null_count
    ]
    return min(found, default=None)
