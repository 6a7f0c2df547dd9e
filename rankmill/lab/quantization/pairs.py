"""Pairs to calibrate on and pairs to measure with; the two have no query in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.lab.tuning.pairs import draw, file_sample, sample
from rankmill.producer.collect.pairs import COLUMNS
from rankmill.producer.files.formats.base import TextColumns

_FILE_ROWS = 100_000
_OF_QUERIES = 5
"""The pairs of every fifth query are for calibration."""

_CALIBRATED = 128
"""Most pairs to calibrate on: few are enough to find the largest value of each channel."""


@dataclass(frozen=True)
class Pairs:
    """Pairs from a file, or pairs that rankmill ships.

    Attributes
    ----------
    calibrated, measured
        Tables of the pairs to calibrate on and to measure with, without a query in common.
    columns
        Names of the columns with the texts.
    label
        Name of the column with the relevance, if there is one.
    """

    calibrated: pa.Table
    measured: pa.Table
    columns: TextColumns
    label: str | None


def read_pairs(file: str | None, columns: TextColumns, label: str | None, rows: int) -> Pairs:
    """Draw pairs from a file, or from the pairs that rankmill ships; the same pairs each time.

    Parameters
    ----------
    file
        Any input of score-file, of which the first 100,000 rows count; ``None``: pairs that rankmill ships.
    columns
        Names of the columns with the texts.
    label
        Name of another column to keep, which must hold numbers.
    rows
        Most pairs to measure with; `rankmill.lab.tuning.pairs.draw` chooses them.

    Raises
    ------
    InputError
        The file cannot be read, lacks a column, or has the pairs of one query only.
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
    """Up to `_CALIBRATED` of the rows, taken from each query in turn."""
    seen: Counter[str] = Counter()
    turns = []
    for row in rows:
        turns.append((seen[queries[row]], row))
        seen[queries[row]] += 1
    return [row for _, row in sorted(turns)[:_CALIBRATED]]
