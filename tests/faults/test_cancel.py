"""A run that is given up leaves the server as if it had not been; its workers go on."""

from __future__ import annotations

import collections
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from jobs.errors import RunCancelled
from producer import Client
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.models.tiny import make_bert
from tests.harness.servers.valkey import nothing_left

OF_RQ = {b"rq:queues", b"rq:workers", b"rq:workers:rankmill"}
"""Sets of names that RQ keeps for good; a few bytes for each queue and worker."""


def test_a_cancelled_run_leaves_nothing_behind(server: Server, workers: StartWorker, tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model", hidden=128, layers=4)
    client = Client(server.url, model=str(model), chunk_size=64, window=8)
    worker = workers(environ={"RANKMILL_CLAIM_AHEAD": "64"})
    run = client.submit((f"cat {n}", "the moon " * 40) for n in itertools.count())
    next(iter(run))  # some chunks are done, one is being scored, the others wait
    assert server.client.llen("rq:queue:rankmill") > 2
    run.cancel()
    run.cancel()  # once more changes nothing
    assert server.client.llen("rq:queue:rankmill") == 0
    assert not list(server.client.scan_iter("rankmill:run:*"))
    with pytest.raises(RunCancelled):
        next(iter(run))
    # The chunk that was being scored ends for nobody, and the worker is free for others.
    assert np.isfinite(client.score([("cat", "moon")] * 3, timeout=60)).all()
    wait_for(
        lambda: {key for key in server.client.scan_iter("*") if server.client.ttl(key) == -1} <= OF_RQ, worker
    )
    assert not list(server.client.scan_iter("rankmill:run:*"))
    assert not list(server.client.scan_iter("rq:job:*"))


def test_cancelled_by_another_thread_it_leaves_nothing_either(shared_queue: Server, tiny_model: Path) -> None:
    client = Client(shared_queue.url, model=str(tiny_model), chunk_size=1, window=8)
    for pause in (0.0, 0.1, 0.2, 0.3):
        with nothing_left(shared_queue):
            run = client.submit((f"cat {n}", "moon") for n in itertools.count())
            timer = threading.Timer(pause, run.cancel)
            timer.start()
            with pytest.raises(RunCancelled):
                collections.deque(run, maxlen=0)
            timer.join()
        assert shared_queue.client.llen("rq:queue:rankmill") == 0
