"""Requests before bulk work, runs that share evenly, claims handed on: real servers, workers that sleep."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.cluster import valkey, wait_until
from benchmarks.simulated import (
    SimulatedCluster,
    collect,
    endless_pairs,
    finished,
    simulated_cluster,
    simulated_score,
)
from rankmill import Client
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError, RunCancelled
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.priority import Priority, Tenant, priority_of, run_id_of_request
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.system import system
from rankmill.producer.client.runs import ScoringRun
from rankmill.workers.queue.claim_order import ClaimOrder, Refusals
from rankmill.workers.queue.intake import Intake
from tests.harness.waiting import waiting_jobs

pytestmark = [pytest.mark.own_precision, pytest.mark.usefixtures("interleaved")]

QUICK = {"RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_LEASE_SECONDS": "5", "RANKMILL_BATCH_WAIT_MS": "0"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as found:
        yield found


def pairs(count: int) -> list[tuple[str, str]]:
    return list(islice(endless_pairs(), count))


def client_of(cluster: SimulatedCluster, **options: Any) -> Client:
    return Client(cluster.url, model="demo", **{"chunk_size": 128, "window": 32, **options})


def check(found: np.ndarray, given: list[tuple[str, str]]) -> None:
    """Each pair has its own score, once."""
    np.testing.assert_allclose(found, [simulated_score(*pair) for pair in given], atol=1e-4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which goes on when the test says so."""
    now = [0.0]
    monkeypatch.setattr(system, "monotonic", lambda: now[0])
    return now


class Looks:
    """A worker's search for jobs, without the worker: it takes them, and scores none."""

    def __init__(self, queue: OrderedQueue) -> None:
        self.queue, self.order, self.refusals = queue, ClaimOrder(4096), Refusals()
        worker: Any = SimpleNamespace(name="w", queues_in_turn=[queue])
        claims: Any = SimpleNamespace(unanswered={})
        pipeline: Any = SimpleNamespace(wake=lambda: None)
        self._intake = Intake(worker, claims, pipeline, self.order, self.refusals)

    def __call__(self, *kinds: Priority) -> str:
        found = self._intake._take([*kinds], True, False)
        return found[0].decode() if found else ""

    def refuse(self, job: str) -> None:
        """Leave a job to other workers, as `Claims` does."""
        parsed = keys.parse_job_id(job)
        self.order.refused(parsed[0] if parsed else run_id_of_request(job))
        self.queue.place(self.queue.connection, job, at_front=True)


def put(store: RunStore, kind: Priority, tenant: str, chunks: int) -> str:
    """A new run with so many chunks that wait; its id."""
    run = new_run(ScoreSpec(model="m"), queue="looked-at", ttl=60, max_retries=0, priority=kind,
                  tenant=Tenant(tenant))  # fmt: skip
    store.enqueue(run, {chunk: Payload(b"pairs", 1) for chunk in range(chunks)}, new=True)
    return run.id


@pytest.fixture
def store(url: str) -> RunStore:
    found = Client(url, model="demo").store
    found.redis.flushall()
    return found


@pytest.mark.parametrize("kind", ["request", "bulk"])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_worker_has_refused_it_leaves_alone_and_then_takes_last(
    store: RunStore, clock: list[float], kind: Priority, by_name: bool
) -> None:
    looks = Looks(store.queue("looked-at"))
    if by_name:
        store.redis.rpush(looks.queue.key, "one-by-name", "one-by-name")
    else:
        put(store, kind, "a", 600)
    refused = looks("request", "bulk")
    looks.refuse(refused)
    assert not any(looks("request", "bulk") for _ in range(5))
    put(store, "request" if by_name else kind, "b", 1)
    assert looks("request", "bulk") not in {"", refused}
    clock[0] += 1.1
    put(store, "bulk" if by_name else kind, "b", 1)  # it was refused lately, and comes after all others
    assert looks("request", "bulk") not in {"", refused}
    assert looks("request", "bulk") == refused  # it tries again
    run_id = keys.parse_job_id(refused)[0] if not by_name else "rone-by-name"  # type: ignore[index]
    looks.order.began(run_id, priority_of(run_id), 1)
    assert not looks.order.refused_lately


@pytest.mark.parametrize("kind", ["request", "bulk"])
def test_a_worker_that_refuses_hundreds_of_runs_finds_the_one_it_scores(
    store: RunStore, kind: Priority, clock: list[float]
) -> None:
    looks = Looks(store.queue("looked-at"))
    for number in range(300):
        put(store, kind, f"a{number % 3}", 1)

    def finds(mine: str, seconds: float) -> bool:
        until = clock[0] + seconds
        while clock[0] < until:
            job = looks(kind)
            if job.startswith(mine):
                return True
            if job:
                looks.refuse(job)
            clock[0] += 0.004 if job else 0.1
        return False

    assert not finds("none", 12.0)
    assert finds(put(store, kind, "b", 1), 5.0)


def test_small_runs_are_requests_unless_the_caller_says_otherwise(url: str) -> None:
    client = Client(url, model="demo", queue="nobody")

    def priority(given: Any, **how: Any) -> str:
        run = client.submit(given, **how)
        found = client.store.load(run.id)
        assert found is not None
        run.cancel()
        return found.priority

    assert priority(pairs(256)) == "request"
    assert priority(pairs(257)) == "bulk"
    assert priority(iter(pairs(3))) == "bulk"
    assert priority(pairs(3), priority="bulk") == "bulk"
    assert priority(pairs(300), priority="request") == "request"
    with pytest.raises(ConfigError, match="priority: 'soon' does not exist; name request or bulk"):
        client.submit(pairs(3), priority="soon")  # type: ignore[call-overload]
    assert new_run(ScoreSpec(model="m"), queue="q", ttl=60, max_retries=0).priority == "bulk"


def test_a_request_overtakes_the_bulk_work_in_the_queue_and_in_the_worker() -> None:
    with simulated_cluster(1, 6.0, QUICK) as cluster:
        redis, client = cluster.client, client_of(cluster)
        bulk = client.submit(pairs(64 * 128))
        wait_until(lambda: finished(redis, bulk.id) >= 1)
        for _ in range(2):
            wanted = pairs(20)
            request = client.submit(wanted)
            seconds, microseconds = redis.time()
            wait_until(lambda request=request: finished(redis, request.id) >= 1)  # type: ignore[misc]
            ((answered, _),) = redis.xrange(keys.results(request.id))
            since = f"{seconds * 1000 + microseconds // 1000}-0"
            # eight chunks, each of one batch, were claimed, and 20 waited: one was in progress
            assert len(redis.xrange(keys.results(bulk.id), since, answered)) <= 5
            check(request.scores(timeout=60), wanted)
        assert len(waiting_jobs(redis)) >= 8
        bulk.cancel()


@pytest.mark.slow
def test_bulk_work_keeps_a_quarter_beside_endless_requests() -> None:
    with simulated_cluster(1, 1.0, QUICK) as cluster:
        client, given = client_of(cluster), pairs(16 * 128)
        had, over = Counter[str](), threading.Event()

        def ask() -> None:
            while not over.is_set():
                client.score(pairs(100))
                had["requests"] += 100

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: had["requests"] >= 1000)
        before = had["requests"]
        check(client.submit(given).scores(timeout=120), given)
        asked = had["requests"] - before
        over.set()
        for thread in threads:
            thread.join()
        assert asked >= len(given) / 4  # requests were there, and came first
        assert len(given) >= (asked + len(given)) / 5


@pytest.mark.slow
def test_two_bulk_runs_get_equal_pairs_though_their_chunks_differ() -> None:
    with simulated_cluster(1, 0.5, QUICK) as cluster:
        done: Counter[str] = Counter()
        runs: list[ScoringRun] = []

        def drive(name: str, run: ScoringRun) -> None:
            try:
                for part in run.tables():
                    done[name] += len(part.table)
            except RunCancelled:
                pass

        threads = []
        for name, chunk in (("first", 256), ("second", 32)):
            runs.append(client_of(cluster, chunk_size=chunk).submit(endless_pairs()))
            threads.append(threading.Thread(target=drive, args=(name, runs[-1])))
            threads[-1].start()
            wait_until(lambda name=name: done[name])  # type: ignore[misc]
        before = done.copy()
        wait_until(lambda: sum(done.values()) - sum(before.values()) > 8000)
        had = done - before
        for run in runs:
            run.cancel()
        for thread in threads:
            thread.join()
        assert 0.6 < had["first"] / had["second"] < 1.7, had


@pytest.mark.slow
def test_a_small_bulk_run_behind_a_large_one_takes_twice_its_time() -> None:
    with simulated_cluster(1, 2.0, QUICK) as cluster:
        client, given = client_of(cluster, chunk_size=8, window="auto"), pairs(1000)
        large = client_of(cluster, chunk_size=8, window=4_000).submit(endless_pairs())
        collector = threading.Thread(target=collect, args=(large,))
        collector.start()
        wait_until(lambda: len(waiting_jobs(cluster.client)) > 2_500)
        before = finished(cluster.client, large.id)
        check(client.submit(given).scores(timeout=120), given)
        had = finished(cluster.client, large.id) - before
        large.cancel()
        collector.join()
        assert had <= 4 * len(given) / 8, had  # a fair half is as many, and what the worker had claimed


@pytest.mark.slow
@pytest.mark.parametrize("kill", [pytest.param(False, id="late"), pytest.param(True, id="killed")])
def test_late_workers_are_given_chunks_and_each_row_is_scored_once(kill: bool) -> None:
    """Shows: a worker is slow."""
    with simulated_cluster(1, 5.0, QUICK if kill else {**QUICK, "RANKMILL_LEASE_SECONDS": "60"}) as cluster:
        given, first = pairs(24 * 100), cast(int, cluster.workers["simulated-0"].pid)
        run = client_of(cluster, chunk_size=100).submit(given)
        wait_until(lambda: len(waiting_jobs(cluster.client)) <= 4)  # the first has claimed most
        os.kill(first, signal.SIGSTOP)  # on a busy machine it could score all before the others listen
        cluster.start(2)
        os.kill(first, signal.SIGCONT)
        if kill:
            wait_until(lambda: finished(cluster.client, run.id) >= 2)
            cluster.workers.pop("simulated-0").kill()
        parts = list(run.tables())
        check(np.concatenate([part.scores.to_numpy() for part in parts]), given)
        by_worker = Counter(part.worker for part in parts)
        assert len(by_worker) >= (2 if kill else 3), by_worker
        assert not cluster.client.zcard("rq:wip:rankmill")
        if not kill:
            assert {part.stats.attempt for part in parts if part.stats} == {1}


def test_a_bulk_chunk_that_requests_overtake_is_the_oldest_job(url: str) -> None:
    client = Client(url, model="demo", queue="aged")
    bulk = client.submit(iter(pairs(3)))
    client.store.redis.hset(f"rq:job:{bulk.id}-0", "created_at", "2020-01-01T00:00:00Z")
    request = client.submit(pairs(3))
    (queue,) = (each for each in read_cluster(client.store.redis).queues if each.name == "aged")
    assert queue.waiting == 2
    assert queue.oldest_seconds is not None
    assert queue.oldest_seconds > 1e6
    bulk.cancel()
    request.cancel()
