"""A tokenizer library that turns out to be wrong: no score that it led to is written from then on."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from rankmill import Client
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.misbehaving import MARKS
from tests.harness.models.tiny import cross_encoder, make_bert


def test_chunks_with_wrong_tokens_come_again_and_the_runs_before_are_named(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make_bert(tmp_path / "model", extra_words=[*MARKS, "tell"])
    environ = {
        "RANKMILL_BACKEND": "torch",
        "RANKMILL_PRECISION": "fp32",
        "RANKMILL_CACHE_DIR": str(tmp_path / "cache"),
        "RANKMILL_BATCH_WAIT_MS": "0",
        "FORWARDS": str(tmp_path / "forwards"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    workers(worker_class="tests.harness.misbehaving.WrongTokensWorker", environ=environ)
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
    log = tmp_path / "worker.log"
    wait_for(lambda: log.exists() and "gave wrong tokens" in log.read_text())
    (tmp_path / "go").touch()
    collector.join()
    expected = cross_encoder(model).predict(pairs)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    (line,) = [line for line in log.read_text().splitlines() if "gave wrong tokens" in line]
    assert f"score these runs anew: {before.id} (1 chunks)" in line
