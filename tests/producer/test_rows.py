"""Texts and conversations in all that people hold: the same rows, whatever holds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.model_names import Choice
from rankmill.producer.collect.pairs import USUAL_COLUMNS, cut_pairs
from rankmill.producer.collect.sizing import Sizing
from rankmill.testing import FakeClient
from rankmill.workers.models.conversations import exchange, read_messages

ROWS: dict[Inputs, list[Any]] = {
    "texts": ["the moon", None, "big cat"],
    "conversations": [
        exchange("why", "moon"), None, [{"role": "system", "content": "be kind"}, *exchange("how", "tea")]
    ],
}  # fmt: skip
HOLDERS: dict[str, Callable[[str, list[Any]], Any]] = {
    "a list": lambda name, rows: rows,
    "a generator": lambda name, rows: iter(rows),
    "dicts": lambda name, rows: [{name: row, "n": 1} for row in rows],
    "an array": lambda name, rows: np.array([*rows, "x"], object)[:-1],
    "a table": lambda name, rows: pa.table({name: rows, "n": [1, 2, 3]}),
    "a batch": lambda name, rows: pa.table({name: rows}).to_batches()[0],
    "a reader": lambda name, rows: pa.table({name: rows}).to_reader(2),
    "an array of Arrow": lambda name, rows: pa.array(rows),
    "a column of Arrow": lambda name, rows: pa.chunked_array([pa.array(rows)[:1], pa.array(rows)[1:]]),
    "a frame": lambda name, rows: pd.DataFrame({name: rows}),
    "a series": lambda name, rows: pd.Series(rows),
    "polars": lambda name, rows: pl.from_arrow(pa.table({name: rows})),
    "a series of polars": lambda name, rows: pl.from_arrow(pa.array(rows)),
    "a relation": lambda name, rows: duckdb.from_arrow(pa.table({name: rows})),
    "a dataset": lambda name, rows: datasets.Dataset.from_dict({name: rows}),
    "a column of a dataset": lambda name, rows: datasets.Dataset.from_dict({name: rows})[name],
    "a dataset that is iterated": lambda name, rows: datasets.Dataset.from_dict(
        {name: rows}
    ).to_iterable_dataset(),
    "a generator's dataset": lambda name, rows: datasets.IterableDataset.from_generator(
        lambda: ({name: row} for row in rows)
    ),
}


def cut(given: Any, inputs: Inputs) -> list[Any]:
    columns = USUAL_COLUMNS[inputs]
    tables = cut_pairs(given, columns, Sizing(2), inputs)
    return [row for table in tables for row in table[columns[0]].to_pylist()]


@pytest.mark.parametrize("inputs", ROWS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_rows_that_are_scored_alone(inputs: Inputs, holder: str) -> None:
    rows = ROWS[inputs]
    found = cut(HOLDERS[holder](USUAL_COLUMNS[inputs][0], rows), inputs)
    assert [row if inputs == "texts" or row is None else json.loads(row) for row in found] == rows


@pytest.mark.parametrize("holder", sorted(set(HOLDERS) - {"an array"}))
def test_a_key_that_only_another_message_has_is_not_there(holder: str) -> None:
    """Tables and datasets fill it with null, which templates do not take for absent."""
    call = {"function": {"name": "look", "arguments": {"at": "moon"}}}
    rows = [exchange("why", "moon"), [{"role": "assistant", "tool_calls": [call]}], None]
    found = cut(HOLDERS[holder]("messages", rows), "conversations")
    assert [row and read_messages(row) for row in found] == rows


@pytest.mark.parametrize(
    ("given", "inputs", "message"),
    [
        (pd.Series([1, 2]), "texts", "column 'text' holds int64, not text"),
        (pd.Series(["a", 5]), "texts", "texts are Series, which is not a table of texts: "),
        (pl.Series([["a"]]), "texts", "column 'text' holds .*list.*, not text"),
        (pa.array(["a"]), "pairs", "pairs are StringArray, which is not a table of texts: "),
        (pa.array([["a"]]), "conversations", "column 'messages' holds .*, not lists of {role, content}"),
        ("a", "texts", "texts are str, which cannot be read; give strings, "),
        ([["a"]], "texts", r"text 0 is \['a'\], not a string"),
        (exchange("why", "moon"), "conversations", "conversation 0 has no 'messages'; it has 'role'"),
    ],
    ids=str,
)
def test_what_are_no_such_rows_is_one_line(given: Any, inputs: Inputs, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        cut(given, inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [pl.String, pl.Categorical])
def test_rows_of_polars_are_divided_among_the_versions_of_an_alias(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    client = FakeClient()
    alias = Choice("m", {"m@1": 0.5, "m@2": 0.5})
    monkeypatch.setattr(client._names, "choice", lambda name: alias if name == "m@both" else None)
    pairs = [(f"moon {number}", "big cat") for number in range(20)]
    frame = pl.DataFrame(pairs, ["query", "passage"], orient="row").cast({"query": kind})
    run = client.begin(frame, model="m@both")
    assert sorted(run.model.split(",")) == ["m@1", "m@2"]
    np.testing.assert_array_equal(run.scores(timeout=60), client.score(pairs, model="m@1"))


class ProgressBar:
    """Like tqdm around a generator: there is a method for the length, which it does not know."""

    def __init__(self, rows: list[tuple[str, str]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._rows)

    def __len__(self) -> int:
        raise TypeError("'NoneType' object cannot be interpreted as an integer")


def test_rows_behind_a_progress_bar_are_scored() -> None:
    pairs = [(f"moon {number}", "big cat") for number in range(20)]
    client = FakeClient()
    np.testing.assert_array_equal(client.score(ProgressBar(pairs), timeout=60), client.score(pairs))
