"""A tokenizer library that turns out to be wrong: no score that it led to is written or kept from then on."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import Client
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract.errors import WrongScores
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.score.score_file import score_file
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.misbehaving import MARKS
from tests.harness.models.tiny import cross_encoder, make_bert


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bert(tmp_path / "model", extra_words=[*MARKS, "tell"])


@pytest.fixture
def worker(workers: StartWorker, model: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    environ = {
        "RANKMILL_BACKEND": "torch",
        "RANKMILL_PRECISION": "fp32",
        "RANKMILL_CACHE_DIR": str(tmp_path / "cache"),
        "RANKMILL_BATCH_WAIT_MS": "0",
        "FORWARDS": str(tmp_path / "forwards"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return workers(worker_class="tests.harness.misbehaving.WrongTokensWorker", environ=environ)


def said(tmp_path: Path) -> str:
    log = tmp_path / "worker.log"
    return log.read_text() if log.exists() else ""


def test_a_worker_with_a_wrong_tokenizer_library_stops_and_keeps_no_chunk(
    worker: subprocess.Popen[bytes], workers: StartWorker, server: Server, model: Path, tmp_path: Path
) -> None:
    """Shows: a tokenizer library computes wrong tokens."""
    client = Client(server.url, model=str(model), precision="fp32", chunk_size=10, backend="torch")
    before = client.submit([("big cat", "moon")] * 10)
    before.scores(60)
    # The first chunk is in the forward, others wait with wrong tokens, when the last is compared.
    pairs = [("big cat", f"{'hold ' if row < 10 else ''}bread king {row}") for row in range(40)]
    pairs += [("big cat", f"river tell bread king {row}") for row in range(10)]
    run = client.submit(pairs)
    found: list[np.ndarray] = []
    collector = threading.Thread(target=lambda: found.append(np.asarray(run.scores(60))))
    collector.start()
    wait_for(lambda: "gave wrong tokens" in said(tmp_path))
    (tmp_path / "go").touch()
    assert worker.wait(60) == 1
    why = f"a tokenizer library gave wrong tokens of {model} (other ids for a text of"
    assert f'score the others again: {before.id}"' in said(tmp_path)
    (report,) = read_cluster(server.client).last_reports
    assert why in report.reason
    workers(environ={"RANKMILL_CACHE_DIR": str(tmp_path / "cache"), "RANKMILL_BACKEND": "torch"})
    collector.join()
    np.testing.assert_allclose(found[0], cross_encoder(model).predict(pairs), atol=1e-5)


def test_a_file_that_was_scored_in_part_with_wrong_tokens_ends(
    worker: subprocess.Popen[bytes], server: Server, model: Path, tmp_path: Path
) -> None:
    """Shows: a tokenizer library computes wrong tokens."""
    pairs = [("big cat", f"bread king {row}") for row in range(20)]
    pairs += [("big cat", f"river tell bread king {row}") for row in range(10)]
    source, output = tmp_path / "a.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table(dict(zip(("query", "passage"), zip(*pairs, strict=True), strict=True))), source)
    flags = {"redis_url": server.url, "model": str(model), "precision": "fp32", "chunk_size": 10, "window": 1}
    with pytest.raises(WrongScores, match="a tokenizer library gave wrong tokens"):
        score_file(FileRequest(inputs=(str(source),), output=str(output)), load_settings(flags))
    assert worker.wait(60) == 1
    assert not output.exists()
