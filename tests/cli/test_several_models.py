"""Several models in one pass: a column for each, and their mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill import Client
from rankmill.jobs.contract.errors import ConfigError, InputError, OutputError, RunTimeout
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.files import ranking
from rankmill.producer.files.ranking import HeldRows, Mean, MeanColumn
from rankmill.score.score_file import score_file as score_file_here
from tests.conftest import Server, score_file
from tests.harness.models.tiny import make_bert
from tests.workers.engine.test_engine import some_pairs

pytestmark = pytest.mark.own_precision

QUERIES, PASSAGES = some_pairs(60)
QUERIES = [f"query {row % 7}" for row in range(60)]
PAIRS: list[Any] = [*zip(QUERIES, PASSAGES, strict=True), ("query 0", None)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("several")
    return [str(make_bert(folder / name, layers=1, seed=seed)) for seed, name in enumerate("AB")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.parquet"
    queries, passages = zip(*PAIRS, strict=True)
    pq.write_table(pa.table({"query": queries, "passage": passages}), path)
    return path


@pytest.fixture(scope="module")
def alone(shared_queue: Server, models: list[str]) -> list[Any]:
    with Client(shared_queue.url, precision="fp32") as client:
        return [client.score(PAIRS, timeout=60, model=model) for model in models]


def options(queue: Server, models: list[str]) -> list[object]:
    named = [word for model in models for word in ("--model", model)]
    return [*named, "--redis", queue.url, "--precision", "fp32", "--chunk-size", 8]


def mean_of(alone: list[Any], of: str) -> Any:
    """As pandas computes it, of the rows with scores."""
    table = pd.DataFrame({"query": QUERIES, **{str(n): each[:60] for n, each in enumerate(alone)}})
    by = table.groupby("query")
    if of == "ranks":
        return by.rank(ascending=False).mean(axis=1)
    return by.transform(lambda column: (column - column.mean()) / column.std(ddof=0)).mean(axis=1)


@pytest.mark.parametrize("mean", ["ranks", "scores"])
def test_a_file_gets_a_column_for_each_model_and_their_mean(
    mean: str, source: Path, shared_queue: Server, models: list[str], alone: list[Any]
) -> None:
    columns = ["score_A", "score_B"]
    if mean == "scores":  # what is said of each follows this order, too
        columns, models, alone = columns[::-1], models[::-1], alone[::-1]
    target = source.with_name("scored.parquet")
    done = score_file(source, *options(shared_queue, models), "--mean", mean, "-o", target, "--json")
    assert done.code == 3, done.err
    scored, name = pq.read_table(target), {"ranks": "rank_mean", "scores": "score_mean"}[mean]
    assert scored.column_names == ["query", "passage", *columns, name]
    assert scored["query"].to_pylist() == [query for query, _ in PAIRS]
    for column, expected in zip(columns, alone, strict=True):
        np.testing.assert_allclose(scored[column].to_numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(scored[name].to_numpy()[:60], mean_of(alone, mean), atol=1e-3)
    assert [scored[column].null_count for column in scored.column_names] == [0, 1, 1, 1, 1]
    (error,) = Path(f"{target}.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["error"] == "passage is null"
    about = pq.read_metadata(target).metadata
    assert about[b"rankmill.model"].decode() == ", ".join(models)
    how = json.loads(about[b"rankmill.columns"])
    assert [how[column]["model"] for column in columns] == models
    revisions = ", ".join(how[column]["revision"] for column in columns)
    assert about[b"rankmill.revision"].decode() == done.summary["revision"] == revisions
    assert {each["precision"] for each in how.values()} == {"fp32"}
    assert done.summary["model"] == ", ".join(models)


def test_the_best_by_the_mean(
    source: Path, shared_queue: Server, models: list[str], alone: list[Any]
) -> None:
    target = source.with_name("best.csv")
    more = ["--mean", "scores", "--top-k", 2, "--score-column", "one,two", "-o", target]
    assert score_file(source, *options(shared_queue, models), *more).code == 3
    best = pd.read_csv(target)
    assert list(best.columns) == ["query", "passage", "one", "two", "one_mean", "rank"]
    expected = pd.DataFrame({"query": QUERIES, "mean": mean_of(alone, "scores")})
    highest = expected.groupby("query")["mean"].max()
    first = best[best["rank"] == 1].set_index("query")["one_mean"]
    np.testing.assert_allclose(first[highest.index], highest, atol=1e-3)


def test_what_several_models_cannot_be_asked_is_one_line(
    source: Path, shared_queue: Server, models: list[str]
) -> None:
    out = ["-o", source.with_name("out.parquet")]
    for named, more, reason in (
        (models, ["--top-k", 2], "rows are ranked by one: add --mean scores"),
        (models, ["--mean", "ranks", "--top-k", 2], "rows are ranked by one: add --mean scores"),
        (models, ["--all-labels"], "--all-labels is for one model"),
        (models, ["--reuse", source], "--reuse takes one score of a row"),
        (models, ["--rows-per-part", 10], "--rows-per-part is for one model"),
        (models, ["--mean", "ranks", "--shard", "1/2"], "--mean needs all passages of a query"),
        (models, ["--score-column", "a,b,c"], "names 3 columns for 2 models"),
        (models, ["--score-column", "a,a"], "two models would be in column a"),
        (models, ["--score-column", "query,b"], "has a column 'query' already"),
        ([models[0]] * 2, [], "--model names each of several models once"),
        (models[:1], ["--mean", "ranks"], "--mean needs several models"),
    ):
        done = score_file(source, *options(shared_queue, named), *more, *out)
        assert (done.code, reason in done.err) == (2, True), done.err
        assert "Traceback" not in done.err


def test_what_is_scored_is_not_scored_again(
    source: Path, shared_queue: Server, models: list[str], alone: list[Any]
) -> None:
    def request(named: list[str]) -> FileRequest:
        return FileRequest(inputs=(str(source),), output=f"{source}.out.parquet", models=tuple(named))

    settings = load_settings(
        {"model": models[0], "redis_url": shared_queue.url, "precision": "fp32", "chunk_size": 16}
    )

    def stop(*_: object) -> None:
        raise OutputError("stopped before the end")

    with pytest.raises(OutputError):
        score_file_here(request(models), settings, confirm=stop)
    with pytest.raises(InputError, match="of another command"):
        score_file_here(request(models[::-1]), settings)
    other = source.parent / f"{source.name}.out.parquet.rankmill" / "journal-2.db"
    assert other.exists()
    summary = score_file_here(request(models), settings)
    assert (summary.rows, summary.resumed_rows, summary.row_errors) == (61, 61, 1)
    assert not other.exists()
    scored = pq.read_table(f"{source}.out.parquet")
    np.testing.assert_allclose(scored["score_B"].to_numpy(), alone[1], atol=1e-5)


def test_from_python(shared_queue: Server, models: list[str], alone: list[Any]) -> None:
    with Client(shared_queue.url, precision="fp32", chunk_size=8) as client:
        scores = client.score_models((pair for pair in PAIRS), models, timeout=60)
        assert list(scores) == models
        for found, expected in zip(scores.values(), alone, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
            assert found.errors == {60: "passage is null"}
        with pytest.raises(ConfigError, match="and each once"):
            client.score_models(PAIRS, [models[0]] * 2)
        with pytest.raises(RunTimeout, match="the run is cancelled"):
            client.score_models(PAIRS, models, timeout=0)


ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), *[st.none() | st.sampled_from([-1.5, 0.0, 0.5, 2.0])] * 2), min_size=1
)


@pytest.mark.parametrize("mean", ["ranks", pytest.param("scores", marks=pytest.mark.slow)])
@given(rows=ROWS, size=st.integers(1, 9), grouped=st.booleans(), buffer=st.sampled_from([1, 300, 1 << 20]))
def test_means_and_ranks_are_those_of_pandas(
    mean: Mean,
    rows: list[Any],
    size: int,
    grouped: bool,
    buffer: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Also where rows are written to disk in many parts, and a query has rows in several of them."""
    rows = sorted(rows, key=lambda row: row[0]) if grouped else rows
    table = pd.DataFrame(rows, columns=["query", "one", "two"]).astype({"one": "float32", "two": "float32"})
    arrow = pa.Table.from_pandas(table)
    folder = tmp_path_factory.mktemp("means")

    def held_rows(rank: str | None) -> pa.Table:
        held = HeldRows(folder, "query", ["one", "two"], MeanColumn("mean", mean), rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranking, "_BUFFER_BYTES", buffer)
            patch.setattr(ranking, "_BATCH_ROWS", 2)
            # a run's texts are in dictionaries, one for each table
            for part in (arrow.slice(at, size) for at in range(0, len(rows), size)):
                held.add(part.append_column("text", part["query"].dictionary_encode()))
            found = [*held.finish()]
        held.close()
        return pa.concat_tables(found) if found else pa.table({"text": [], "rank": []})

    whole = held_rows(None)
    assert whole.drop_columns(["mean", "text"]).equals(arrow)
    assert whole["text"].to_pylist() == whole["query"].to_pylist()
    known = table.dropna()
    by = known.groupby("query")[["one", "two"]]
    if mean == "ranks":
        expected = by.rank(ascending=False).mean(axis=1)
    else:
        off, spread = known[["one", "two"]] - by.transform("mean"), by.transform("std", ddof=0)
        expected = (off / spread).where(spread > 1e-6, 0.0).mean(axis=1)
    found = whole["mean"].to_pandas()
    assert found.notna().tolist() == table.notna().all(axis=1).tolist()
    np.testing.assert_allclose(found[found.notna()], expected, atol=1e-5)
    means = table.assign(mean=found).dropna()
    by_query = [means[means["query"] == query] for query in means["query"].unique()]
    best = [each.sort_values("mean", ascending=False, kind="stable") for each in by_query]
    ranked = held_rows("rank")
    first = {query: place for place, query in enumerate(table["query"].unique())}
    best.sort(key=lambda each: first[each["query"].iloc[0]])
    assert ranked["text"].to_pylist() == [query for each in best for query in each["query"]]
    assert ranked["rank"].to_pylist() == [rank for each in best for rank in range(1, len(each) + 1)]
    if ranked:
        assert ranked["mean"].to_pylist() == [value for each in best for value in each["mean"]]
