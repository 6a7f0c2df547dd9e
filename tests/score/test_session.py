"""A session: the same object wherever something is scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rankmill.jobs.contract.errors import ConnectionFailed, RunFailed
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.client.sync_client import Client
from rankmill.score.session import Session
from tests.conftest import Server, StartWorker, wait_for

COLUMNS = ("query", "passage")
PAIRS = pa.table({"query": ["cat"] * 9, "passage": [*["the moon " * n for n in range(1, 9)], None]})


def session(url: str, model: Path | str = "demo") -> Session:
    return Session(load_settings({"redis_url": url, "model": str(model), "chunk_size": 4}, environ={}))


def test_a_table_is_scored_in_order_and_in_chunks(shared_queue: Server, tiny_model: Path) -> None:
    with session(shared_queue.url, tiny_model) as here:
        scored = here.score(PAIRS, COLUMNS)
        alone = here.score(PAIRS, COLUMNS, chunk_size=9)
    assert len(scored.stats) == 3
    assert len(alone.stats) == 1
    assert np.isnan(scored.scores).tolist() == [False] * 8 + [True]
    np.testing.assert_allclose(scored.scores, alone.scores, atol=1e-5)
    expected = Client(shared_queue.url, model=str(tiny_model)).score(PAIRS)
    np.testing.assert_allclose(scored.scores, expected, atol=1e-5)
    assert scored.workers == queue_workers(shared_queue.client, "rankmill").scoring


def test_an_error_in_the_midst_of_a_run_cancels_it(server: Server) -> None:
    def fail(here: Session) -> None:
        with here.run(iter([PAIRS]), COLUMNS, here.client.sizing()) as run:
            assert list(server.client.scan_iter(f"rankmill:run:{run.id}:*"))
            raise ZeroDivisionError

    with session(server.url) as here, pytest.raises(ZeroDivisionError):
        fail(here)
    assert not list(server.client.scan_iter("rankmill:run:*"))
    assert not list(server.client.scan_iter("rq:job:*"))


def test_a_queue_of_workers_that_cannot_score_is_refused(server: Server, workers: StartWorker) -> None:
    workers(worker_class="rq.SimpleWorker", ready=False)
    wait_for(lambda: queue_workers(server.client, "rankmill").other)
    with (
        session(server.url) as here,
        pytest.raises(RunFailed, match=r"--worker-class rankmill\.ScoringWorker"),
    ):
        here.score(PAIRS, COLUMNS)
    assert not list(server.client.scan_iter("rankmill:run:*"))


def test_without_a_server_the_way_out_is_named() -> None:
    with session("redis://127.0.0.1:1") as here, pytest.raises(ConnectionFailed) as failed:
        here.client  # noqa: B018
    assert failed.value.__notes__ == ["leave --redis and REDIS_URL out to start an embedded server"]
