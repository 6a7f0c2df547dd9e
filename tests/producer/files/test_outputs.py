"""Writing output: every format, ranked or as read, and what a format cannot hold."""

from __future__ import annotations

import json
import math
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputChanged, InputError
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files import ranking as ranking_module
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.formats.table import open_reader
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.outputs import OutputFormat, check_target
from rankmill.producer.files.plan import plan_output
from rankmill.producer.files.ranking import MeanColumn
from rankmill.producer.files.sink import ScoredFile, ScoredParts
from rankmill.producer.files.source import open_source
from rankmill.producer.files.workspace import PartsFolder, Workspace
from tests.harness.servers.disks import fill, small_disk
from tests.producer.runs.test_runs import rank_of

COLUMNS = TextColumns("query", "passage")


def scored(table: pa.Table, scores: list[float | None]) -> ScoredTable:
    values = pa.array(scores, pa.float32())
    errors = pa.array([None if score is not None else "no score" for score in scores], pa.string())
    return ScoredTable(table, values, errors, None, 1, "w")


def make(target: Path, table: pa.Table, scores: list[float | None], rows: int = 3, **options: Any) -> Path:
    """Write `table` with `scores` to `target`, as score-file does, `rows` at a time."""
    pq.write_table(table, target.parent / "in.parquet")
    source = open_source(find_files([str(target.parent / "in.parquet")]), COLUMNS, allow_nulls=True)
    form = OutputFormat(**options)
    check_target(target, form)
    folder = target.parent / "work"
    folder.mkdir(exist_ok=True)
    with ScoredFile(target, folder, plan_output(source, target, form, ["score"])) as output:
        for start in range(0, len(table), rows):
            output.write(scored(table.slice(start, rows), scores[start : start + rows]))
        output.finish({"rankmill.version": "1"})
        output.publish()
    assert not list(folder.iterdir())
    return target


def read_back(path: Path) -> list[dict[str, Any]]:
    """The file as score-file itself reads it."""
    source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True)
    tables = list(source.tables(Sizing(1000)))
    return [] if not tables else list(pa.concat_tables(tables).to_pylist())


_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=12)
_scores = st.none() | st.floats(-100, 100, width=32)
_row = st.tuples(_texts | st.none(), _texts | st.none(), _texts, st.integers(-9, 9), st.booleans(), _scores)


@settings(max_examples=40)
@given(
    st.lists(_row, min_size=1, max_size=8),
    st.sampled_from([".csv", ".jsonl"]),
    st.sampled_from(["", ".gz", ".zst"]),
)
def test_what_is_written_is_read_back(rows: list[tuple[Any, ...]], kind: str, end: str) -> None:
    rows = [("q", "p", "text", 1, True, 0.5), *rows]
    *columns, scores = (list(column) for column in zip(*rows, strict=True))
    names = ["query", "passage", "note", "n", "seen"]
    kinds = [pa.string(), pa.string(), pa.string(), pa.int64(), pa.bool_()]
    table = pa.table(
        [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)], names=names
    )
    with tempfile.TemporaryDirectory() as directory:
        path = make(Path(directory) / f"out{kind}{end}", table, scores)
        source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True, as_text=["note"])
        back = pa.concat_tables(list(source.tables(Sizing(1000)))).to_pylist()
    for row, found, score in zip(table.to_pylist(), back, scores, strict=True):
        if kind == ".csv":  # which has no types
            row |= {"n": str(row["n"]), "seen": str(row["seen"]).lower()}
        assert {name: found[name] for name in names} == row
        assert found["score"] is None if score is None else np.float32(found["score"]) == np.float32(score)


def test_csv_has_quotes_around_text_of_every_type(tmp_path: Path) -> None:
    texts = ['{"a": 1, "b": ""}', 'x,\n"y"           ', None]
    columns = {
        "json": pa.array(texts).cast(pa.json_(pa.string())),
        "large": pa.array(texts, pa.large_string()),
        "category": pa.array(texts).dictionary_encode(),
        "bytes": pa.array(texts, pa.binary()),
        "fixed": pa.array([text and text.encode()[:17] for text in texts], pa.binary(17)),
    }
    table = pa.table({"query": ["q"] * 3, "passage": ["p"] * 3, **columns})
    back = read_back(make(tmp_path / "out.csv", table, [0.5, 1.5, 2.5]))
    assert [row["score"] for row in back] == ["0.5", "1.5", "2.5"]
    for name in columns:
        assert [row[name] for row in back] == [text and text[:17] for text in texts], name


def test_tsv_has_no_quotes_and_no_line_ends_in_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"query": ['say "a"', "b\tc"], "passage": ["x\ny", None], "n": [1, None]})
    path = make(tmp_path / "out.tsv", table, [0.1, 1.5])
    assert path.read_text() == 'query\tpassage\tn\tscore\nsay "a"\tx y\t1\t0.1\nb c\t\t\t1.5\n'
    assert "2 values had tabs or line ends" in caplog.text


def test_json_holds_lists_times_and_no_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table(
        {"query": ["q"], "passage": ["p"], "more": [[1.5, math.nan]], "day": pa.array([0], pa.date32())}
    )
    (line,) = make(tmp_path / "out.jsonl", table, [0.1]).read_text().splitlines()
    assert json.loads(line) == {
        "query": "q",
        "passage": "p",
        "more": [1.5, None],
        "day": "1970-01-01",
        "score": 0.1,
    }
    assert "1 values held NaN or infinity" in caplog.text


def test_what_a_format_cannot_hold_is_said_before_any_work(tmp_path: Path) -> None:
    pair = {"query": ["q"], "passage": ["p"]}
    for ending, held, message in (
        ("csv", [[1]], r"CSV cannot hold column 'more' \(list<.*\); name .* ends in .parquet or .jsonl"),
        ("csv", [[b"x"]], r"CSV cannot hold column 'more' \(list<.*\); name .* ends in .parquet"),
        ("jsonl", [b"x"], r"JSON cannot hold column 'more' \(binary\); name .* ends in .parquet"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            make(tmp_path / f"out.{ending}", pa.table({**pair, "more": held}), [1.0])


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("out.txt", None, "cannot tell the format from the name"),
        ("out.csv", "jsonl", "--output-format jsonl does not fit the name's ending .csv"),
        ("out.parquet.gz", None, "Parquet is compressed inside"),
        ("out", "orc", "--output-format orc: nothing installed writes it; use one of arrow, csv, jsonl,"),
        ("out", "json", "--output-format json: nothing installed writes it"),
    ],
)
def test_names_that_do_not_fit(tmp_path: Path, name: str, kind: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_target(tmp_path / name, OutputFormat(kind))


_queries = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def best(queries: list[int], scores: list[float | None], top_k: int | None) -> list[tuple[int, int, int]]:
    """``(query, row, rank)`` as a few lines of Python rank them."""
    found = []
    for query in dict.fromkeys(queries):
        rows = [row for row, each in enumerate(queries) if each == query and scores[row] is not None]
        ranked = sorted(rows, key=lambda row: -np.float32(scores[row]))[:top_k]
        found += [(query, row, rank) for rank, row in enumerate(ranked, 1)]
    return found


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking_module, "_BUFFER_BYTES", 200)
    monkeypatch.setattr(ranking_module, "_BATCH_ROWS", 2)


@pytest.mark.usefixtures("small_buffers")
@settings(max_examples=40)
@given(_queries, st.data(), st.none() | st.integers(1, 4), st.booleans(), st.integers(1, 7))
def test_the_best_of_each_query_are_ranked(
    queries: list[int], data: st.DataObject, top_k: int | None, in_order: bool, rows: int
) -> None:
    if in_order:
        queries = sorted(queries)
    scores = data.draw(st.lists(_scores, min_size=len(queries), max_size=len(queries)))
    ids = pa.array([None if query == 5 else str(query) for query in queries], pa.string())
    table = pa.table(
        {
            "query": ["q"] * len(queries),
            "passage": ["p"] * len(queries),
            "qid": ids,
            "row": range(len(queries)),
        }
    )
    table = table.set_column(2, "qid", table["qid"].dictionary_encode())
    with tempfile.TemporaryDirectory() as directory:
        path = make(Path(directory) / "out.parquet", table, scores, rows, top_k=top_k or 1000)
        found = pq.read_table(path)
    assert list(zip(found["row"].to_pylist(), found["rank"].to_pylist(), strict=True)) == [
        (row, rank) for _, row, rank in best(queries, scores, top_k)
    ]
    assert found["score"].null_count == 0


def test_rows_that_wait_on_a_full_disk_fail_only_once(tmp_path: Path) -> None:
    """Not again when their file is closed, where nobody says which output it was for."""
    with small_disk(tmp_path / "disk", "4k") as disk:
        fill(disk)
        held = ranking_module.HeldRows(disk, "qid", ["score"], rank="rank")
        held.add(pa.table({"qid": ["1"], "score": [0.5]}))
        with pytest.raises(OSError, match="No space left on device"):
            list(held.finish())
        held.close()


@pytest.mark.usefixtures("small_buffers")
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30)), max_size=12), st.integers(1, 5))
def test_ids_that_two_rows_have_are_found(rows: list[tuple[str, int]], size: int) -> None:
    queries, passages = [row[0] for row in rows], [row[1] for row in rows]
    ids = pa.table({"qid": pa.array(queries, pa.string()), "pid": pa.array(passages, pa.int64())})
    repeats = ranking_module.Repeats("qid", "pid")
    for batch in ids.to_batches(size):
        repeats.add(batch)
    found = repeats.first(lambda: ids.to_batches(size))
    twice = {(query, str(passage)) for query, passage in rows if rows.count((query, passage)) > 1}
    assert found in twice if twice else found is None


def test_a_trec_run(tmp_path: Path) -> None:
    table = pa.table(
        {
            "qid": [1, 1, 2],
            "docno": ["a", "b", "a"],
            "query": ["q"] * 3,
            "passage": ["p"] * 3,
            "score": [9, 8, 7],
        }
    )
    path = make(tmp_path / "out.run", table, [0.5, 1.25, None], kind="trec", tag="mine")
    assert path.read_text() == "1 Q0 b 1 1.25 mine\n1 Q0 a 2 0.5 mine\n"
    with path.open() as file:
        assert pytrec_eval.parse_run(file) == {"1": {"b": 1.25, "a": 0.5}}
    (error,) = Path(f"{path}.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["row"] == 2


def test_uuids_are_ids_of_a_trec_run_and_tell_queries_apart(tmp_path: Path) -> None:
    ids = [uuid.UUID(int=number) for number in (1, 1, 2)]
    queries = pa.array([each.bytes for each in ids], pa.binary(16)).cast(pa.uuid())
    passages = pa.array([uuid.UUID(int=number).bytes for number in range(3)], pa.binary(16)).cast(pa.uuid())
    table = pa.table({"qid": queries, "pid": passages, "query": ["q"] * 3, "passage": ["p"] * 3})
    path = make(tmp_path / "out.trec", table, [0.5, 0.5, 2.0], top_k=1)
    assert [line.split()[0] for line in path.read_text().splitlines()] == [str(ids[1]), str(ids[2])]
    assert path.read_text().split()[2] == str(uuid.UUID(int=1))


@pytest.mark.usefixtures("small_buffers")
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("12"), st.integers(0, 30), st.integers(0, 2)),
        min_size=1, max_size=25, unique_by=lambda row: row[:2],
    ),
    st.none() | st.integers(1, 4),
)  # fmt: skip
def test_the_ranks_of_a_trec_run_are_those_of_trec_eval(
    rows: list[tuple[str, int, int]], top_k: int | None
) -> None:
    """Also of equal scores, and where the rows of a query do not follow each other."""
    queries, docs, scores = (list(column) for column in zip(*rows, strict=True))
    table = pa.table({"qid": queries, "pid": docs, "query": ["q"] * len(rows), "passage": ["p"] * len(rows)})
    with tempfile.TemporaryDirectory() as directory:
        path = make(Path(directory) / "out.trec", table, scores, top_k=top_k)
        found = [line.split() for line in path.read_text().splitlines()]
    for query in set(queries):
        run = {str(doc): float(score) for each, doc, score in rows if each == query}
        expected = sorted(run, key=lambda doc: rank_of(run, doc))[:top_k]
        assert [line[2] for line in found if line[0] == query] == expected
        assert [int(line[3]) for line in found if line[0] == query] == [*range(1, len(expected) + 1)]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {}, "a TREC run needs ids, and the input has no column query_id or qid"),
        ({"qid": ["1", "2"]}, {}, "no column passage_id or pid"),
        ({"qid": ["1", "2"]}, {"query_id": "topic"}, "--query-id-column: no column 'topic'"),
        (
            {"qid": ["1", "2"], "pid": ["a", "b c"]},
            {},
            "row 1 .*: pid is 'b c'; a TREC run needs ids without",
        ),
        ({"qid": ["1", None], "pid": ["a", "b"]}, {}, "row 1 .*: qid is None"),
        ({"qid": ["1", "2"], "pid": ["a", "b"]}, {"tag": "a b"}, "--tag 'a b'"),
    ],
)
def test_a_trec_run_needs_ids(
    tmp_path: Path, columns: dict[str, list[str]], options: dict[str, Any], message: str
) -> None:
    table = pa.table({"query": ["q", "q"], "passage": ["p", "p"], **columns})
    with pytest.raises(InputError, match=message):
        make(tmp_path / "out.trec", table, [1.0, 2.0], **options)


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".arrow", ".jsonl"])
def test_a_column_that_is_left_out_may_tell_queries_apart(tmp_path: Path, ending: str) -> None:
    table = pa.table({"query": ["a", "b", "a"], "passage": ["x", "y", "z"], "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "in.parquet")
    source = open_source(find_files([str(tmp_path / "in.parquet")]), COLUMNS, allow_nulls=True)
    path, mean = tmp_path / f"out{ending}", MeanColumn("mean", "scores")
    form = OutputFormat(top_k=1)
    plan = plan_output(source, path, form, ["s"], left_out=["query", "passage"], mean=mean, tokens="tokens")
    (tmp_path / "work").mkdir()
    with ScoredFile(path, tmp_path / "work", plan) as output:
        output.write(scored(table, [0.5, 1.5, 2.5]))
        output.finish({})
        output.publish()
    reader = open_reader(path)
    schema = reader.survey(find_nulls=False).schema
    assert schema.names == ["n", "s", "mean", "tokens", "rank"]
    rows = [row for batch in reader.batches(schema, 9) for row in batch.to_pylist()]
    assert [(float(row["s"]), int(row["rank"])) for row in rows] == [(2.5, 1), (1.5, 1)]


def test_a_column_of_the_same_name_is_not_overwritten(tmp_path: Path) -> None:
    table = pa.table({"query": ["q"], "passage": ["p"], "rank": [1]})
    with pytest.raises(InputError, match="a column 'rank' already; name the new one with --rank-column"):
        make(tmp_path / "out.csv", table, [1.0], top_k=1)
    make(tmp_path / "out.csv", table, [1.0], top_k=1, rank_column="new")
    assert read_back(tmp_path / "out.csv")[0]["new"] == "1"


@pytest.mark.parametrize(
    ("clash", "message"),
    [
        ("a", "input has a column 'a' already; name the new one with --score-column"),
        ("b_mean", "input has a column 'b_mean' already; name the new one with --rank-column"),
        ("tokens", "input has a column 'tokens' already; rename that one"),
        ("c", "output has a column 'a' already; name the new one with --rank-column"),
    ],
)
def test_a_name_that_is_taken_is_told_with_the_option_that_names_the_new_column(
    tmp_path: Path, clash: str, message: str
) -> None:
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], clash: [1]}), tmp_path / "in.parquet")
    source = open_source(find_files([str(tmp_path / "in.parquet")]), COLUMNS, allow_nulls=True)
    form = OutputFormat(top_k=1, rank_column="a")
    mean = MeanColumn("b_mean", "ranks")
    with pytest.raises(InputError, match=f"^the {message}$"):
        plan_output(source, tmp_path / "out.csv", form, ["a"], mean=mean, tokens="tokens")


@pytest.mark.parametrize("made", [0, 1])
def test_an_input_that_changes_costs_the_parts_of_an_earlier_output_only_after_the_first_new_one(
    tmp_path: Path, made: int
) -> None:
    table = pa.table({"query": ["q"] * 4, "passage": ["p"] * 4})
    pq.write_table(table, tmp_path / "in.parquet")
    source = open_source(find_files([str(tmp_path / "in.parquet")]), COLUMNS, allow_nulls=True)
    folder = tmp_path / "out"
    folder.mkdir()
    old = folder / "part-00001-of-00009.csv"
    old.write_text("of an earlier run")
    plan = plan_output(source, folder, OutputFormat(kind="csv"), ["score"])

    def run() -> None:
        with (
            Workspace(PartsFolder(folder), restart=False, force=True) as work,
            ScoredParts(folder, work, plan, 4, 2, dict, str) as output,
        ):
            work.begin({})
            for _ in range(made):
                output.write(scored(table.slice(0, 2), [1.0, 2.0]))
            raise InputChanged("it has changed")

    with pytest.raises(InputChanged):
        run()
    assert list(folder.glob("part*")) == [old][made:]
