"""The run store on its own, against an in-memory server."""

from __future__ import annotations

import time
from datetime import timedelta

import fakeredis
import numpy as np
import pyarrow as pa
import pytest
from rq import Queue
from rq.exceptions import AbandonedJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.job import Payload, attempt
from rankmill.jobs.contract.results import ChunkFailure, ChunkScores, ChunkStats
from rankmill.jobs.contract.run import Progress, Run, Settled
from rankmill.jobs.protocol.queues import QueueCapacity, write_capacity
from rankmill.jobs.protocol.recovery import enqueue_due, failure_handler
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from tests.harness.runs import stored_run
from tests.harness.waiting import take_out, waiting_jobs

STATS = ChunkStats(
    worker="w",
    device="cpu",
    device_name="cpu",
    backend="torch",
    precision="fp32",
    revision=None,
    attempt=1,
    tokens=10,
    padded_tokens=12,
    batches=1,
    seconds=0.5,
)


@pytest.fixture
def store() -> RunStore:
    return RunStore(fakeredis.FakeRedis())


@pytest.fixture
def run(store: RunStore) -> Run:
    return stored_run(store, ttl=100, max_retries=2)


def add(store: RunStore, run: Run, *results: ChunkScores | ChunkFailure) -> None:
    with store.redis.pipeline() as pipe:
        for result in results:
            store.add_result(pipe, run.id, result, run.ttl)
        pipe.execute()


def pause_after_a_failure(store: RunStore, run: Run, chunk: int) -> None:
    """As RQ does it when an attempt at the chunk has failed."""
    queue = store.queue(run.queue)
    job = Job.fetch(keys.job_id(run.id, chunk), store.redis, serializer=JSONSerializer)
    take_out(store.redis, job.id, run.queue)
    with store.redis.pipeline() as pipe:
        job.retry(queue, pipe)
        pipe.execute()


def test_results_are_read_once_each_and_then_forgotten(store: RunStore, run: Run) -> None:
    store.enqueue(run, {0: Payload(b"a", 5), 1: Payload(b"b", 5)})
    scored = ChunkScores(1, pa.array([1.5, None], pa.float32()), pa.array([None, "bad"]), STATS)
    failed = ChunkFailure(chunk=0, message="broken", fatal=False)
    add(store, run, scored, failed)
    (first, got), (second, other) = store.results(run, after="0", block_ms=1)
    assert isinstance(got, ChunkScores)
    assert (got.scores.to_pylist(), got.errors.to_pylist(), got.stats) == ([1.5, None], [None, "bad"], STATS)
    assert other == failed
    assert store.results(run, after=first, block_ms=1) == [(second, failed)]
    assert store.results(run, after=second, block_ms=1) == []
    store.forget(run, [0, 1], [first, second], Progress(rows=10))
    assert store.payload(run, 0) is None
    assert store.redis.xlen(keys.results(run.id)) == 0


def test_a_job_is_json_and_names_its_chunk(store: RunStore, run: Run) -> None:
    store.enqueue(run, {3: Payload(b"payload", 500)})
    job = Job.fetch(keys.job_id(run.id, 3), store.redis, serializer=JSONSerializer)
    assert (job.func_name, job.args, job.retries_left) == ("rankmill.score_chunk", [run.id, "3"], 2)
    assert job.timeout
    assert job.timeout > 500  # grows with the chunk, never RQ's fixed 180 s
    assert attempt(run, job) == 1
    job.retries_left = 0
    assert attempt(run, job) == 3
    assert keys.parse_job_id(job.id) == (run.id, 3)
    assert keys.parse_job_id("somebody-else-s") is None


def test_a_result_for_a_run_that_is_gone_is_not_kept(store: RunStore, run: Run) -> None:
    store.delete(run, [])
    add(store, run, ChunkFailure(chunk=0, message="late", fatal=False))
    assert store.redis.keys("*") == [keys.queues().encode()]


def test_a_note_that_scores_are_wrong_outlives_its_run(store: RunStore, run: Run) -> None:
    add(store, run, ChunkFailure(chunk=1, message="broken", fatal=False))
    store.leave_notes({"another": 10, run.id: run.ttl}, "worker w scores wrongly \ud800")
    store.cancel(run)
    for _ in range(2):  # it may be repeated
        assert store.delete(run, []).wrong == "worker w scores wrongly ?"
    store.restore(run)
    assert store.wrong(["none", run.id]) == "worker w scores wrongly ?"
    assert 10 < store.redis.ttl(keys.wrong(run.id)) <= run.ttl
    assert 0 < store.redis.ttl(keys.wrong("another")) <= 10
    assert store.wrong(["none"]) is None


def test_an_attempt_at_a_run_that_is_gone_leaves_nothing(
    store: RunStore, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.delete(run, [])
    monkeypatch.setattr(store.redis, "unlink", lambda *_: pytest.fail("it might die before this"))
    store.count_attempts(run, {0: 1})
    assert store.redis.keys("*") == [keys.queues().encode()]


def test_each_fact_is_settled_by_the_first_who_says_it(store: RunStore, run: Run) -> None:
    first, other = Settled("fp32", None), Settled("bf16", "commit", "cpu")
    assert store.settle(run, first) == first
    assert store.settle(run, other) == Settled("fp32", "commit", "cpu")
    assert 0 < store.redis.ttl(keys.settled(run.id)) <= run.ttl
    assert store.settle(run, other, over=True) == store.settle(run, first) == other
    store.redis.delete(keys.settled(run.id))
    assert store.settle(run, first) == store.settle(run, first) == first
    store.cancel(run)
    store.settle(run, first)
    assert not store.redis.exists(keys.settled(run.id))


def test_an_attempt_that_a_worker_fails_counts_if_the_chunk_is_sent_anew(store: RunStore, run: Run) -> None:
    store.enqueue(run, {chunk: Payload(b"a", 1) for chunk in (0, 1)})
    handle, error = failure_handler(store), ValueError("broken")
    for kind in (ValueError, AbandonedJobError):
        job = Job.fetch(keys.job_id(run.id, 1), store.redis, serializer=JSONSerializer)
        handle(job, kind, error, None)
        pause_after_a_failure(store, run, 1)
    assert store.failed_attempts(run) == {1: 2}


def test_deleting_a_run_takes_its_jobs_off_the_queue(store: RunStore, run: Run) -> None:
    other = stored_run(store, ttl=100)
    store.enqueue(run, {0: Payload(b"a", 1), 1: Payload(b"b", 1)})
    pause_after_a_failure(store, run, 1)
    store.enqueue(other, {0: Payload(b"c", 1)})
    store.delete(run, [0, 1])
    assert waiting_jobs(store.redis, "q") == [keys.job_id(other.id, 0)]
    assert not [key for key in store.redis.keys("*") if run.id.encode() in key]


def test_a_chunk_pauses_longer_after_each_failed_attempt(store: RunStore, run: Run) -> None:
    store.enqueue(run, dict.fromkeys(range(20), Payload(b"x", 1)))
    jobs = [
        Job.fetch(job, store.redis, serializer=JSONSerializer) for job in waiting_jobs(store.redis, run.queue)
    ]
    pauses = np.array([job.retry_intervals for job in jobs])
    assert pauses.shape == (20, 2)
    assert ((pauses >= [1, 2]) & (pauses <= [3, 6])).all()
    assert len(np.unique(pauses[:, 1])) > 1  # jitter


def test_a_chunk_goes_back_to_the_queue_when_its_pause_is_over(store: RunStore, run: Run) -> None:
    store.enqueue(run, {0: Payload(b"a", 1)})
    pause_after_a_failure(store, run, 0)
    queue = store.queue(run.queue)
    assert store.missing(run, [0]) == []
    enqueue_due(queue, time.time())
    assert not waiting_jobs(store.redis, run.queue)
    store.redis.zadd(queue.scheduled_job_registry.key, {keys.job_id(run.id, 0): 1})
    enqueue_due(queue, time.time())
    assert waiting_jobs(store.redis, run.queue) == [keys.job_id(run.id, 0)]
    assert not store.redis.zcard(queue.scheduled_job_registry.key)
    pause_after_a_failure(store, run, 0)
    hour_ahead = time.time() + 3600  # the server's clock has jumped back since
    store.redis.zadd(queue.scheduled_job_registry.key, {keys.job_id(run.id, 0): hour_ahead})
    enqueue_due(queue, time.time())
    assert waiting_jobs(store.redis, run.queue) == [keys.job_id(run.id, 0)]


def test_a_job_by_name_waits_until_the_time_for_which_rq_has_scheduled_it(store: RunStore) -> None:
    """However far that is: only a chunk's pause that is too long is due to a clock that has jumped back."""
    queue = store.queue("q")
    job = Queue("q", connection=store.redis, serializer=JSONSerializer).enqueue_in(
        timedelta(hours=8), "rankmill.score_pairs", [["a", "b"]], model="m"
    )
    enqueue_due(queue, time.time())
    assert (queue.count, queue.scheduled_job_registry.get_job_ids()) == (0, [job.id])
    enqueue_due(queue, time.time() + 9 * 3600)
    assert waiting_jobs(store.redis, "q") == [job.id]


def test_what_waits_longer_than_its_expiry_stays_while_its_producer_looks_after_it(
    store: RunStore, run: Run
) -> None:
    """Without workers, chunks were lost again and again, until they were given up."""
    store.enqueue(run, {chunk: Payload(b"a", 1) for chunk in range(2)})
    expiring = {key for key in store.redis.keys("*") if store.redis.ttl(key) > 0} - {keys.queues().encode()}
    for key in expiring:
        store.redis.expire(key, 5)
    store.restore(run)
    assert store.missing(run, range(2)) == []
    assert store.put_back(run, range(2)) == 0
    assert not [key for key in expiring if store.redis.ttl(key) <= 5]


def test_missing_chunks_are_those_without_a_living_job(store: RunStore, run: Run) -> None:
    store.enqueue(run, dict.fromkeys(range(4), Payload(b"x", 1)))
    store.redis.delete(Job.key_for(keys.job_id(run.id, 1)))
    store.redis.hset(Job.key_for(keys.job_id(run.id, 2)), "status", "failed")
    assert store.missing(run, range(4)) == [1, 2]


def test_a_run_can_be_restored_but_is_not_reset(store: RunStore, run: Run) -> None:
    add(store, run, ChunkFailure(chunk=0, message="kept", fatal=False))
    store.restore(run)
    assert len(store.results(run, after="0", block_ms=1)) == 1
    store.redis.flushall()
    assert store.load(run.id) is None
    store.restore(run)
    assert store.load(run.id) == run


def test_damaged_keys_of_the_window_and_of_progress_end_no_run(store: RunStore, run: Run) -> None:
    store.redis.rpush(keys.capacity("q"), "no string")
    assert store.capacity("q") == QueueCapacity()
    store.redis.sadd("rq:workers:q", b"\xff", "rq:worker:odd")
    store.redis.set(keys.worker("odd"), b"\xff")
    write_capacity(store.redis, "q", 10)
    assert store.capacity("q") == QueueCapacity(workers=1)


def test_the_window_does_not_count_drained_workers(store: RunStore) -> None:
    for name, drained in (("busy", False), ("drained", True)):
        store.redis.sadd("rq:workers:q", f"rq:worker:{name}")
        report = WorkerReport(device="cpu", started=1, beat=1, claim_ahead=1024, drained=drained)
        announce_worker(store.redis, name, report, 60)
    write_capacity(store.redis, "q", 10)
    assert store.capacity("q") == QueueCapacity(workers=1, claim_ahead=1024)
