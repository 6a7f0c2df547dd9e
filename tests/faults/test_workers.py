"""Workers that are killed, stopped and brought back while they score."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import QUICK_LEASE, Server, StartWorker, wait_for
from tests.harness.models.tiny import make_bert

pytestmark = pytest.mark.usefixtures("interleaved")

LONG = "the moon over the river " * 20


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes some milliseconds for a long pair."""
    return make_bert(tmp_path_factory.mktemp("slow"), hidden=256, layers=6)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, pytest.param(60, marks=pytest.mark.long)])
def test_a_zombie_changes_nothing(
    stopped: int, server: Server, workers: StartWorker, slow_model: Path
) -> None:
    """Shows: a worker is paused for longer than its lease."""
    pairs = [(f"big cat {n}", LONG) for n in range(120)]
    client = Client(server.url, model=str(slow_model), chunk_size=40)
    zombie = workers(environ=QUICK_LEASE)
    expected = client.score(pairs)
    run = client.submit(pairs)
    wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
    zombie.send_signal(signal.SIGSTOP)
    try:
        workers(ready=False, environ=QUICK_LEASE)
        scores = run.scores(timeout=120)
        time.sleep(stopped)  # on top of the time that the others took
    finally:
        zombie.send_signal(signal.SIGCONT)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert not run.errors
    wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2)
    time.sleep(3)  # the zombie finishes what it had
    assert zombie.poll() is None
    wait_for(lambda: not [*server.client.scan_iter("rankmill:run:*"), *server.client.scan_iter("rq:job:*")])
    np.testing.assert_allclose(client.score(pairs), expected, atol=1e-5)


@pytest.mark.slow
def test_kills_one_after_the_other_lose_nothing(
    server: Server, workers: StartWorker, slow_model: Path
) -> None:
    """Shows: a worker is killed, or its host is gone."""
    pairs = [(f"big cat {n}", LONG) for n in range(120)]
    client = Client(server.url, model=str(slow_model), chunk_size=12)
    run = client.submit(pairs)
    for _ in range(2):
        worker = workers(environ=QUICK_LEASE)
        wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
        worker.kill()
    workers(environ=QUICK_LEASE)
    assert np.isfinite(run.scores(timeout=280)).all()
    assert not run.errors


def test_every_key_expires_while_chunks_are_scored(
    server: Server, workers: StartWorker, slow_model: Path
) -> None:
    """Shows: another live producer is killed."""
    workers()
    run = Client(server.url, model=str(slow_model), chunk_size=100).submit([("big cat", LONG)] * 1000)
    wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
    kept = {key for key in server.client.scan_iter("*") if server.client.ttl(key) == -1}
    run.cancel()
    rq_own = {b"rq:queues", b"rq:workers", b"rq:workers:rankmill", b"rq:queue:rankmill", b"rq:wip:rankmill"}
    assert kept <= rq_own | {b"rq:queue:rankmill:intermediate"}


@pytest.mark.slow
def test_a_cancelled_run_is_scored_no_further(server: Server, workers: StartWorker, slow_model: Path) -> None:
    workers(environ=QUICK_LEASE)
    client = Client(server.url, model=str(slow_model), chunk_size=10_000)
    run = client.submit([("big cat", LONG)] * 10_000)  # a minute's work and more
    wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
    time.sleep(1)
    run.cancel()
    wait_for(lambda: not server.client.zcard("rq:wip:rankmill"), seconds=40)
    assert np.isfinite(client.score([("big cat", LONG)] * 10, timeout=40)).all()
