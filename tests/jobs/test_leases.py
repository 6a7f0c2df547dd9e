"""Leases when the server's clock jumps, as it does when a host takes over whose clock differs."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest
from redis.client import Pipeline
from rq.executions import Execution

from rankmill.extensions.runners.store import FileRunStore
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.leases import RQ_DELAY, UNRENEWED_SECONDS, Leases, Renewals, move, server_time
from rankmill.jobs.protocol.queues import write_capacity
from rankmill.jobs.protocol.recovery import clean_queue, failure_handler, hand_on_abandoned
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.system import system
from rankmill.workers.queue.heartbeat import WorkerHeartbeat
from rankmill.workers.rq.job import LeasedJobs
from tests.conftest import Server

HOUR = 3600.0


@pytest.fixture
def store(server: Server) -> RunStore:
    return RunStore(server.client)


def test_what_was_written_before_the_clock_jumped_back_ends_soon(store: RunStore) -> None:
    queue, now = store.queue("q"), server_time(store.redis)
    started = queue.started_job_registry.key
    rq_now = now + RQ_DELAY
    store.redis.zadd(started, {"dead:x": rq_now + HOUR, "alive:x": rq_now + 10})
    store.redis.sadd("rq:workers:q", "rq:worker:dead")
    store.redis.set("rq:worker:dead", 1, ex=int(HOUR))
    store.redis.set(keys.worker("dead"), 1, ex=int(HOUR))
    clean_queue(queue, failure_handler(store), 15, now, trusts_leases=True)
    ends = dict(store.redis.zrange(started, 0, -1, withscores=True))
    assert ends[b"alive:x"] == pytest.approx(rq_now + 10)
    assert rq_now < ends[b"dead:x"] <= time.time() + RQ_DELAY + UNRENEWED_SECONDS + 1
    assert store.redis.ttl(keys.worker("dead")) <= UNRENEWED_SECONDS


def test_a_longer_lease_is_left_alone(store: RunStore) -> None:
    leases = Leases(store.redis, "leases", 600)
    assert leases.take("mine", most=1)
    end = store.redis.zscore("leases", "mine")
    assert leases.holders() == ["mine"]
    assert store.redis.zscore("leases", "mine") == end
    store.redis.zadd("leases", {"dead": end + HOUR})
    assert Leases(store.redis, "leases", 600).holders() == ["mine", "dead"]
    assert store.redis.zscore("leases", "dead") <= time.time() + 601


def test_a_short_lease_beside_a_longer_one_does_not_end_it(store: RunStore) -> None:
    """As of two runners, or gateways, whose settings differ."""
    long, short = (Leases(store.redis, "leases", seconds) for seconds in (100, 20))
    for renew in (short.take, lambda holder: short.renew([holder])):
        assert long.take("long")
        renew("short")
        assert store.redis.ttl("leases") > 90
    assert long.holders() == ["short", "long"]


def test_submitted_runs_of_the_dead_come_back_soon(store: RunStore) -> None:
    files = FileRunStore(store.redis, "files", 3600)
    key, rq_now = files.queue.started_job_registry.key, server_time(store.redis) + RQ_DELAY
    store.redis.zadd(key, {"run:claim": rq_now + HOUR})
    files.recover(15, expired=False)
    assert store.redis.zscore(key, "run:claim") <= time.time() + RQ_DELAY + UNRENEWED_SECONDS + 1


def test_rq_s_own_code_takes_no_job_of_a_dead_worker(store: RunStore) -> None:
    """`rq info` and dashboards clean RQ's registries: a chunk's rows failed beside a row that kills."""
    queue, now = store.queue("q"), server_time(store.redis)
    run = new_run(ScoreSpec(model="m"), queue="q", ttl=3600, max_retries=3, priority="bulk")
    store.enqueue(run, {0: Payload(b"pairs", 1)}, new=True)
    job = queue.take(["bulk"]).job_id.decode()
    store.redis.hset(f"rq:job:{job}", "status", "started")
    with store.redis.pipeline() as pipe:
        execution = Execution("x", job, store.redis)
        LeasedJobs("q", connection=store.redis).add_execution(execution, pipe, -60)
        pipe.execute()
    assert queue.started_job_registry.count == 1  # as `rq info` counts
    assert store.redis.hget(f"rq:job:{job}", "status") == b"started"
    clean_queue(queue, failure_handler(store), 15, now, trusts_leases=True)
    assert store.failed_attempts(run) == {0: 1}
    assert not queue.started_job_registry.count


def test_the_lock_of_a_cleaning_is_nobodys_after_a_heartbeat(store: RunStore) -> None:
    class Worker:
        connection = store.redis

    heartbeat = WorkerHeartbeat.__new__(WorkerHeartbeat)
    heartbeat._worker, heartbeat._lock_ms = Worker(), 5000  # type: ignore[assignment]
    queue = store.queue("q")
    assert heartbeat._lock(queue)
    assert not heartbeat._lock(queue)
    store.redis.set(queue.registry_cleaning_key, os.getpid(), px=3_600_000)
    assert heartbeat._lock(queue)
    assert store.redis.pttl(queue.registry_cleaning_key) <= 5000


def test_the_lock_of_a_cleaning_ends_when_the_next_lease_lapses(store: RunStore) -> None:
    class Worker:
        connection = store.redis

    heartbeat = WorkerHeartbeat.__new__(WorkerHeartbeat)
    heartbeat._worker, heartbeat._lock_ms = Worker(), 5000  # type: ignore[assignment]
    heartbeat._server_now = now = server_time(store.redis)
    queue = store.queue("q")
    lock, leases = queue.registry_cleaning_key, queue.started_job_registry.key
    assert heartbeat._lock(queue)
    store.redis.zadd(leases, {"of-a-plain-worker:x": now + 60})
    now += RQ_DELAY
    store.redis.zadd(leases, {"renewed:x": now + 10})
    heartbeat._end_lock_with_a_lease(queue)
    assert store.redis.pttl(lock) > 1000
    assert store.redis.get(lock) == str(os.getpid()).encode()
    store.redis.zadd(leases, {"dead:x": now - 1})
    heartbeat._end_lock_with_a_lease(queue)
    time.sleep(0.01)
    assert heartbeat._lock(queue)
    store.redis.zadd(leases, {"dead:x": now + 3600}, xx=True)
    store.redis.zadd(leases, {"dying:x": now + 0.5})
    heartbeat._end_lock_with_a_lease(queue)
    assert store.redis.pttl(lock) <= 501


def test_the_capacity_is_summed_up_again(store: RunStore) -> None:
    store.redis.set(keys.capacity("q"), '{"workers": 7, "claim_ahead": 700}', ex=int(HOUR))
    write_capacity(store.redis, "q", 15)
    assert store.capacity("q").workers == 0
    assert store.redis.ttl(keys.capacity("q")) <= 15


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_after_a_jump_others_may_renew_their_leases_first(jump: float) -> None:
    renewals = Renewals(beat_seconds=5, lease_seconds=15)
    renewals.renewed(1000.0)
    renewals.renewed(1000.1)
    assert renewals.others_have_lapsed
    renewals.renewed(1000.2 + jump)
    assert not renewals.others_have_lapsed


def test_a_job_is_moved_once_though_another_process_moves_it_meanwhile(store: RunStore) -> None:
    queue = store.queue("q")
    leases, job = queue.started_job_registry.key, "rq:job:a-0"
    store.redis.zadd(leases, {"a-0:x": 0, "b-0:y": 0})
    store.redis.hset(job, "status", "started")

    def put(pipe: Pipeline) -> None:
        pipe.hset(job, "status", "queued")
        pipe.rpush(queue.key, "a-0")

    def late(pipe: Pipeline) -> None:
        assert move(store.redis, leases, "a-0:x", job, put)
        put(pipe)

    assert not move(store.redis, leases, "a-0:x", job, late)
    assert store.redis.lrange(queue.key, 0, -1) == [b"a-0"]
    assert store.redis.zrange(leases, 0, -1) == [b"b-0:y"]


def test_a_job_is_moved_though_a_heartbeat_comes_meanwhile(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, job = store.queue("q").started_job_registry.key, "rq:job:a-0"
    store.redis.zadd(leases, {"a-0:x": 0})
    store.redis.hset(job, "status", "started")
    beats, multi = [b"first", b"second"], Pipeline.multi

    def after_a_beat(pipe: Pipeline) -> None:
        if beats:
            store.redis.hset(job, "last_heartbeat", beats.pop())
        multi(pipe)

    monkeypatch.setattr(Pipeline, "multi", after_a_beat)
    assert move(store.redis, leases, "a-0:x", job, lambda pipe: pipe.rpush("queue", "a-0"))
    assert not beats
    assert store.redis.lrange("queue", 0, -1) == [b"a-0"]
    assert not store.redis.exists(leases)


@pytest.mark.parametrize("meanwhile", ["handed on", "renewed"])
def test_a_job_that_is_handed_on_or_renewed_meanwhile_has_no_attempt_less(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """A supervisor hands on the jobs of its dead worker while the heartbeat of another worker does.

    The second one took the job's next attempt for the one that has failed, and gave the chunk up.
    """
    queue, handle = store.queue("q"), failure_handler(store)
    run = new_run(ScoreSpec(model="m"), queue="q", ttl=3600, max_retries=1, priority="bulk")
    store.enqueue(run, {0: Payload(b"pairs", 1)}, new=True)
    leases, job = queue.started_job_registry.key, queue.take(["bulk"]).job_id.decode()
    store.redis.hset(f"rq:job:{job}", "status", "started")
    store.redis.lrem(queue.intermediate_queue_key, 1, job)
    store.redis.zadd(leases, {f"{job}:x": 0})
    listed = Pipeline.execute

    def list_and_be_late(pipe: Pipeline) -> Any:
        found = listed(pipe)
        monkeypatch.undo()
        if meanwhile == "renewed":
            store.redis.zadd(leases, {f"{job}:x": time.time() + HOUR})
        else:
            hand_on_abandoned(queue, handle, until=0)
        return found

    monkeypatch.setattr(Pipeline, "execute", list_and_be_late)
    hand_on_abandoned(queue, handle, until=time.time())
    assert store.failed_attempts(run) == ({0: 1} if meanwhile == "handed on" else {})
    assert not store.redis.xlen(keys.results(run.id))
    waiting = store.redis.lrange(keys.waiting("q", run.id), 0, -1)
    assert waiting == ([job.encode()] if meanwhile == "handed on" else [])


def test_a_worker_that_hands_on_many_jobs_renews_its_own_leases_in_between(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with thousands of jobs died: the leases of the worker that handed them on lapsed, too."""
    queue, seconds = store.queue("q"), itertools.count(0, 2)
    run = new_run(ScoreSpec(model="m"), queue="q", ttl=3600, max_retries=3, priority="bulk")
    store.enqueue(run, {chunk: Payload(b"pairs", 1) for chunk in range(9)}, new=True)
    leases = queue.started_job_registry.key
    store.redis.zadd(leases, {f"{run.id}-{chunk}:x": 0 for chunk in range(9)})
    monkeypatch.setattr(system, "monotonic", lambda: next(seconds))
    now = server_time(store.redis)
    left = [9]
    while left[-1]:
        clean_queue(queue, failure_handler(store), 15, now, trusts_leases=True)
        left.append(store.redis.zcard(leases))
        assert left[-1] < left[-2]
    assert len(left) > 2


def test_a_lease_that_is_renewed_meanwhile_is_not_ended(server: Server) -> None:
    client = server.client
    client.zadd("leases", {"renewed": 20.0, "lapsed": 10.0})
    for holder in ("renewed", "lapsed"):
        moved = move(client, "leases", holder, "job", lambda pipe: pipe.rpush("queue", "job"), until=15.0)
        assert moved == (holder == "lapsed")
    assert client.zrange("leases", 0, -1) == [b"renewed"]
    assert client.llen("queue") == 1
