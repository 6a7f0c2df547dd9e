"""Draws pairs for measurements from a file or from the shipped pairs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.home import shipped
from rankmill.jobs.contract.wire import is_text
from rankmill.producer.collect.pairs import COLUMNS
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.formats.base import ReadOptions, TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import open_source

BUILT_IN = ("varied", "example")

_EXAMPLE = shipped("examples", "pairs.jsonl")
_LOOK_ROWS = 100_000
"""A sample is taken from this many rows at the beginning of the input."""
_ROWS_OF_A_QUERY = 50
"""A sample has at most this many rows of each query, and more only if it would otherwise be too small.

With few rows of a query, one changed rank changes the rank correlation much. With many rows, the sample has
too few queries. Measured with samples of 100 pairs of MS MARCO and a threshold of 0.999:

====================  ==================  ========  ========  ========
precision             correlation of all  25 rows   50 rows   74 rows
====================  ==================  ========  ========  ========
bf16 (should pass)    0.9998              92% pass  100%      100%
int8 (should not)     0.9985              1% pass   12%       28%
====================  ==================  ========  ========  ========
"""

_OF_QUERIES = 5
"""One in this many queries is for calibrating a model; the others are for measuring it."""

_CALIBRATED = 128
"""A model is calibrated on at most this many pairs. These are enough to find the largest value of each
channel.
"""

_SHIPPED_ROWS = 2000
"""To quantize a model, at least this many shipped pairs are made: fewer pairs would have too few queries."""


def sample(pairs: str, rows: int, columns: tuple[str, str] = COLUMNS) -> pa.Table:
    """Return a table of `rows` pairs with the columns `COLUMNS`. If there are too few pairs, they are
    repeated. The seed is fixed.

    Parameters
    ----------
    pairs
        ``example``: the shipped pairs in random order. ``varied``: the shipped pairs, with passages cut and
        joined to 4 to 400 words, about as long as on the web. Any other value: a file, from which `draw`
        chooses pairs.
    rows
        Number of pairs.
    columns
        Columns of the file with the texts.

    Raises
    ------
    InputError
        The file cannot be read, has no pairs, or lacks a column. Or `columns` are given for shipped pairs.
    """
    random = np.random.default_rng(0)
    if pairs in BUILT_IN and tuple(columns) != COLUMNS:
        raise InputError(f"{pairs!r} are shipped pairs: --query-column and --passage-column are for a file")
    if pairs == "example":
        table = _example().take(random.permutation(len(_example())))
    elif pairs == "varied":
        table = _varied(rows, random)
    else:
        table = FileSample([pairs], rows, TextColumns(*columns)).read().rename_columns(list(COLUMNS))
    return table.take(np.arange(rows) % len(table))


@dataclass(frozen=True)
class FileSample:
    """A sample of the pairs in files. `draw` chooses the pairs with a fixed seed.

    Attributes
    ----------
    inputs
        Files, directories or globs; the sample is drawn from the first 100,000 rows.
    rows
        Maximum number of pairs to draw. Rows with a null text are left out.
    columns
        Columns with the texts.
    label
        A column of numbers that is also read, such as the relevance; ``None`` for no such column.
    """

    inputs: Sequence[str]
    rows: int
    columns: TextColumns
    label: str | None = None

    def read(self) -> pa.Table:
        """Read the pairs; raises `InputError` if the files cannot be read, have no pairs, or lack a
        column.
        """
        options = ReadOptions(way_out="write the pairs as Parquet")
        source = open_source(find_files(self.inputs), self.columns, allow_nulls=True, options=options)
        wanted = list(dict.fromkeys([*self.columns.names, *([self.label] if self.label else [])]))
        if self.label is not None and self.label not in source.schema.names:
            raise InputError(f"no column {self.label!r} in the input; choose another with --label-column")
        with closing(source.tables(Sizing(1000))) as tables:
            parts = [table.select(wanted) for table in islice(tables, _LOOK_ROWS // 1000)]
        table = pa.concat_tables(parts or [source.schema.empty_table().select(wanted)])
        table = table.filter(pc.and_(*(pc.is_valid(table[name]) for name in self.columns.names)))
        if not len(table):
            raise InputError(f"{', '.join(self.inputs)}: the input has no pairs")
        drawn = table.take(draw(table[self.columns.query].to_pylist(), self.rows))
        return drawn if self.label is None else _with_numbers(drawn, self.label)


def draw(queries: Sequence[str], rows: int) -> list[int]:
    """Choose a sample of at most `rows` rows, given the query of each row. Returns the indices of the chosen
    rows.

    The sample takes up to 50 rows of each query. If these rows are too few, it takes up to 50 more of each
    query, and so on. The order of queries and rows is random, because a query's first rows may be its best
    ones. The seed is fixed.
    """
    random = np.random.default_rng(0)
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    mine = list(places.values())
    shuffled = [random.permutation(mine[number]).tolist() for number in random.permutation(len(mine))]
    taken: list[int] = []
    for start in range(0, max(map(len, mine), default=0), _ROWS_OF_A_QUERY):
        if len(taken) >= rows:
            break
        taken += [place for places in shuffled for place in places[start : start + _ROWS_OF_A_QUERY]]
    return taken[:rows]


def _with_numbers(table: pa.Table, label: str) -> pa.Table:
    """Return the table with a label column of numbers: CSV and TSV have numbers as text."""
    place = table.schema.get_field_index(label)
    try:
        return table.set_column(place, label, table[label].cast(pa.float64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        kind = table.schema.field(label).type
        raise InputError(
            f"column {label!r} holds {'text' if is_text(kind) else kind}, not numbers; choose another with "
            "--label-column"
        ) from None


def fingerprint(table: pa.Table) -> str:
    """The SHA-256 digest of a table's texts."""
    return hashlib.sha256(json.dumps([column.to_pylist() for column in table.columns]).encode()).hexdigest()


@cache
def _example() -> pa.Table:
    return pa.Table.from_pylist(
        [json.loads(line) for line in _EXAMPLE.read_text(encoding="utf-8").splitlines()]
    ).select(list(COLUMNS))


def _varied(rows: int, random: np.random.Generator) -> pa.Table:
    passages: dict[str, list[str]] = {}
    for pair in _example().to_pylist():
        passages.setdefault(pair["query"], []).append(pair["passage"])
    queries = list(passages)
    every = _example()["passage"].to_pylist()
    lengths = np.clip(random.lognormal(np.log(55), 0.7, rows).astype(int), 4, 400)
    rows_made = []
    for row, length in enumerate(lengths.tolist()):
        query = queries[row // _ROWS_OF_A_QUERY % len(queries)]
        words = passages[query][row % len(passages[query])].split()
        while len(words) < length:
            words += every[random.integers(len(every))].split()
        rows_made.append({"query": query, "passage": " ".join(words[:length])})
    return pa.Table.from_pylist(rows_made)


@dataclass(frozen=True)
class Pairs:
    """Pairs to quantize a model with, from a file or shipped with rankmill.

    Attributes
    ----------
    calibrated, measured
        Tables of the pairs to calibrate the model on and to measure it with. They have no query in common.
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
    """Draw pairs to calibrate a model on, and other pairs to measure it with. The same input gives the same
    pairs.

    Parameters
    ----------
    file
        An input file, as for score-file; only the first 100,000 rows count. ``None`` means the shipped pairs.
    columns
        Names of the columns with the texts.
    label
        Name of another column to keep, which must hold numbers.
    rows
        Maximum number of pairs to measure with; `draw` chooses them.

    Raises
    ------
    InputError
        The file cannot be read, has no pairs, lacks a column, or has pairs of only one query. Or columns are
        given without a file.
    """
    if file is None:
        if label or columns.names != COLUMNS:
            options = "--query-column, --passage-column and --label-column"
            raise InputError(f"{options} are for a file: give --pairs")
        table = sample("varied", max(rows, _SHIPPED_ROWS))
    else:
        table = FileSample([file], _LOOK_ROWS, columns, label).read()
    queries = table[columns.query].to_pylist()
    theirs = set(list(dict.fromkeys(queries))[::_OF_QUERIES])
    if len(theirs) == len(set(queries)):
        raise InputError(f"{file} has pairs of one query only: others are needed to measure with")
    mine = [row for row, query in enumerate(queries) if query in theirs]
    others = [row for row, query in enumerate(queries) if query not in theirs]
    measured = [others[place] for place in draw([queries[row] for row in others], rows)]
    return Pairs(table.take(_spread(mine, queries)), table.take(measured), columns, label)


def _spread(rows: list[int], queries: list[str]) -> list[int]:
    """Choose at most `_CALIBRATED` of `rows`: the first row of each query, then the second of each, and so
    on.
    """
    seen: Counter[str] = Counter()
    turns = []
    for row in rows:
        turns.append((seen[queries[row]], row))
        seen[queries[row]] += 1
    return [row for _, row in sorted(turns)[:_CALIBRATED]]
