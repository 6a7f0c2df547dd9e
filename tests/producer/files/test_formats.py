"""The table of formats: what one of its lines brings, and that its formats are read as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill.jobs.protocol.submitted.request import OutputKind
from rankmill.producer.files.corpus.rankings import read_ranking
from rankmill.producer.files.formats.base import ReadOptions, TextColumns
from rankmill.producer.files.formats.table import FORMATS, TREC, open_reader
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.outputs import OutputFormat
from rankmill.producer.files.source import open_source

COLUMNS = TextColumns("query", "passage")
ENDINGS = [
    ending + compression
    for each in FORMATS
    for ending in each.endings
    for compression in ("", *((".gz", ".zst") if each.is_text else ()))
]


def test_the_options_know_the_formats_of_the_table() -> None:
    assert tuple(each.name for each in FORMATS if each.writer) == get_args(OutputKind)


@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if not ending.startswith(".json")])
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
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True)
    assert [row for read in source.tables(lambda _: 3) for row in read.to_pylist()] == rows
    assert open_reader(path).shown_columns().names == table.schema.names


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_a_run_leaves_beside_its_output_is_no_input(tmp_path: Path, ending: str) -> None:
    (tmp_path / "mine.jsonl").write_text('{"query": "q", "passage": "p"}\n')
    is_output = not ending.startswith(".json") or ending.startswith(".jsonl")
    (tmp_path / f"out{ending}.errors.jsonl").write_text('{"row": 1}\n')
    folder = tmp_path / f"out{ending}.rankmill"
    folder.mkdir()
    (folder / "left.jsonl").write_text("{}\n")
    names = [file.path.name for file in find_files([str(tmp_path)])]
    assert names == (
        ["mine.jsonl"] if is_output else ["mine.jsonl", f"out{ending}.errors.jsonl", "left.jsonl"]
    )


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_some_columns_of_lists_have_a_row_for_each_item(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    table = pa.table({"id": [1, 2], "query": ["a", "b"], "passage": [["x", "y"], ["z"]]})
    if ending == ".parquet":
        pq.write_table(table, path)
    else:
        path.write_text(table.to_pandas().to_json(orient="records", lines=True))
    options = ReadOptions(lists=["passage"])
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True, options=options)
    assert [n for batch in source.select(["id"]) for n in batch["id"].to_pylist()] == [1, 1, 2]
