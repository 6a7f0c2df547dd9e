"""What to calibrate on and what to measure with: pairs of different queries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pyarrow as pa

from jobs.errors import InputError
from producer.files.readers import TextColumns
from rankmill.tuning.pairs import COLUMNS, draw, file_sample, sample

_FILE_ROWS = 100_000
_OF_QUERIES = 5
"""One query of so many is calibrated on."""

_CALIBRATED = 128
"""Pairs to calibrate on, at most: what is wanted of them are the largest values."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of a file, or shipped ones.

    Attributes
    ----------
    calibrated, measured
        Tables without a query in common.
    columns
        Where their texts are.
    label
        Where relevance is, if anywhere.
    """

    calibrated: pa.Table
    measured: pa.Table
    columns: TextColumns
    label: str | None


def read_pairs(file: str | None, columns: TextColumns, label: str | None, rows: int) -> Pairs:
    """Always the same pairs of a file, or those that rankmill ships if there is none.

    Parameters
    ----------
    file
        As score-file takes them; the first 100,000 rows are drawn from.
    columns
        Where the texts are in it.
    label
        Another column to keep, which must hold numbers.
    rows
        To measure with, at most: `rankmill.tuning.pairs.draw`.

    Raises
    ------
    InputError
        The file cannot be read, has no such columns, or pairs of one query alone.
    """
    if file is None:
        columns, label = TextColumns(*COLUMNS), None
        table = sample("varied", rows)
    else:
        table = file_sample([file], _FILE_ROWS, columns, label)
    queries = table[columns.query].to_pylist()
    theirs = set(list(dict.fromkeys(queries))[::_OF_QUERIES])
    if len(theirs) == len(set(queries)):
        raise InputError(f"{file} has pairs of one query only: others are needed to measure with")
    mine = [row for row, query in enumerate(queries) if query in theirs]
    others = [row for row, query in enumerate(queries) if query not in theirs]
    measured = [others[place] for place in draw([queries[row] for row in others], rows)]
    return Pairs(table.take(_spread(mine, queries)), table.take(measured), columns, label)


def _spread(rows: list[int], queries: list[str]) -> list[int]:
    """Up to `_CALIBRATED` of the rows, as many of one query as of another."""
    seen: Counter[str] = Counter()
    turns = []
    for row in rows:
        turns.append((seen[queries[row]], row))
        seen[queries[row]] += 1
    return [row for _, row in sorted(turns)[:_CALIBRATED]]
