"""All outputs of a model with several: each is a score, wherever scores are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import Client, CrossEncoder
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError, RunFailed
from tests.conftest import Server, score_file
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.workers.engine.test_engine import some_pairs

NAMES = ["LABEL_0", "LABEL_1", "LABEL_2"]
QUERIES, PASSAGES = some_pairs(40)
PAIRS = list(zip(QUERIES, PASSAGES, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("labels"), labels=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    return cross_encoder(model).predict(PAIRS, apply_softmax=True)


def options(queue: Server, model: Path) -> list[object]:
    return ["--redis", queue.url, "--model", model, "--precision", "fp32", "--activation", "softmax"]


def test_a_file_gets_a_column_for_each_label(
    tmp_path: Path, shared_queue: Server, model: Path, expected: Any
) -> None:
    source, target = tmp_path / "pairs.parquet", tmp_path / "scored.parquet"
    table = pa.table({"id": range(42), "query": [*QUERIES, None, "x"], "passage": [*PASSAGES, "a", None]})
    pq.write_table(table, source)
    asked = [*options(shared_queue, model), "--all-labels", "--chunk-size", 7]
    done = score_file(source, *asked, "--score-column", "nli", "-o", target)
    assert done.code == 3, done.err
    scored = pq.read_table(target)
    assert scored.column_names == ["id", "query", "passage", *(f"nli_{name}" for name in NAMES)]
    found = np.stack([scored[f"nli_{name}"].to_numpy() for name in NAMES], axis=1)
    np.testing.assert_allclose(found[:40], expected, atol=1e-5)
    assert np.isnan(found[40:]).all()
    assert scored["nli_LABEL_2"].null_count == 2
    assert pq.read_metadata(target).metadata[b"rankmill.all_labels"] == b"True"
    text = tmp_path / "scored.csv"
    assert score_file(source, *asked, "-o", text).code == 3
    np.testing.assert_allclose(
        pd.read_csv(text)[[f"score_{name}" for name in NAMES]][:40], expected, atol=1e-5
    )


def test_what_needs_one_score_is_refused(tmp_path: Path, shared_queue: Server, model: Path) -> None:
    source = tmp_path / "pairs.csv"
    source.write_text("query,passage,qid,score_LABEL_1\na,b,1,2\n")
    asked = [source, *options(shared_queue, model), "--all-labels", "-o", tmp_path / "out.parquet"]
    for more, reason in (
        (["--top-k", 3], "--all-labels makes several scores, and rows are ranked by one"),
        (["--reuse", source], "--reuse takes one score of a row"),
        (["--label", "1"], "label names one output: leave out one of the two"),
        (["--long", "split"], "best window is that of one label"),
        ([], "has a column 'score_LABEL_1' already; name the new one with --score-column"),
    ):
        done = score_file(*asked, *more)
        assert (done.code, reason in done.err) == (2, True), done.err
        assert "Traceback" not in done.err


def test_from_python_a_row_has_as_many_scores(
    shared_queue: Server, model: Path, tiny_model: Path, expected: Any
) -> None:
    asked: Any = {"model": str(model), "precision": "fp32", "activation": "softmax", "all_labels": True}
    with Client(shared_queue.url) as client:
        scores = client.score([*PAIRS, ("a", None)], timeout=60, **asked)
        assert scores.shape == (41, 3)
        assert scores.labels == tuple(NAMES)
        assert scores.errors == {40: "passage is null"}
        np.testing.assert_allclose(scores[:40], expected, atol=1e-5)
        kept = client.submit(PAIRS, detached=True, **asked)
        np.testing.assert_allclose(kept.scores(timeout=60), expected, atol=1e-5)
        kept.cancel()
        shared_queue.client.unlink(keys.cancelled(kept.id))  # no process is there to read it
        with pytest.raises(ConfigError, match="ranked by one score"):
            client.rank("a", ["b", "c"], timeout=60, **asked)
        one = client.score(PAIRS, timeout=60, model=str(tiny_model), all_labels=True)
        assert (one.shape, one.labels) == ((40,), ())
        with pytest.raises(RunFailed, match="or take all with --all-labels"):
            client.score(PAIRS, timeout=60, model=str(model))


def test_the_drop_in_has_the_shape_of_cross_encoder(shared_queue: Server, model: Path, expected: Any) -> None:
    ours = CrossEncoder(str(model), redis_url=shared_queue.url, precision="fp32", all_labels=True)
    np.testing.assert_allclose(ours.predict(PAIRS, apply_softmax=True), expected, atol=1e-5)
    theirs = cross_encoder(model)
    np.testing.assert_allclose(ours.predict(PAIRS), theirs.predict(PAIRS), atol=1e-5)
    np.testing.assert_allclose(ours.predict(PAIRS[0]), theirs.predict(PAIRS[0]), atol=1e-5)
