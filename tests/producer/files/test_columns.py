"""Columns come back as they were written: identifiers, numbers, dates, and the folders of a partition."""

from __future__ import annotations

import gzip
import json
import uuid
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.formats import delimited
from rankmill.producer.files.formats.base import ReadOptions, TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import FileSource, open_source

COLUMNS = TextColumns("query", "passage")


def opened(*inputs: Path | str, as_text: tuple[str, ...] = ()) -> FileSource:
    return open_source(find_files([str(name) for name in inputs]), COLUMNS, allow_nulls=True, as_text=as_text)


def read(*inputs: Path | str, as_text: tuple[str, ...] = ()) -> pa.Table:
    return pa.concat_tables(list(opened(*inputs, as_text=as_text).tables(Sizing(4))))


def csv_of(path: Path, values: list[str], name: str = "n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in [f"query,passage,{name}", *(f"q,p,{v}" for v in values)]))
    return path


VALUES = [
    *("007", "0012", "1", "-20", "+1", "1e5", "1.0", "1.00", "1.50", ".5", "5.", "NaN", "nan", "inf", "null"),
    *("12345678901234567890", "9007199254740993", "0x1F", "1_000", " 1", "1 ", "TRUE", "true", "False", "-"),
    *("01.11.2026", "2026-02-30", "2026-11-01", "2026-11-01T12:00:00Z", "2026-11-01 12:00:00", "12:30:00"),
]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("block", [1 << 24, 40])
def test_values_of_a_format_without_types_stay_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    """Whatever they look like, and whatever the others of their column are."""
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", block)
    between = "," if name == "a.csv" else "\t"
    lines = [["query", "passage", "n"], *(["q", "p", value] for value in [*VALUES, ""])]
    (tmp_path / name).write_text("".join(between.join(line) + "\n" for line in lines))
    table = read(tmp_path / name)
    assert table["n"].to_pylist() == [*VALUES, None]
    assert table.schema.field("n").type == pa.string()


def test_a_column_can_be_made_text(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl"
    first.write_text('{"query": "q", "passage": "p", "id": 3}\n{"query": "q", "passage": "p", "id": 4}\n')
    second = tmp_path / "b.parquet"
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "id": [5]}), second)
    assert read(first, second)["id"].to_pylist() == [3, 4, 5]
    assert read(first, second, as_text=("id",))["id"].to_pylist() == ["3", "4", "5"]
    with pytest.raises(InputError, match="--text-columns: no column 'ID' in the input"):
        opened(first, as_text=("ID",))


def test_a_column_that_has_a_type_in_some_files_alone_is_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CSV and JSON fit whatever the others have; of formats with types both must be one."""
    csv = csv_of(tmp_path / "a.csv", ["1", "007"])
    jsonl, parquet = tmp_path / "b.jsonl", tmp_path / "c.parquet"
    jsonl.write_text('{"query": "q", "passage": "p", "n": 3.5}\n{"query": "q", "passage": "p", "n": null}\n')
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [4]}), parquet)
    assert read(csv, jsonl, parquet)["n"].to_pylist() == ["1", "007", "3.5", None, "4"]
    assert "no one type fits all values of column 'n': the output has their text" in caplog.text
    assert read(jsonl, parquet)["n"].to_pylist() == [3.5, None, 4.0]
    other = tmp_path / "d.parquet"
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": ["four"]}), other)
    assert read(jsonl, other)["n"].to_pylist() == ["3.5", None, "four"]
    with pytest.raises(InputError, match=r"d\.parquet: .* 'n' holds string, not int64 \(--text-columns NAME"):
        opened(parquet, other)
    assert read(parquet, other, as_text=("n",))["n"].to_pylist() == ["4", "four"]  # the way out


def test_uuids_beside_texts_are_read_as_text(tmp_path: Path) -> None:
    csv, parquet, other = csv_of(tmp_path / "a.csv", ["x"]), tmp_path / "b.parquet", tmp_path / "c.parquet"
    ids = pa.array([uuid.UUID(int=7).bytes, None], pa.binary(16)).cast(pa.uuid())
    pq.write_table(pa.table({"query": ["q"] * 2, "passage": ["p"] * 2, "n": ids}), parquet)
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": ["four"]}), other)
    shown = [str(uuid.UUID(int=7)), None]
    assert read(parquet)["n"].type == pa.uuid()
    assert read(parquet, as_text=("n",))["n"].to_pylist() == shown
    with pytest.raises(InputError, match="--text-columns NAME"):
        opened(parquet, other)
    assert read(parquet, other, as_text=("n",))["n"].to_pylist() == [*shown, "four"]
    assert read(csv, parquet)["n"].to_pylist() == ["x", *shown]


def test_a_number_that_the_type_of_all_files_cannot_hold_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, number in zip(paths, (2**53 + 1, 0.5), strict=True):
        pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [number]}), path)
    with pytest.raises(
        InputError, match=r"a\.parquet: column 'n' does not fit double.*--text-columns n reads"
    ):
        opened(*paths)  # before any work
    assert read(*paths, as_text=("n",))["n"].to_pylist() == [str(2**53 + 1), "0.5"]


def test_a_number_of_json_that_the_type_of_all_files_cannot_hold_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, number in zip(paths, (2**53 + 1, 0.5), strict=True):
        path.write_text(json.dumps({"query": "q", "passage": "p", "n": number}))
    with pytest.raises(
        InputError,
        match=r"a\.jsonl, line 1: column 'n' holds '9007199254740993', not double.*--text-columns n reads",
    ):
        opened(*paths)  # before any work
    assert read(*paths, as_text=("n",))["n"].to_pylist() == [str(2**53 + 1), "0.5"]


def test_decimals_are_not_rounded_to_the_floats_of_another_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    price = Decimal("1234567890123.23")
    for inside in (False, True):
        for path, number in zip(paths, (price, 0.5), strict=True):
            value = {"is": number} if inside else number
            pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [value]}), path)
        with pytest.raises(
            InputError, match=r"b\.parquet: its columns do not fit .* 'n' holds (struct<is: )?double"
        ):
            opened(*paths)
    for path, value in zip(paths, ({"is": price}, {"is": 0.5, "was": price}), strict=True):
        pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [value]}), path)
    with pytest.raises(InputError, match=r"its columns do not fit .*\(write the column with one type in all"):
        opened(*paths)  # though as many decimals stay
    with pytest.raises(InputError, match=r"--text-columns: column 'n' .* holds struct"):
        opened(*paths, as_text=("n",))  # so the message does not name this option
    for path, number in zip(paths, (2**53 + 1, 0.5), strict=True):
        pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [{"is": number}]}), path)
    with pytest.raises(InputError, match=r"does not fit struct.*\(write the column with one type in all"):
        opened(*paths)
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [0.5]}), paths[1])
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "n": [price]}), paths[0])
    assert read(*paths, as_text=("n",))["n"].to_pylist() == [str(price), "0.5"]  # the way out


@pytest.mark.parametrize("swapped", [False, True])
def test_a_dictionary_in_one_file_is_text_in_another(tmp_path: Path, swapped: bool) -> None:
    """As score-file writes the queries of a run, and polars its categories."""
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    table = pa.table({"query": ["q", "r"], "passage": ["p", "s"], "kind": ["x", None]})
    encoded = table.set_column(0, "query", table["query"].dictionary_encode())
    encoded = encoded.set_column(2, "kind", table["kind"].cast(pa.dictionary(pa.int8(), pa.large_string())))
    for path, each in zip(reversed(paths) if swapped else paths, (table, encoded), strict=True):
        pq.write_table(each, path)
    assert read(*paths).to_pylist() == table.to_pylist() * 2


def test_text_in_json_lines_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"query": "q", "passage": "p", "day": "2026-11-01", "deep": {"at": ["2026-11-01 12:00:00"]}}
    path.write_text(json.dumps(row))
    assert read(path).to_pylist() == [row]


def test_the_folders_of_a_partition_are_columns(tmp_path: Path) -> None:
    for day in ("2026-11-01", "2026-11-02"):
        csv_of(tmp_path / "in" / f"date={day}" / "shard=7" / "a%20b=x%2Fy" / "part.csv", ["1"])
    expected = [
        {"query": "q", "passage": "p", "n": "1", "date": day, "shard": 7, "a b": "x/y"}
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


def test_a_text_to_score_may_be_a_folder_s_number(tmp_path: Path) -> None:
    (tmp_path / "query=42").mkdir()
    (tmp_path / "query=42" / "a.csv").write_text("passage\np\n")
    assert read(tmp_path).to_pylist() == [{"passage": "p", "query": "42"}]


TOP_1000 = '1048585\t7187158\twhat is paula deen\'s brother\tEarl W. "Bubba" Hiers\n1\t2\tq\t\n'
COLUMNS_OF_TOP_1000 = ("qid", "pid", "query", "passage")


def with_names(path: Path, *names: str) -> FileSource:
    options = ReadOptions(names=names)
    return open_source(find_files([str(path)]), COLUMNS, allow_nulls=True, options=options)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_file_without_a_header_gets_the_names_that_are_given(tmp_path: Path, end: str) -> None:
    rows = [
        {"qid": "1048585", "pid": "7187158", "query": "what is paula deen's brother",
         "passage": 'Earl W. "Bubba" Hiers'},
        {"qid": "1", "pid": "2", "query": "q", "passage": None},
    ]  # fmt: skip
    pack = gzip.compress if end else bytes
    (tmp_path / f"top1000.tsv{end}").write_bytes(pack(TOP_1000.encode()))
    (tmp_path / f"a.csv{end}").write_bytes(pack(b'"1";"a;b";q;"say ""x"""\n2;c;r;\n'))
    found = with_names(tmp_path / f"top1000.tsv{end}", *COLUMNS_OF_TOP_1000)
    assert pa.concat_tables(found.tables(Sizing(4))).to_pylist() == rows
    assert found.rows == 2
    table = pa.concat_tables(with_names(tmp_path / f"a.csv{end}", *COLUMNS_OF_TOP_1000).tables(Sizing(4)))
    assert [*table.to_pylist()[0].values()] == ["1", "a;b", "q", 'say "x"']


def test_names_that_do_not_fit_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(TOP_1000)
    with pytest.raises(InputError, match=r"its first row has 4 fields, and --columns names 3"):
        with_names(path, "qid", "query", "passage")
    with pytest.raises(InputError, match=r"no column 'passage'; it has 'qid', 'pid', 'query', 'text'"):
        with_names(path, "qid", "pid", "query", "text")
    with pytest.raises(InputError, match=r"--columns names those of a file without a header\)"):
        opened(path)
    for header in (COLUMNS_OF_TOP_1000, ("QID", "PID", "Query", "Passage"), ("id", "doc", "q", "passage")):
        path.write_text("\t".join(header) + f"\n{TOP_1000}")
        with pytest.raises(
            InputError, match=r"a\.tsv: its first line names the columns: leave out --columns"
        ):
            with_names(path, *COLUMNS_OF_TOP_1000)
    path.write_bytes(TOP_1000.encode() + b"3\t4\tq\tcaf\xe9\n")
    with pytest.raises(InputError, match=r"column 'passage', row 3 \(counted from 1\) is not valid UTF-8"):
        with_names(path, *COLUMNS_OF_TOP_1000)


def test_a_first_row_of_any_length_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    for size in (200_000, 2_000_000):
        path.write_text(f"q\t{'word ' * (size // 5)}\nr\tp\n")
        assert with_names(path, "query", "passage").rows == 2
        with pytest.raises(InputError, match=r"too long for a header; --columns names the columns"):
            opened(path)
