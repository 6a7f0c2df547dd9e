"""Columns come back as they were written: identifiers, numbers, dates, and the folders of a partition."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats import delimited
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import FileSource, open_source

COLUMNS = TextColumns("query", "passage")


def opened(*inputs: Path | str, as_text: tuple[str, ...] = ()) -> FileSource:
    return open_source(find_files([str(name) for name in inputs]), COLUMNS, allow_nulls=True, as_text=as_text)


def read(*inputs: Path | str, as_text: tuple[str, ...] = ()) -> pa.Table:
    return pa.concat_tables(list(opened(*inputs, as_text=as_text).tables(lambda _: 4)))


def csv_of(path: Path, values: list[str], name: str = "n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in [f"query,passage,{name}", *(f"q,p,{v}" for v in values)]))
    return path


TEXT = [
    ["007", "0012"],
    ["1", "007"],
    ["+1"],
    ["1e5"],
    ["1.0", "1.00"],
    ["1.0", "1"],
    ["1.50"],
    [".5"],
    ["5."],
    ["NaN"],
    ["nan"],
    ["inf"],
    ["12345678901234567890"],
    ["9007199254740993", "0.5"],
    ["0x1F"],
    ["1_000"],
    [" 1"],
    ["TRUE"],
    ["True", "False"],
    ["1", "true"],
    ["01.11.2026"],
    ["2026-02-30"],
    ["2026-1-1"],
    ["2026-11-01T12:00:00Z"],
    ["2026-11-01", "2026-11-01 12:00:00"],
    ["12:30:00"],
    ["-"],
]
TYPED = [
    (["1", "-20", "0"], pa.int64(), [1, -20, 0]),
    (["9223372036854775807"], pa.int64(), [2**63 - 1]),
    (["1", "0.5"], pa.float64(), [1.0, 0.5]),
    (["1.0", "0.5", "-3.25"], pa.float64(), [1.0, 0.5, -3.25]),
    (["1e-07", "1e+16", "0.1"], pa.float64(), [1e-07, 1e16, 0.1]),
    (["true", "false"], pa.bool_(), [True, False]),
    (["", ""], pa.null(), [None, None]),
    (["", "3"], pa.int64(), [None, 3]),
]


@pytest.mark.parametrize("values", TEXT, ids=str)
@pytest.mark.parametrize("block", [1 << 24, 40])
def test_a_column_whose_values_would_not_come_back_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], block: int
) -> None:
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", block)
    table = read(csv_of(tmp_path / "a.csv", values))
    assert table["n"].to_pylist() == values
    assert table.schema.field("n").type == pa.string()


@pytest.mark.parametrize(("values", "kind", "expected"), TYPED, ids=str)
def test_numbers_that_come_back_are_numbers(
    tmp_path: Path, values: list[str], kind: pa.DataType, expected: list[Any]
) -> None:
    table = read(csv_of(tmp_path / "a.csv", values))
    assert (table.schema.field("n").type, table["n"].to_pylist()) == (kind, expected)


@pytest.mark.parametrize("text", ["2026-11-01", "2026-11-01 12:00:00"])
def test_dates_and_times_in_the_usual_form_are_typed(tmp_path: Path, text: str) -> None:
    table = read(csv_of(tmp_path / "a.csv", [text] * 3))
    assert pa.types.is_temporal(table.schema.field("n").type)
    assert table["n"].cast(pa.string()).to_pylist() == [text] * 3


_numbers = st.floats().map(repr) | st.floats().map(str) | st.integers().map(str) | st.decimals().map(str)
_near = st.text("0123456789.-+e:tT ", max_size=12)


@given(st.lists(_numbers, max_size=6) | st.lists(_near, max_size=3) | st.lists(st.floats(0, 1).map(repr)))
@example(["1e-05", "0.00001"])
@example(["1e16", "0.5"])
@example(["-0", "1"])
def test_whatever_is_read_as_a_number_can_be_printed_again(values: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        table = read(csv_of(Path(directory) / "a.csv", values)) if values else None
    if table is None:
        return
    back = ["" if value is None else value for value in table["n"].to_pylist()]
    if table.schema.field("n").type == pa.float64():
        printed = [value if value == "" else repr(value) for value in back]
        assert values in (printed, [text.removesuffix(".0") for text in printed])
    elif table.schema.field("n").type == pa.bool_():
        assert values == [str(value).lower() for value in back]
    else:
        assert values == [text.strip("T") for text in map(str, back)] or values == list(map(str, back))


def test_a_column_can_be_made_text(tmp_path: Path) -> None:
    first = csv_of(tmp_path / "a.csv", ["1", "2"], "id")
    second = tmp_path / "b.jsonl"
    second.write_text('{"query": "q", "passage": "p", "id": 3}\n')
    third = tmp_path / "c.parquet"
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "id": [4]}), third)
    table = read(first, second, third, as_text=("id",))
    assert table["id"].to_pylist() == ["1", "2", "3", "4"]
    assert read(first, second, third)["id"].to_pylist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match="--text-columns: no column 'ID' in the input"):
        opened(first, as_text=("ID",))


def test_files_of_one_input_agree(tmp_path: Path) -> None:
    first, second = csv_of(tmp_path / "a.csv", ["1", "12"]), csv_of(tmp_path / "b.csv", ["007"])
    assert read(first, second)["n"].to_pylist() == ["1", "12", "007"]
    third = csv_of(tmp_path / "c.csv", ["1.0"])
    assert read(first, third)["n"].to_pylist() == ["1", "12", "1.0"]
    fourth = csv_of(tmp_path / "d.csv", ["0.5"])
    assert read(first, fourth)["n"].to_pylist() == [1, 12, 0.5]
    typed = tmp_path / "e.parquet"
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [5]}), typed)
    assert read(typed, second)["n"].to_pylist() == ["5", "007"]
    assert read(typed, first).schema.field("n").type == pa.int64()


def test_csv_and_json_lines_of_the_same_data_can_be_scored_together(tmp_path: Path) -> None:
    same = {"query": "q", "passage": "p"}
    rows = [
        {**same, "id": "007", "n": 5, "x": 0.5, "day": "2026-11-01", "code": "12", "ok": True},
        {**same, "id": "12", "n": 6, "x": 1.0, "day": "2026-11-02", "code": "13", "ok": False},
    ]
    jsonl, csv = tmp_path / "a.jsonl", tmp_path / "b.csv"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [[json.dumps(value).strip('"') for value in row.values()] for row in rows]
    csv.write_text("\n".join(",".join(line) for line in [list(rows[0]), *lines]))
    for files in ([jsonl, csv], [csv, jsonl]):
        assert read(*files).to_pylist() == rows + rows


def test_text_in_json_lines_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"query": "q", "passage": "p", "day": "2026-11-01", "deep": {"at": ["2026-11-01 12:00:00"]}}
    path.write_text(json.dumps(row))
    assert read(path).to_pylist() == [row]


def test_the_folders_of_a_partition_are_columns(tmp_path: Path) -> None:
    for day in ("2026-11-01", "2026-11-02"):
        csv_of(tmp_path / "in" / f"date={day}" / "shard=7" / "a%20b=x%2Fy" / "part.csv", ["1"])
    expected = [
        {"query": "q", "passage": "p", "n": 1, "date": day, "shard": 7, "a b": "x/y"}
        for day in ("2026-11-01", "2026-11-02")
    ]
    files = sorted((tmp_path / "in").rglob("*.csv"))
    assert read(tmp_path / "in").to_pylist() == expected
    assert read(f"{tmp_path}/in/**/*.csv").to_pylist() == expected
    assert read(f"{tmp_path}/in/date=*/shard=7/a*/*.csv").to_pylist() == expected
    assert read(*files).to_pylist() == expected  # as a shell makes them of a glob
    assert "date" not in read(files[0]).schema.names  # a file by itself, as before
    odd = csv_of(tmp_path / "in" / "date=__HIVE_DEFAULT_PARTITION__" / "shard=007" / "part.csv", ["1"])
    assert read(tmp_path / "in")["shard"].to_pylist() == ["7", "7", "007"]
    odd.unlink()
    csv_of(tmp_path / "in" / "date=2026-11-03" / "part.csv", ["1"], "date")
    with pytest.raises(InputError, match=r"'date' is in the file and in its folder's name, date=2026-11-03"):
        opened(tmp_path / "in")
