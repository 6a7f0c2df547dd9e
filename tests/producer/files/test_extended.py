"""Parquet output that begins with the bytes of its input."""

from __future__ import annotations

import io
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import InputChanged
from producer.files.inputs import find_files
from producer.files.layout import Layout, plan_layout
from producer.files.outputs import OutputFormat
from producer.files.readers import TextColumns
from producer.files.readers.choice import Options
from producer.files.sink import ScoredFile
from producer.files.source import Source, open_source
from producer.files.writers.thrift import (
    BINARY,
    I64,
    LIST,
    STRUCT,
    TRUE,
    Items,
    Typed,
    read_struct,
    write_struct,
)
from producer.splitting import ScoredTable

COLUMNS = TextColumns("query", "passage")
ROWS = 12

_texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_kinds = {
    "text": (pa.string(), _texts),
    "large": (pa.large_string(), _texts),
    "words": (pa.dictionary(pa.int32(), pa.string()), _texts),
    "number": (pa.int64(), st.none() | st.integers(-(1 << 63), (1 << 63) - 1)),
    "real": (pa.float64(), st.none() | st.floats(allow_nan=False)),
    "seen": (pa.bool_(), st.none() | st.booleans()),
    "raw": (pa.binary(), st.none() | st.binary(max_size=9)),
    "list.of": (pa.list_(pa.int32()), st.none() | st.lists(st.integers(-9, 9), max_size=3)),
    "deep": (pa.struct([("a", pa.list_(pa.string())), ("b", pa.float32())]), st.none()
             | st.fixed_dictionaries({"a": st.none() | st.lists(_texts, max_size=2), "b": st.none()})),
    "map": (pa.map_(pa.string(), pa.int64()), st.none() | st.just([]) | st.just([("a", 1), ("b", None)])),
    "time": (pa.timestamp("us", tz="UTC"), st.none() | st.integers(0, 1 << 50)),
    "day": (pa.date32(), st.none() | st.integers(0, 20_000)),
    "price": (pa.decimal128(9, 2), st.none() | st.decimals(-1000, 1000, places=2)),
}  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A table with queries, passages, and some other columns."""
    rows = draw(st.integers(1, ROWS))
    names = draw(st.lists(st.sampled_from(sorted(_kinds)), unique=True, max_size=4))
    columns = {name: _kinds[draw(st.sampled_from(["text", "large", "words"]))] for name in COLUMNS.names}
    columns |= {name: _kinds[name] for name in names}
    arrays = {
        name: pa.array([draw(values) for _ in range(rows)], kind) for name, (kind, values) in columns.items()
    }
    return pa.table(arrays, metadata={"about": "pairs"})


def source_of(path: Path, **options: Any) -> Source:
    return open_source(find_files([str(path)]), COLUMNS, allow_nulls=True, **options)


def write(layout: Layout, source: Source, target: Path, scores: np.ndarray[Any, Any], size: int) -> None:
    """Write the rows of a source with their scores, `size` at a time; those that are NaN are errors."""
    (target.parent / "work").mkdir(exist_ok=True)
    values = pa.array(scores, pa.float32(), from_pandas=True)
    errors = pa.array(["no score" if np.isnan(score) else None for score in scores], pa.string())
    with ScoredFile(target, target.parent / "work", layout) as output:
        at = 0
        for table in source.tables(lambda _: size):
            part = slice(at, at + len(table))
            output.write(ScoredTable(table, values[part], errors[part], None, 1, "w"))
            at += len(table)
        output.finish({"rankmill.version": "1"})
        output.publish()
    assert not list((target.parent / "work").iterdir())


@settings(max_examples=25)
@given(
    table=tables(),
    written=st.fixed_dictionaries(
        {
            "compression": st.sampled_from(["snappy", "zstd", "gzip", "lz4", "brotli"]),
            "use_dictionary": st.booleans(),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
            "version": st.sampled_from(["1.0", "2.4", "2.6"]),
            "row_group_size": st.integers(1, ROWS),
            "write_statistics": st.booleans(),
            "write_page_index": st.booleans(),
            "write_page_checksum": st.booleans(),
            "store_schema": st.booleans(),
        }
    ),
    size=st.integers(1, ROWS),
    draw=st.data(),
)
def test_the_input_is_there_byte_for_byte_and_the_scores_beside_it(
    table: pa.Table, written: dict[str, Any], size: int, draw: st.DataObject
) -> None:
    scores = np.array(
        draw.draw(
            st.lists(st.floats(-9, 9, width=32) | st.just(np.nan), min_size=len(table), max_size=len(table))
        ),
        np.float32,
    )
    with tempfile.TemporaryDirectory() as name:
        path, target = Path(name) / "in.parquet", Path(name) / "out.parquet"
        pq.write_table(table, path, **written)
        source = source_of(path)
        layout = plan_layout(source, target, OutputFormat(), ["score"])
        assert layout.whole
        write(layout, source, target, scores, size)
        assert target.read_bytes().startswith(path.read_bytes()[: layout.whole.data_end])
        anew = Path(name) / "anew.parquet"
        write(replace(layout, whole=None), source, anew, scores, size)
        with pq.ParquetFile(target, page_checksum_verification=True) as file, pq.ParquetFile(path) as before:
            assert file.schema_arrow.equals(pq.read_schema(anew), check_metadata=True)
            assert file.metadata.metadata == pq.read_metadata(anew).metadata
            assert file.metadata.num_row_groups == before.metadata.num_row_groups
            found = file.read()
            assert found.drop_columns("score").equals(before.read())
            assert found["score"].combine_chunks().equals(pa.array(scores, from_pandas=True))
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                assert group.num_rows == before.metadata.row_group(number).num_rows
                assert group.column(group.num_columns - 1).path_in_schema == "score"


def pairs(rows: int = 20) -> pa.Table:
    return pa.table({"query": [f"q{n}" for n in range(rows)], "passage": [f"p{n}" for n in range(rows)]})


@pytest.mark.parametrize(
    ("how", "options", "form"),
    [
        ({"compression": "none"}, {}, {}),
        ({"compression": {"query": "none", "passage": "zstd"}}, {}, {}),
        ({}, {"limit": 5}, {}),
        ({}, {"shard": (1, 2)}, {}),
        ({}, {"options": Options(lists=["passage"])}, {}),
        ({}, {}, {"top_k": 3}),
        ({}, {}, {"kind": "csv"}),
    ],
)
def test_what_cannot_be_copied_is_written_anew(
    tmp_path: Path, how: dict[str, Any], options: dict[str, Any], form: dict[str, Any]
) -> None:
    table = pairs()
    if "options" in options:
        table = table.set_column(1, "passage", pa.array([[f"p{n}"] for n in range(20)]))
    pq.write_table(table, tmp_path / "in.parquet", **how)
    source = source_of(tmp_path / "in.parquet", **options)
    target = tmp_path / f"out.{form.get('kind', 'parquet')}"
    layout = plan_layout(source, target, OutputFormat(**form), ["score"])
    assert layout.whole is None
    write(layout, source, target, np.arange(source.rows, dtype=np.float32), 7)
    if target.suffix == ".parquet":
        found = pq.read_table(target)
        assert sorted(found["score"].to_pylist()) == list(range(source.rows))
        assert sorted(found["passage"].to_pylist()) == sorted(f"p{n}" for n in range(source.rows))


def test_several_files_and_columns_left_out_are_written_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pairs(), tmp_path / f"{name}.parquet")
    both = open_source(find_files([str(tmp_path)]), COLUMNS, allow_nulls=True)
    assert plan_layout(both, tmp_path / "out.parquet", OutputFormat(), ["score"]).whole is None
    one = source_of(tmp_path / "a.parquet")
    assert plan_layout(one, tmp_path / "out.parquet", OutputFormat(), ["score"], ["query"]).whole is None


def test_an_input_that_becomes_shorter_makes_no_output(tmp_path: Path) -> None:
    path, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pairs(), path)
    source = source_of(path)
    layout = plan_layout(source, target, OutputFormat(), ["score"])
    assert layout.whole
    tables = list(source.tables(lambda _: 20))
    path.write_bytes(path.read_bytes()[:100])
    (tmp_path / "work").mkdir()
    with ScoredFile(target, tmp_path / "work", layout) as output:
        scores = pa.array(range(20), pa.float32())
        output.write(ScoredTable(tables[0], scores, pa.nulls(20, pa.string()), None, 1, "w"))
        with pytest.raises(InputChanged, match="shorter"):
            output.finish({})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.parquet", "work"]
    assert not list((tmp_path / "work").iterdir())


def footer(table: pa.Table, **how: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **how)
    data = sink.getvalue()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


@settings(max_examples=30)
@given(tables(), st.integers(1, ROWS))
def test_a_footer_that_is_read_is_written_as_it_was(table: pa.Table, rows: int) -> None:
    found = footer(table, row_group_size=rows, write_page_index=True)
    assert write_struct(read_struct(found)) == found


def test_unknown_fields_and_long_lists_are_kept() -> None:
    inner = {1: Typed(TRUE, None), 40: Typed(I64, -(1 << 62)), 32_000: Typed(BINARY, b"x" * 300)}
    struct = {
        2: Typed(LIST, Items(STRUCT, [inner] * 100)),
        3: Typed(LIST, Items(TRUE, [1, 2])),
        20: Typed(STRUCT, {}),
    }
    assert read_struct(write_struct(struct)) == struct


@given(st.binary(max_size=60), st.integers(0, 400))
def test_a_damaged_footer_is_refused_or_read(inserted: bytes, at: int) -> None:
    found = footer(pairs(3))
    with suppress(ValueError):
        read_struct(found[:at] + inserted + found[at + len(inserted) :])
