"""Readers of input files as streams of record batches, one module for each file format.

A file is read in two passes. `Reader.survey` checks it before scoring begins, so that an error costs
no work, and finds a schema that fits every row. `Reader.batches` then reads the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rankmill.producer.files.readers.forms import Forms


@dataclass(frozen=True)
class TextColumns:
    """Names of the columns that hold the pairs."""

    query: str
    passage: str

    @property
    def names(self) -> tuple[str, str]:
        """Both names: query, passage."""
        return (self.query, self.passage)


@dataclass(frozen=True)
class Survey:
    """Schema and size of a file. ``first_null`` is the first row (from 0) with a null in a text column.

    In file formats without types, columns are text in ``schema``; ``forms`` says what else they could be.
    """

    schema: pa.Schema
    rows: int
    first_null: int | None
    forms: Mapping[str, Forms] = field(default_factory=dict)


class Reader(Protocol):
    """Reads one file format."""

    def survey(self, path: Path, texts: Sequence[str], *, find_nulls: bool) -> Survey:
        """Check the whole file.

        Parameters
        ----------
        path
            The file.
        texts
            Columns to read as text.
        find_nulls
            Whether ``first_null`` is needed even if this takes an extra read.

        Raises
        ------
        InputError
            The file is damaged; the message names the file and, if known, column and row.
        """
        ...

    def batches(self, path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Read the file in order, in batches of about `rows` rows if the format allows this."""
        ...


def first_null(batch: pa.RecordBatch | pa.Table, texts: Sequence[str]) -> int | None:
    """Return the first row of `batch` with a null in a column of `texts`, or ``None``."""
    found = [
        int(pa.compute.index(pa.compute.is_null(batch[name]), value=True).as_py())
        for name in texts
        if batch.schema.names.count(name) == 1 and batch[name].null_count
    ]
    return min(found, default=None)
