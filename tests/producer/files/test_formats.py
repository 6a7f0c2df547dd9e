"""The table of formats: what one of its lines brings, and that its formats are read as they were written."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from rankmill import plugins
from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.scored import distinct_pairs
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.corpus.rankings import read_ranking
from rankmill.producer.files.formats.base import ReadOptions, TextColumns
from rankmill.producer.files.formats.delimited import CSV, TSV
from rankmill.producer.files.formats.table import formats, is_output_name, open_reader
from rankmill.producer.files.formats.trec import TREC
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.outputs import OutputFormat
from rankmill.producer.files.ranking import HeldRows
from rankmill.producer.files.source import open_source

COLUMNS = TextColumns("query", "passage")
ENDINGS = [
    ending + compression
    for each in formats()
    for ending in each.endings
    for compression in ("", *((".gz", ".zst") if each.is_text else ()))
]


def test_a_format_is_an_entry_point_of_its_name() -> None:
    assert [each.name for each in formats()] == plugins.names("rankmill.formats")


@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if is_output_name(f"a{ending}")])
def test_what_is_written_is_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    rows = [
        {"query_id": f"q{n}", "doc_id": "d", "query": "q", "passage": "p p", "rank": n, "score": n / 2}
        for n in range(5)
    ]
    table = pa.Table.from_pylist(rows)
    writer = OutputFormat().writer(path, path, table.schema, "score")
    writer.write(table)
    writer.close({})
    if OutputFormat().of(path) is TREC:
        found = [tuple(row.values()) for batch in read_ranking(path) for row in batch.to_pylist()]
        assert found == [(f"q{n}", "d", n, n / 2) for n in range(5)]
        return
    if OutputFormat().of(path) in {CSV, TSV}:  # which have no types
        rows = [
            {name: f"{value:g}" if name == "score" else str(value) for name, value in row.items()}
            for row in rows
        ]
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True)
    assert [row for read in source.tables(Sizing(3)) for row in read.to_pylist()] == rows
    assert open_reader(path).shown_columns().names == table.schema.names


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_a_run_leaves_beside_its_output_is_no_input(tmp_path: Path, ending: str) -> None:
    (tmp_path / "mine.jsonl").write_text('{"query": "q", "passage": "p"}\n')
    is_output = is_output_name(f"out{ending}")
    (tmp_path / f"out{ending}.errors.jsonl").write_text('{"row": 1}\n')
    folder = tmp_path / f"out{ending}.rankmill"
    folder.mkdir()
    (folder / "left.jsonl").write_text("{}\n")
    names = [file.path.name for file in find_files([str(tmp_path)])]
    assert names == (["mine.jsonl"] if is_output else ["mine.jsonl", f"out{ending}.errors.jsonl"])


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".jsonl"])
def test_some_columns_of_lists_have_a_row_for_each_item(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    table = pa.table({"id": [1, 2], "query": ["a", "b"], "passage": [["x", "y"], ["z"]]})
    if ending == ".parquet":
        pq.write_table(table, path)
    elif ending == ".arrow":
        feather.write_feather(table, path)
    else:
        path.write_text(table.to_pandas().to_json(orient="records", lines=True))
    options = ReadOptions(lists=["passage"])
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True, options=options)
    assert [n for batch in source.select(["id"]) for n in batch["id"].to_pylist()] == [1, 1, 2]


def read_all(path: Path) -> pa.Table:
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True)
    return pa.concat_tables(source.tables(Sizing(3)))


@pytest.mark.parametrize("ending", [".arrow", ".arrows", ".feather"])
def test_arrow_files_of_other_libraries_are_read(tmp_path: Path, ending: str) -> None:
    """Also those of datasets' cache, which end in .arrow and are streams."""
    frame = pl.DataFrame({"query": ["q", None], "passage": ["p", "r"], "kind": ["x", "x"]})
    frame = frame.with_columns(pl.col("kind").cast(pl.Categorical))
    path = tmp_path / f"a{ending}"
    for write in (frame.write_ipc, frame.write_ipc_stream):
        write(path)
        assert read_all(path).to_pylist() == frame.to_dicts()
    assert open_reader(path, ["query"]).survey(find_nulls=True).first_null == 1


def test_small_dictionaries_of_several_files_are_joined(tmp_path: Path) -> None:
    """Pandas writes up to 127 categories with 8-bit numbers, which those of all files may not fit."""
    rows = [{"query": f"{name} {n}", "passage": "p"} for name in "ab" for n in range(100)]
    for name, part in (("a", rows[:100]), ("b", rows[100:])):
        table = pa.Table.from_pylist(part)
        codes = pa.array(range(100), pa.int8())
        query = pa.DictionaryArray.from_arrays(codes, table["query"].combine_chunks())
        feather.write_feather(table.set_column(0, "query", query), tmp_path / f"{name}.feather")
    source = open_source(find_files([str(tmp_path)]), COLUMNS, allow_nulls=True)
    (table,) = source.tables(Sizing(1000))
    assert distinct_pairs(table, ("query", "passage"), None) is None
    assert table.combine_chunks().to_pylist() == rows
    pq.write_table(table, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
    own = [
        pa.DictionaryArray.from_arrays(codes, pa.array([f"{name}{n}" for n in range(100)])) for name in "ab"
    ]
    given = pa.table({"query": pa.chunked_array(own), "passage": ["p"] * 200})
    assert distinct_pairs(given, ("query", "passage"), None) is None


@pytest.mark.parametrize("ending", [".arrow", ".arrows", ".parquet"])
def test_views_of_text_are_ranked_and_unrolled_as_plain_text(tmp_path: Path, ending: str) -> None:
    """Polars writes views, and Arrow can neither take rows of them nor compare them by a pattern."""
    text, data = pa.string_view(), pa.binary_view()
    table = pa.table(
        {
            "query": pa.array(["q", "r", "q"], text),
            "passage": pa.array([["x", "y"], [], [None]], pa.list_(text)),
            "doc_id": pa.array(["a", "b", "c"], text),
            "raw": pa.array([b"x", None, b""], data),
            "more": pa.array(
                [{"a": ["x", None]}, None, {"a": None}], pa.struct([("a", pa.large_list(text))])
            ),
        }
    )
    path = tmp_path / f"a{ending}"
    if ending == ".parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if ending == ".arrow" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    options = ReadOptions(lists=["passage"])
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True, options=options)
    first, _, last = table.to_pylist()
    unrolled = [{**first, "passage": "x"}, {**first, "passage": "y"}, {**last, "passage": None}]
    read = pa.concat_tables(source.tables(Sizing(2)))
    assert read.to_pylist() == unrolled
    held = HeldRows(tmp_path, "query", ["score"], rank="rank", passage="doc_id")
    held.add(read.append_column("score", pa.array([1.0, 2.0, 2.0], pa.float32())))
    ranked = pa.concat_tables(held.finish()).drop_columns(["score", "rank"])
    assert ranked.to_pylist() == [unrolled[2], unrolled[1], unrolled[0]]


@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
def test_the_metadata_of_an_earlier_output_are_left_out(tmp_path: Path, ending: str) -> None:
    """They may be in the schema, if another program has written the output again."""
    table = pa.table({"query": ["q"], "passage": ["p"]})
    table = table.replace_schema_metadata({"rankmill.instruction": "judge", "theirs": "x"})
    path = tmp_path / f"a{ending}"
    if ending == ".parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True)
    assert source.schema.metadata == {b"theirs": b"x"}


@pytest.mark.parametrize("cut", [8, 200])
@pytest.mark.parametrize("ending", [".arrow", ".arrows"])
def test_an_arrow_file_that_was_cut_is_refused(tmp_path: Path, ending: str, cut: int) -> None:
    """Arrow takes a stream for whole that ends between two batches, and reads one of two in a file."""
    path = tmp_path / f"a{ending}"
    table = pa.table({"query": ["q"] * 9, "passage": ["p"] * 9})
    with (pa.ipc.new_file if ending == ".arrow" else pa.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(InputError, match=f"a{ending}: not a whole Arrow file"):
        read_all(path)
    path.write_bytes(whole + whole)
    if ending == ".arrows":
        with pytest.raises(InputError, match="not a whole Arrow file"):
            read_all(path)


@pytest.mark.parametrize("ending", [".arrow", ".arrows", ".parquet"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_types_that_arrow_cannot_cast_are_refused(tmp_path: Path, ending: str, is_inside: bool) -> None:
    """Arrow 26 casts a list view to a list of other values. Parquet has only list views."""
    durations = pa.array([timedelta(1), None, timedelta(2)], pa.duration("ns"))
    views = [pa.list_view(pa.int64()), pa.large_list_view(pa.duration("s"))]
    columns = [pa.array([[3], None, []], kind) for kind in views]
    if ending != ".parquet":
        columns += [pa.RunEndEncodedArray.from_arrays([2, 3], durations[1:])]
    for column in columns:
        inner = pa.StructArray.from_arrays([column], ["inside"]) if is_inside else column
        table = pa.table({"query": ["q"] * 3, "passage": ["p"] * 3, "other": inner})
        path = tmp_path / f"a{ending}"
        if ending == ".parquet":
            pq.write_table(table, path)
        else:
            with (pa.ipc.new_file if ending == ".arrow" else pa.ipc.new_stream)(path, table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(InputError, match=rf"a{ending}: column 'other' holds .* write plain lists"):
            read_all(path)


def test_an_arrow_output_has_the_values_of_dictionaries(tmp_path: Path) -> None:
    """A file has one dictionary for all rows, and the tables of a run have one each."""
    path = tmp_path / "a.arrow"
    tables = [pa.table({"kind": pa.array([text]).dictionary_encode(), "n": [1]}) for text in "ab"]
    writer = OutputFormat().writer(path, path, tables[0].schema, "n")
    for table in tables:
        writer.write(table)
    writer.close({})
    assert feather.read_table(path).to_pylist() == [{"kind": "a", "n": 1}, {"kind": "b", "n": 1}]
