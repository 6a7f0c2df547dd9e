"""score-file --estimate: a sample says what all rows would take, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import Server, score_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A hundred pairs: ten are too long, five have no passage."""
    passages = ["moon river " * 40] * 10 + [None] * 5 + ["big cat"] * 85
    pq.write_table(pa.table({"query": ["moon"] * 100, "passage": passages}), tmp_path / "pairs.parquet")
    return tmp_path / "pairs.parquet"


def test_an_estimate_has_time_tokens_memory_and_what_goes_wrong(
    source: Path, shared_queue: Server, tiny_model: Path
) -> None:
    common = ["--redis", shared_queue.url, "--model", tiny_model, "--max-length", 16]
    done = score_file(source, *common, "--estimate", "--json")
    assert done.code == 0, done.err
    found = done.summary
    assert (found["rows"], found["sampled"], found["workers"]) == (100, 100, 1)
    assert (found["truncated_share"], found["error_share"]) == (0.1, 0.05)
    assert found["seconds"] == pytest.approx(100 / found["pairs_per_second"], rel=0.1)
    assert found["worker_bytes"] > 1 << 20
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    scored = score_file(source, *common, "--json").summary
    assert scored["rows"] == 100
    tokens = pq.read_metadata(source).num_rows * 7
    assert 0 < found["tokens"] < 2 * tokens


def test_a_sample_stands_for_all_rows(source: Path, shared_queue: Server, tiny_model: Path) -> None:
    common = ["--redis", shared_queue.url, "--model", tiny_model, "--max-length", 16]
    done = score_file(source, *common, "--estimate", "--sample", 50)
    assert done.code == 0, done.err
    assert done.out.startswith("50 of 100 rows scored at ")
    assert "of the pairs are truncated" in done.out
    assert "memory of a worker: " in done.out


def test_an_estimate_is_of_one_score_in_each_row(source: Path, shared_queue: Server) -> None:
    done = score_file(source, "--redis", shared_queue.url, "--estimate", "--all-labels")
    assert (done.code, "name one model and one label" in done.err) == (2, True), done.err


def test_what_cannot_be_estimated_is_said(source: Path) -> None:
    for options, why in [
        (["--estimate", "--verify", "x.parquet"], "give either --estimate or --verify"),
        (["--sample", "5"], "--sample has no effect without --verify or --estimate"),
    ]:
        done = score_file(source, *options)
        assert done.code == 2
        assert why in done.err
