"""Pairs to measure with: of a file, or made from the shipped example."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from jobs.errors import InputError
from producer.files.inputs import find_files
from producer.files.readers import TextColumns
from producer.files.source import open_source

BUILT_IN = ("varied", "example")
COLUMNS = ("query", "passage")

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pairs.jsonl"
_LOOK_ROWS = 100_000
"""Rows at the beginning of a file that a sample is taken from."""
_OF_A_QUERY = 50
"""Rows of one query in a sample, at most, one after the other.

Among few, any change of rank is a great one; many leave room for few queries, which differ. Of 100 pairs of
MS MARCO with 25, 50 and 74 of a query, 92%, 100% and 100% of the samples pass bf16 (0.9998 by all 4,000
pairs) at a threshold of 0.999, and 1%, 12% and 28% int8 (0.9985).
"""


def sample(pairs: str, rows: int, columns: tuple[str, str] = COLUMNS) -> pa.Table:
    """`rows` pairs (repeated, where there are not so many) as a table of `COLUMNS`.

    Parameters
    ----------
    pairs
        ``example``: the shipped pairs, in random order. ``varied``: those cut, or
        filled up with others, to 4 to 400 words, distributed as passages of web pages are. Else
        a file, of which queries are taken in random order, with up to 50 of their pairs, as ranks within
        a query are compared: at random, as the first ones may be the best ones. Always the same ones.
    rows
        How many.
    columns
        Where the texts are in a file.

    Raises
    ------
    InputError
        The file cannot be read, or has no pairs.
    """
    random = np.random.default_rng(0)
    if pairs == "example":
        found = _example().take(random.permutation(len(_example())))
    elif pairs == "varied":
        found = _varied(rows, random)
    else:
        found = _of_file(pairs, rows, columns, random)
    if not len(found):
        raise InputError(f"{pairs}: there are no pairs in it")
    return found.take(np.arange(rows) % len(found))


def fingerprint(table: pa.Table) -> str:
    """A hash of the texts."""
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
    found = []
    for row, length in enumerate(lengths.tolist()):
        query = queries[row // _OF_A_QUERY % len(queries)]
        words = passages[query][row % len(passages[query])].split()
        while len(words) < length:
            words += every[random.integers(len(every))].split()
        found.append({"query": query, "passage": " ".join(words[:length])})
    return pa.Table.from_pylist(found)


def _of_file(file: str, rows: int, columns: tuple[str, str], random: np.random.Generator) -> pa.Table:
    source = open_source(find_files([file]), TextColumns(*columns), allow_nulls=True)
    parts = [table.select(list(columns)) for table in islice(source.tables(1000), _LOOK_ROWS // 1000)]
    if not parts:
        return pa.table([[], []], names=list(COLUMNS))
    table = pa.concat_tables(parts).rename_columns(list(COLUMNS)).drop_null()
    places: dict[str, list[int]] = {}
    for place, query in enumerate(table["query"].to_pylist()):
        places.setdefault(query, []).append(place)
    order = random.permutation(len(places))
    mine = list(places.values())
    taken = [place for number in order for place in random.permutation(mine[number])[:_OF_A_QUERY]][:rows]
    return table.take(taken)
