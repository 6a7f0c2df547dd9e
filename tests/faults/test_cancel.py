"""A run that is given up leaves the server as if it had not been; its workers go on."""

from __future__ import annotations

import collections
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from rq.job import Job

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunCancelled
from rankmill.jobs.contract.run import Run
from rankmill.jobs.protocol.runs import RunStore
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.runs import stored_run
from tests.harness.servers.valkey import nothing_left
from tests.harness.waiting import lists, take_out, waiting_jobs

pytestmark = pytest.mark.usefixtures("interleaved")

OF_RQ = {b"rq:queues", b"rq:workers", b"rq:workers:rankmill"}
"""Sets of names that RQ keeps for good; a few bytes for each queue and worker."""


def test_a_cancelled_run_leaves_nothing_behind(
    server: Server, workers: StartWorker, model_with_marks: Path, tmp_path: Path
) -> None:
    client = Client(server.url, model=str(model_with_marks), chunk_size=64, window=16)
    environ = {"FORWARDS": str(tmp_path / "forwards"), "PYTHONPATH": str(Path(__file__).parents[2])}
    worker = workers(
        worker_class="tests.harness.misbehaving.MisbehavingWorker",
        environ={**environ, "RANKMILL_CLAIM_AHEAD": "64"},
    )
    run = client.submit((f"cat {n}", "hold" if n >= 6 * 64 else "moon") for n in itertools.count())
    next(iter(run))  # some chunks are done, one is held by the worker, the others wait
    assert len(waiting_jobs(server.client)) > 2
    run.cancel()
    run.cancel()  # once more changes nothing
    assert not waiting_jobs(server.client)
    assert not list(server.client.scan_iter("rankmill:run:*"))
    (tmp_path / "go").touch()
    with pytest.raises(RunCancelled):
        next(iter(run))
    # The chunk that was being scored ends for nobody, and the worker is free for others.
    assert np.isfinite(client.score([("cat", "moon")] * 3, timeout=60)).all()
    wait_for(
        lambda: {key for key in server.client.scan_iter("*") if server.client.ttl(key) == -1} <= OF_RQ, worker
    )
    assert not list(server.client.scan_iter("rankmill:run:*"))
    assert not list(server.client.scan_iter("rq:job:*"))


def test_a_run_that_another_thread_cancels_leaves_nothing(shared_queue: Server, tiny_model: Path) -> None:
    client = Client(shared_queue.url, model=str(tiny_model), chunk_size=1, window=8)
    for pause in (0.0, 0.1, 0.2, 0.3):
        with nothing_left(shared_queue):
            run = client.submit((f"cat {n}", "moon") for n in itertools.count())
            timer = threading.Timer(pause, run.cancel)
            timer.start()
            with pytest.raises(RunCancelled):
                collections.deque(run, maxlen=0)
            timer.join()
        assert not waiting_jobs(shared_queue.client)


@pytest.mark.parametrize("behind", [False, True])
def test_cancelling_many_waiting_chunks_does_not_keep_others_waiting(server: Server, behind: bool) -> None:
    """20,000 of its jobs wait, alone or between as many of others."""
    store = RunStore(server.client)
    for _ in range(5):  # a busy machine stops the server itself now and then
        server.client.flushall()
        if cancels_without_a_slow_command(store, behind=behind):
            return
    pytest.fail("each time, a command took more than 0.1 s; a few ms if nothing else runs")


def cancels_without_a_slow_command(store: RunStore, *, behind: bool) -> bool:
    """Cancel a run with 20,000 jobs that wait; returns whether each command took less than 0.1 s."""
    run, other = (stored_run(store, queue="q") for _ in range(2))
    chunks = list(range(0, 8 * 20_000, 8))
    for jobs_of, some in ((other, chunks[:10_000]), (run, chunks), (other, chunks[10_000:])):
        if behind or jobs_of is run:
            put_jobs(store, jobs_of, some)
    waiting = [keys.job_id(other.id, chunk) for chunk in chunks] if behind else []
    store.redis.rpush("rq:queue:q", "by-name")
    queue = store.queue("q")
    store.redis.config_set("slowlog-log-slower-than", 100_000)
    store.redis.slowlog_reset()
    assert store.cancel(run) == len(chunks)
    slow = store.redis.slowlog_len()
    assert waiting_jobs(store.redis, "q") == [*waiting, "by-name"]
    assert queue.count == len(waiting) + 1
    left = set(store.redis.scan_iter(f"*{run.id}*", count=10_000))
    assert left == {keys.cancelled(run.id).encode()}
    assert len(store.chunks(other)) == len(waiting)
    return bool(slow == 0)


def test_chunks_that_workers_have_or_that_pause_are_counted_and_expire(server: Server) -> None:
    store = RunStore(server.client)
    run = stored_run(store, queue="q")
    chunks = list(range(1200))
    put_jobs(store, run, chunks)
    claimed, paused = chunks[::300], chunks[1::300]
    for chunk in [*claimed, *paused]:
        take_out(store.redis, keys.job_id(run.id, chunk), "q")
        store.redis.hset(job_key(run, chunk), "status", "started" if chunk in claimed else "scheduled")
    store.redis.zadd("rq:scheduled:q", {keys.job_id(run.id, chunk): 1e12 for chunk in paused})
    assert store.delete(run, chunks).waiting == 1196
    left = {key.decode() for key in server.client.scan_iter(f"*{run.id}*")}
    assert left == {job_key(run, chunk) for chunk in claimed}  # their workers find the run gone
    assert all(0 < store.redis.ttl(key) <= run.ttl for key in left)
    assert not store.redis.exists("rq:scheduled:q", *lists(store.redis, "q"))


def put_jobs(store: RunStore, run: Run, chunks: list[int]) -> None:
    """Chunks that wait, by as few commands as can be."""
    for first in range(0, len(chunks), 1000):
        with store.redis.pipeline(transaction=False) as pipe:
            for chunk in chunks[first : first + 1000]:
                pipe.hset(job_key(run, chunk), "status", "queued")
                pipe.set(keys.pairs(run.id, chunk), b"pairs")
            store.queue(run.queue).add(
                pipe, [keys.job_id(run.id, chunk) for chunk in chunks[first : first + 1000]]
            )
            pipe.execute()


def job_key(run: Run, chunk: int) -> str:
    return str(Job.key_for(keys.job_id(run.id, chunk)))
