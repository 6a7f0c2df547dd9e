"""Reading input: every kind of file, what is wrong with one, and the shape of the chunks."""

from __future__ import annotations

import datetime as dt
import decimal
import errno
import gzip
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputChanged, InputError
from rankmill.jobs.system import system
from rankmill.producer.collect import pairs as pairs_module
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files import source as source_module
from rankmill.producer.files.formats import jsonl
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.formats.table import stem
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import FileSource, open_source

COLUMNS = TextColumns("query", "passage")
ROWS = [{"query": f"q{n}", "passage": f'p, "{n}"', "n": n} for n in range(10)]


def opened(*paths: Path, allow_nulls: bool = True) -> FileSource:
    return open_source(find_files([str(path) for path in paths]), COLUMNS, allow_nulls=allow_nulls)


def read(*paths: Path, rows: int = 4) -> pa.Table:
    return pa.concat_tables(list(opened(*paths).tables(Sizing(rows))))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """`rows` in the kind of file that the name of `path` asks for."""
    table = pa.Table.from_pylist(rows)
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    kind = path.suffixes[0]
    if kind == ".parquet":
        pq.write_table(table, path, row_group_size=3)
        return path
    if kind in {".arrow", ".arrows"}:
        make = pa.ipc.new_file if kind == ".arrow" else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        return path
    with pa.output_stream(path, compression=compression) as stream:
        if kind == ".jsonl":
            stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        elif kind == ".tsv":
            stream.write(("\t".join(rows[0]) + "\n").encode())
            stream.write("".join("\t".join(map(str, row.values())) + "\n" for row in rows).encode())
        else:
            pcsv.write_csv(table, stream)
    return path


NAMES = [
    "a.parquet",
    "a.arrow",
    "a.arrows",
    *(f"a{kind}{end}" for kind in (".csv", ".tsv", ".jsonl") for end in ("", ".gz", ".zst")),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_is_read_in_order_and_with_types(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    assert opened(path).rows == 10
    table = read(path)
    is_text = path.suffixes[0] in {".csv", ".tsv"}
    assert table.to_pylist() == ([{**row, "n": str(row["n"])} for row in ROWS] if is_text else ROWS)
    assert table.schema.types == [pa.string(), pa.string(), pa.string() if is_text else pa.int64()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(batches=st.lists(st.integers(0, 9), max_size=12), rows=st.integers(1, 12))
def test_chunks_are_full_and_in_order(tmp_path: Path, batches: list[int], rows: int) -> None:
    total = sum(batches)
    path = tmp_path / "a.parquet"
    whole = pa.table({"query": pa.nulls(total, pa.string()), "passage": pa.nulls(total, pa.string())})
    whole = whole.append_column("n", pa.array(range(total), pa.int64()))
    with pq.ParquetWriter(path, whole.schema) as writer:
        start = 0
        for size in batches:
            writer.write_table(whole.slice(start, size))
            start += size
    chunks = list(opened(path).tables(Sizing(rows)))
    assert [n for chunk in chunks for n in chunk["n"].to_pylist()] == list(range(total))
    assert all(len(chunk) == rows for chunk in chunks[:-1])


def test_long_texts_make_smaller_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_module, "CHUNK_TEXT_BYTES", 1000)
    path = write(tmp_path / "a.parquet", [{"query": "q", "passage": "p" * 300} for _ in range(10)])
    chunks = list(opened(path).tables(Sizing(8)))
    assert sum(map(len, chunks)) == 10
    assert max(map(len, chunks)) <= 3


def test_all_types_of_a_parquet_file_survive(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "query": pa.array(["q", "q", "r"], pa.large_string()).dictionary_encode(),
            "passage": pa.array(["a", None, "c"], pa.large_string()),
            "when": pa.array([dt.datetime(2026, 1, 1), None, None], pa.timestamp("us", tz="Europe/Berlin")),
            "price": pa.array([decimal.Decimal("1.23"), None, None], pa.decimal128(9, 2)),
            "nested": pa.array([{"a": [1, 2], "b": "x"}, None, None]),
            "label": pa.array(["x", "y", None]).dictionary_encode(),
        }
    )
    pq.write_table(table, path)
    back = read(path)
    assert back.schema.equals(pq.read_schema(path))
    assert back.schema.field("when").type == table.schema.field("when").type
    assert back.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_the_time_for_a_file_is_linear_in_its_columns(tmp_path: Path, name: str) -> None:
    def seconds(columns: int) -> float:
        path = write(
            tmp_path / name, [{"query": "q", "passage": "p", **{f"c{n}": n for n in range(columns)}}]
        )
        before = time.process_time()
        assert read(path).num_columns == columns + 2
        return time.process_time() - before

    seconds(10)
    assert min(seconds(9000), seconds(9000)) < 8 * seconds(2250)  # 4 times the columns; 16 if quadratic


def test_directories_globs_and_lists_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    first, second = (
        write(tmp_path / "in" / "a.jsonl", ROWS[:3]),
        write(tmp_path / "in" / "deep" / "b.csv", ROWS[3:]),
    )
    (tmp_path / "in" / "notes.txt").write_text("not data")
    assert read(tmp_path / "in")["query"].to_pylist() == [row["query"] for row in ROWS]
    assert [file.path for file in find_files([f"{tmp_path}/in/**/*.csv"])] == [second]
    assert read(second, first)["n"].to_pylist() == [str(row["n"]) for row in ROWS[3:] + ROWS[:3]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.parquet", "a"), ("a.b.csv.gz", "a.b"), ("a.jsonl.zst", "a"), ("a.b.tsv", "a.b")],
)
def test_the_stem_is_the_name_without_its_kind(name: str, expected: str) -> None:
    assert stem(Path("folder") / name) == expected


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows", "csv", "tsv", "jsonl"])
def test_a_file_may_lack_all_columns_that_are_read(tmp_path: Path, kind: str) -> None:
    write(tmp_path / f"a.{kind}", [{"query": "q", "passage": "p", "n": "1"}])
    write(tmp_path / f"b.{kind}", [{"query": "q", "passage": "p"}] * 2)
    found = pa.Table.from_batches(opened(tmp_path).select(["n"]))
    assert [str(value or "") for value in found["n"].to_pylist()] == ["1", "", ""]


def test_files_may_lack_columns_or_have_narrower_types(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"query": "q", "passage": "p", "n": 1}])
    second = write(tmp_path / "b.jsonl", [{"query": "q", "passage": "p", "n": 0.5, "more": "x"}])
    assert read(first, second).to_pylist() == [
        {"query": "q", "passage": "p", "n": 1.0, "more": None},
        {"query": "q", "passage": "p", "n": 0.5, "more": "x"},
    ]


@pytest.mark.parametrize("name", [*NAMES, "a.json"])
def test_a_file_of_0_bytes_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    """Also in a folder, a glob or a list, beside files with rows: it may be one that was cut."""
    write(tmp_path / "in.jsonl", ROWS)
    (tmp_path / name).touch()
    (tmp_path / f"z-{name}").touch()
    for inputs in ([tmp_path], [tmp_path / "*"], [tmp_path / "in.jsonl", tmp_path / name]):
        with pytest.raises(InputError, match=rf"{name} has 0 bytes.*was it cut\? Write it again, or leave"):
            opened(*inputs)
    for path in (tmp_path / name, tmp_path / f"z-{name}"):
        path.unlink()
    assert opened(tmp_path).rows == len(ROWS)  # the way out


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["a.csv.gz", "a.tsv.gz", "a.jsonl.gz", "a.json.gz"])
def test_a_file_in_which_is_nothing_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(content))
    with pytest.raises(InputError, match=f"{name}: is empty"):
        opened(tmp_path / name)


def test_an_array_without_items_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    source = opened(tmp_path / "a.json")
    assert source.rows == 0
    assert source.schema.names == ["query", "passage"]
    assert list(source.tables(Sizing(4))) == []


@pytest.mark.parametrize("start", ["", "\n", "\r\n\n"])
def test_lines_without_anything_before_the_header_are_passed_over(tmp_path: Path, start: str) -> None:
    (tmp_path / "a.csv").write_text(f"{start}query,passage\nq,p\n")
    assert read(tmp_path / "a.csv").to_pylist() == [{"query": "q", "passage": "p"}]


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_file_with_only_a_header_keeps_its_columns(
    tmp_path: Path, name: str, between: str, end: str
) -> None:
    (tmp_path / name).write_text(between.join(("id", "query", "passage")) + end)
    assert opened(tmp_path / name).schema.names == ["id", "query", "passage"]
    assert opened(tmp_path / name).rows == 0
    (tmp_path / "b.csv").write_text("query,passage\nq,p\n")
    assert read(tmp_path).to_pylist() == [{"id": None, "query": "q", "passage": "p"}]


def test_csv_details(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfquery,passage\n"two\nlines",""\nnull,\n"a ""b""",NA\n')
    assert read(path).to_pylist() == [
        {"query": "two\nlines", "passage": ""},
        {"query": "null", "passage": None},
        {"query": 'a "b"', "passage": "NA"},
    ]


def test_tsv_knows_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('query\tpassage\n"open\tit\'s 5" wide\n')
    assert read(path).to_pylist() == [{"query": '"open', "passage": "it's 5\" wide"}]


def test_types_of_json_hold_for_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 64)
    values = [*range(50), 1.5, *range(10)]
    same = {"query": "q", "passage": "p", "day": "2024-01-01"}
    rows: list[dict[str, Any]] = [{**same, "number": value, "word": value} for value in values]
    rows += [{"query": "1", "passage": "2024-01-01", "number": 1, "day": "never", "word": "one"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    table = read(path)
    assert table.schema.field("number").type == pa.float64()
    assert table["number"].to_pylist() == [*values, 1]
    assert table["day"].to_pylist()[60:] == ["2024-01-01", "never"]
    assert table["passage"].to_pylist()[60:] == ["p", "2024-01-01"]
    assert table["word"].to_pylist() == [*map(str, values), "one"]


def test_json_lines_details(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"query": "a\\ud800b", "passage": "\\ud83c\\udf19", "deep": {"x": ["\\udc00"]}}\n'
        b'\n{"query": null, "passage": "control \\u0000\\u0007", "other": true}'
    )
    assert read(path).to_pylist() == [
        {"query": "a�b", "passage": "🌙", "deep": {"x": ["�"]}, "other": None},
        {"query": None, "passage": "control \x00\x07", "deep": None, "other": True},
    ]


BAD = {
    "latin1.csv": (b"query,passage\nq,p\nq,caf\xe9\n", "column 'passage', row 3 .* is not valid UTF-8"),
    "ragged.csv": (b"query,passage\nq,p\nq\n", "Row #3: Expected 2 columns, got 1.*in quotes.*--delimiter"),
    "utf16.csv": ("query,passage\nq,p\n".encode("utf-16"), "the header is not valid UTF-8.*-f utf-16"),
    "number.jsonl": (
        b'{"query": 1, "passage": "p"}\n',
        "line 1: column 'query' holds '1'.*write numbers as text",
    ),
    "twice.csv": (b"query,passage,query\na,b,c\n", "two columns are named 'query'"),
    "missing.csv": (
        b"question,passage\na,b\n",
        "no column 'query'; it has 'question', 'passage' .*--query-column",
    ),
    "missing.jsonl": (b'{"query": "q", "text": "t"}\n', "no column 'passage'; it has 'query', 'text'"),
    "wrong.jsonl": (
        b'{"query": "q", "passage": ["p"]}\n',
        "line 1: column 'passage' holds '\\[\"p\"\\]', not text",
    ),
    "broken.jsonl": (b'{"query": "q", "passage": "p"}\n{"query": "q", passage}\n', "line 2: not JSON"),
    "list.jsonl": (b'["q", "p"]\n', "line 1: not a JSON object but list"),
    "latin1.jsonl": (b'{"query": "q", "passage": "caf\xe9"}\n', "line 1: not valid UTF-8"),
    "damaged.csv.gz": (b"no gzip at all", "damaged.csv.gz: "),
    "cut.jsonl.gz": (gzip.compress(b'{"query": "q", "passage": "p"}\n' * 1000)[:-20], "cut.jsonl.gz: "),
    "noise.parquet": (b"noise", "not a whole Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        opened(tmp_path / name)
    assert name in str(caught.value)


def test_a_column_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"query": "q", "passage": 5}])
    with pytest.raises(InputError, match=r"column 'passage' holds int64, not text \(write it as text first"):
        opened(path)


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [{"query": "q", "passage": "p", "n": 1}])
    second = write(tmp_path / "b.parquet", [{"query": "q", "passage": "p", "n": "one"}])
    with pytest.raises(InputError, match=r"b\.parquet: its columns do not fit"):
        opened(first, second)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_nulls_can_be_refused_before_any_work(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"query": "q", "passage": "p"}] * 5 + [{"query": "q", "passage": None}])
    assert opened(path).rows == 6
    with pytest.raises(InputError, match=r"row 5 .* has a null query or passage"):
        opened(path, allow_nulls=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.parquet", "no such file"),
        ("*.csv", "no such file"),
        ("a.txt", "cannot tell what is in it"),
        ("/dev/stdin", "cannot tell what is in it.*; the name of standard input is -"),
        (".", "no file"),
    ],
)
def test_inputs_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match=message):
        find_files([name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [ROWS[:5], ROWS + ROWS, [{**row, "n": 7} for row in ROWS]])
def test_a_file_that_changes_while_it_is_read_is_told(
    tmp_path: Path, name: str, rows: list[dict[str, Any]]
) -> None:
    source = opened(write(tmp_path / name, ROWS))
    source.check_unchanged()
    write(tmp_path / name, rows)
    with pytest.raises(InputChanged, match=r"has changed while it was read \(it was .* and is"):
        list(source.tables(Sizing(4)))
    with pytest.raises(InputChanged, match="give the same command again"):
        source.check_unchanged()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [None, b"noise", b"query,passage,n\nq,p,x\n"])
def test_a_file_that_goes_or_is_damaged_while_it_is_read_is_told(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = write(tmp_path / name, ROWS)
    source = opened(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputChanged, match="has changed while it was read"):
        list(source.tables(Sizing(4)))


def test_a_file_that_the_disk_does_not_serve_is_not_said_to_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the scores of all its rows, and the parts that are in place, would be dropped."""
    source = opened(write(tmp_path / "a.csv", ROWS))

    def fails(path: Path, *_: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(InputError, match=r"a\.csv: cannot be read: Input/output error$"):
        source.check_unchanged()


def test_a_change_that_the_file_system_hides_is_seen_by_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "fingerprint", lambda path: "the same")
    source = opened(write(tmp_path / "a.csv", ROWS))
    write(tmp_path / "a.csv", ROWS[:7])
    with pytest.raises(InputChanged, match="it was 10 rows and is 7 rows"):
        list(source.tables(Sizing(4)))


@pytest.mark.parametrize("how", ["directory", "glob", "every file"])
def test_what_rankmill_has_left_is_never_input(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "in"
    work = folder / "deep" / "out.parquet.rankmill"
    work.mkdir(parents=True)
    mine = write(folder / "a.parquet", ROWS)
    write(work / "output.parquet", ROWS)
    (work / "errors.jsonl").write_text('{"row": 1}')
    (folder / "out.parquet.errors.jsonl").write_text('{"row": 1}')
    output = folder / "deep" / "out.parquet"
    pq.write_table(pa.table({"score": [1.0]}, metadata={"rankmill.version": "1"}), output)
    inputs = {
        "directory": [folder],
        "glob": [folder / "**" / "*"],
        "every file": [file for file in sorted(folder.rglob("*")) if file.is_file() and file != output],
    }[how]
    names = [str(name) for name in inputs]
    assert [file.path for file in find_files(names, str(output))] == [mine]
    assert [file.path for file in find_files(names)] == [mine]  # its folder is there: not finished
    shutil.rmtree(work)
    assert len(find_files([str(folder)])) == 2  # an output of an earlier run may be scored again
    with pytest.raises(InputError, match="holds only files that rankmill wrote"):
        find_files([str(folder / "out.parquet.errors.jsonl")])


def test_a_file_of_the_users_where_the_output_would_be_is_not_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    assert [file.path for file in find_files([str(tmp_path)], str(path))] == [path]


def test_a_signal_while_the_reader_s_thread_starts_ends_as_at_any_other_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The executor does not know the thread then, and closing said that a generator was executing."""
    write(tmp_path / "in.parquet", ROWS)
    batches = source_module.FileSource._batches
    reading = threading.Event()

    def slow(*arguments: Any) -> Iterator[pa.RecordBatch]:
        reading.set()
        time.sleep(0.2)
        yield from batches(*arguments)

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **named: Any) -> Any:
            super().submit(*arguments, **named)
            reading.wait()
            vars(self)["_threads"].clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(source_module.FileSource, "_batches", slow)
    monkeypatch.setattr(system, "Executor", Interrupted)
    tables = opened(tmp_path / "in.parquet").tables(Sizing(4))
    with pytest.raises(KeyboardInterrupt):
        next(tables)
    tables.close()
