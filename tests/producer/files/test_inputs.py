"""Inputs beside plain files of pairs: JSON arrays, delimiters, lists of passages, limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as pf
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.corpus.texts import read_texts
from rankmill.producer.files.formats import json_array
from rankmill.producer.files.formats.base import ReadOptions, TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import FileSource, open_source

PAIRS = [{"query": f"q{n}", "passage": f"p{n}", "n": n} for n in range(5)]


def opened(path: Path, passage: str = "passage", *, nulls: bool = True, **given: Any) -> FileSource:
    limit = given.pop("limit", None)
    columns = TextColumns("query", passage)
    return open_source(
        find_files([str(path)]), columns, allow_nulls=nulls, options=ReadOptions(**given), limit=limit
    )


def read(path: Path, passage: str = "passage", **given: Any) -> list[dict[str, Any]]:
    source = opened(path, passage, **given)
    rows = [row for table in source.tables(Sizing(2)) for row in table.to_pylist()]
    assert len(rows) == source.rows
    return rows


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read(tmp_path: Path, name: str, indent: int | None) -> None:
    raw = json.dumps(PAIRS, indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert read(tmp_path / name) == PAIRS


def test_json_lines_may_be_called_json_and_parquet_pq(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    pq.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "b.pq")
    assert read(tmp_path / "a.json") == read(tmp_path / "b.pq") == PAIRS


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(_values, max_size=6), st.sampled_from([None, 1]), st.integers(1, 9), st.booleans())
def test_items_of_an_array_are_found_wherever_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, values: list[Any], indent: int | None, size: int, ascii_only: bool
) -> None:
    monkeypatch.setattr(json_array, "_READ_BYTES", size)
    monkeypatch.setattr(json_array, "_BLOCK_CHARS", 4)
    raw = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    stream = pa.input_stream(pa.BufferReader(raw))
    blocks = list(json_array.array_blocks(Path("a.json"), stream, stream.read(size)))
    found = [(number, json.loads(line)) for number, block in blocks for line in [block.split(b"\n")[0]]]
    every = [json.loads(line) for _, block in blocks for line in block.split(b"\n")]
    assert every == values
    assert all(values[number - 1] == value for number, value in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"query": "q", "passage": "p"}', "item 1: not JSON: no comma after it"),
        ('[{"query": "q", "passage": "p"}, {"query"', "item 2: not JSON"),
        ('[{"query": "q", "passage": "p"},]', "item 2: not JSON"),
        ('[{"query": "q", "passage": "p"}] more', "there is something after the array"),
        ("[1]", "line 1: not a JSON object but int"),
        ("[" * 100_000, "nested deeper than 32"),
        ("[{}" + "," * 3 + "]", "item 2: not JSON"),
    ],
)
def test_damaged_arrays(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("delimiter", "name"), [(",", "comma"), (";", "semicolon"), ("\t", "tab"), ("|", "pipe")]
)
def test_the_delimiter_of_csv_is_noticed_or_named(tmp_path: Path, delimiter: str, name: str) -> None:
    rows = [["query", "passage", "a,b|c"], ['"q;1"', '"say ""p"""', "1"]]
    (tmp_path / "a.csv").write_text(
        "".join(delimiter.join(row) + "\n" for row in rows).replace("a,b|c", '"a,b|c"')
    )
    expected = [{"query": "q;1", "passage": 'say "p"', "a,b|c": "1"}]
    assert read(tmp_path / "a.csv") == expected
    assert (
        read(tmp_path / "a.csv", delimiter=delimiter) == read(tmp_path / "a.csv", delimiter=name) == expected
    )


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_conversations_and_of_a_corpus_is_noticed(tmp_path: Path, delimiter: str) -> None:
    conversation = '"[{""role"": ""user"", ""content"": ""a,b;c|d""}]"'
    (tmp_path / "a.csv").write_text(f"id{delimiter}messages\n1{delimiter}{conversation}\n")
    columns = TextColumns("messages", inputs="conversations")
    source = open_source(find_files([str(tmp_path / "a.csv")]), columns, allow_nulls=False)
    assert source.schema.names == ["id", "messages"]

    (tmp_path / "corpus.csv").write_text(f'id{delimiter}text\n1{delimiter}"a,b;c|d"\n')
    read_parts = [(ids.to_pylist(), texts.to_pylist()) for ids, texts in read_texts(tmp_path / "corpus.csv")]
    assert (["1"], ["a,b;c|d"]) in read_parts


def test_a_file_without_the_columns_is_shown_as_it_is_separated(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question;answer\nq;p\n")
    with pytest.raises(InputError, match="no column 'query'; it has 'question', 'answer'"):
        opened(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_lists_of_passages_become_pairs(tmp_path: Path, name: str) -> None:
    rows = [
        {"query": "q0", "passages": ["a", "b", None], "ids": [1, 2, 3], "more": [7]},
        {"query": "q1", "passages": [], "ids": [], "more": []},
        {"query": "q2", "passages": ["c"], "ids": [4], "more": None},
        {"query": "q3", "passages": None, "ids": None, "more": None},
    ]
    table = pa.Table.from_pylist(rows)
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(tmp_path / name, "passages", lists=("passages", "ids")) == [
        {"query": "q0", "passages": "a", "ids": 1, "more": [7]},
        {"query": "q0", "passages": "b", "ids": 2, "more": [7]},
        {"query": "q0", "passages": None, "ids": 3, "more": [7]},
        {"query": "q2", "passages": "c", "ids": 4, "more": None},
    ]
    with pytest.raises(InputError, match=r"row 2 \(counted from 0\) has a null query or passage"):
        opened(tmp_path / name, "passages", lists=("passages", "ids"), nulls=False)
    with pytest.raises(InputError, match=r"row 0 .* has 3 items in 'passages' and 1 in 'more'"):
        read(tmp_path / name, "passages", lists=("passages", "more"))
    with pytest.raises(InputError, match="--list-columns: no column 'x'"):
        opened(tmp_path / name, "passages", lists=("passages", "x"))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_a_file_in_which_all_lists_are_null_has_no_pairs(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"query": "q0", "passages": ["a"], "n": 0}\n')
    table = pa.table({"query": ["q1", "q2"], "passages": pa.nulls(2), "n": [1, 2]})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "b.parquet")
    elif kind == "arrow":
        pf.write_feather(table, tmp_path / "b.arrow")
    else:
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    found = read(tmp_path, "passages", lists=("passages",))
    assert found == [{"query": "q0", "passages": "a", "n": 0}]


def test_a_list_that_is_not_unrolled_is_told_how(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["q"], "passage": [["p"]]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="--list-columns passage makes a row of each item"):
        opened(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'query' holds string, not lists"):
        opened(tmp_path / "a.parquet", lists=("query",))
    (tmp_path / "a.jsonl").write_text('{"query": "q", "passage": ["p"]}\n')
    without_options = {"parquet": "write it as text first", "jsonl": r"write numbers as text, in quotes\)"}
    for kind, why in without_options.items():  # as for check-precision
        with pytest.raises(InputError, match=rf"not text \({why}"):
            opened(tmp_path / f"a.{kind}", way_out="write the pairs as Parquet")


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_a_limit_takes_the_first_rows(tmp_path: Path, limit: int) -> None:
    pq.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet", limit=limit) == PAIRS[:limit]


def test_nulls_beyond_the_limit_do_not_matter(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["q", None], "passage": ["p", "p"]}), tmp_path / "a.parquet")
    assert opened(tmp_path / "a.parquet", nulls=False, limit=1).rows == 1
    with pytest.raises(InputError, match="row 1"):
        opened(tmp_path / "a.parquet", nulls=False, limit=2)


def found(folder: Path, *names: str) -> list[str]:
    files = find_files([f"{folder}/{name}" if name else str(folder) for name in names])
    return [str(file.path.relative_to(folder)) for file in files]


@pytest.fixture
def with_hidden(tmp_path: Path) -> Path:
    """A folder with hidden files and folders, as notebooks, Spark and macOS leave them."""
    names = ["a", "deep/b", "_day=1/c", "day=1/_d", "_temporary/0/e", "_f", ".ipynb_checkpoints/g", "._h"]
    for name in (*names, "_temporary/_i", "deep/_temporary/j"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(PAIRS[0]) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([""], ["_day=1/c.jsonl", "a.jsonl", "deep/b.jsonl"]),
        (["**/*.jsonl"], ["_day=1/c.jsonl", "a.jsonl", "deep/b.jsonl"]),
        (["*.jsonl"], ["a.jsonl"]),
        (["*/*.jsonl"], ["_day=1/c.jsonl", "deep/b.jsonl"]),
        (["[._a]*.jsonl"], ["a.jsonl"]),
        (["_*.jsonl"], ["_f.jsonl"]),
        ([".*.jsonl"], ["._h.jsonl"]),
        (["**/_*.jsonl"], ["_f.jsonl", "_temporary/_i.jsonl", "day=1/_d.jsonl"]),
        (["_t*/_*.jsonl"], ["_temporary/_i.jsonl"]),
        (["_t*/**/*.jsonl"], ["_temporary/0/e.jsonl", "_temporary/_i.jsonl"]),
        (["_temporary/*/*.jsonl"], ["_temporary/0/e.jsonl"]),
        (["_temporary"], ["_temporary/0/e.jsonl"]),
        (["_f.jsonl", "day=1/_d.jsonl"], ["_f.jsonl", "day=1/_d.jsonl"]),
        ([".ipynb_checkpoints"], [".ipynb_checkpoints/g.jsonl"]),
    ],
)
def test_hidden_files_are_read_only_where_they_are_asked_for(
    with_hidden: Path, names: list[str], expected: list[str]
) -> None:
    assert found(with_hidden, *names) == expected


def test_how_many_hidden_files_are_left_out_is_logged(
    with_hidden: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found(with_hidden, "")
    assert "left out of the input: 7 hidden files" in caplog.text
    with pytest.raises(InputError, match=r"only hidden files, such as .*_d\.jsonl.*; name a file itself"):
        found(with_hidden, "day=*/*.jsonl")


def test_a_folder_of_hidden_files_says_so(tmp_path: Path) -> None:
    (tmp_path / "_a.jsonl").write_text(json.dumps(PAIRS[0]))
    with pytest.raises(InputError, match="holds only hidden files"):
        find_files([str(tmp_path)])
    assert read(tmp_path / "_a.jsonl") == PAIRS[:1]  # the way out
