"""Requests before bulk work, runs that share evenly, claims handed on: real servers, workers that sleep."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from rankmill.jobs.contract.priority import GROUP, Priority, group_of, new_run_id, run_id_of_request
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.ordered_queue import LOOK_AT, OrderedQueue
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.system import system
from rankmill.producer.client.runs import ScoringRun
from rankmill.workers.queue.claim_order import ClaimOrder
from rankmill.workers.queue.refusals import Refusals

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


def ids(queue: OrderedQueue) -> list[str]:
    """The waiting jobs, the next first."""
    connection: Any = queue.connection
    return [raw.decode() for raw in connection.lrange(queue.key, 0, -1)]


def check(found: np.ndarray, given: list[tuple[str, str]]) -> None:
    """Each pair has its own score, once."""
    np.testing.assert_allclose(found, [simulated_score(*pair) for pair in given], atol=1e-4)


Put = st.tuples(st.just("put"), st.sampled_from(["request", "bulk"]), st.booleans())
Step = st.one_of(Put, Put, st.tuples(st.just("take"), st.sampled_from(["request", "bulk"]), st.just(0)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(Step, max_size=40))
def test_a_queue_is_always_requests_then_bulk_work_each_in_order(
    url: str, steps: list[tuple[str, Priority, bool]]
) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("tried")
    queue.connection.delete(queue.key, queue.intermediate_queue_key)
    lists: dict[Priority, list[str]] = {"request": [], "bulk": []}
    for number, (step, kind, at_front) in enumerate(steps):
        if step == "put":
            job = keys.job_id("rab" if kind == "request" else "ab", number)
            queue.push_job_id(job, at_front=at_front)
            lists[kind].insert(0 if at_front else len(lists[kind]), job)
        else:
            taken = queue.take([kind])
            expected = lists[kind].pop(0) if lists[kind] else ""
            assert taken.job_id == expected.encode()
            assert taken.waiting == len(lists["request"]) + len(lists["bulk"])
        assert ids(queue) == lists["request"] + lists["bulk"]


def test_requests_that_rq_alone_put_behind_bulk_work_are_brought_before_it(url: str) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("mixed")
    mixed = ["ab-1", "ra-1", "ab-2", "17f5d1f6-0b5c-4e6c-9a2e-1f2e3d4c5b6a", "ab-3", "ra-2"]
    queue.connection.rpush(queue.key, *mixed)
    assert queue.sort() == 3
    assert ids(queue) == [mixed[1], mixed[3], mixed[5], mixed[0], mixed[2], mixed[4]]
    assert queue.sort() == 0


def test_a_worker_that_looks_for_a_job_finds_requests_that_rq_alone_put_behind_bulk_work(url: str) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("by-name")
    queue.connection.rpush(queue.key, "ab-1", "ab-2", "one-by-name", "ab-3", "two-by-name")
    assert queue.take(["request", "bulk"], bring=False).job_id == b"ab-1"  # it refuses some models
    assert queue.take(["request"]).job_id == b"one-by-name"
    assert ids(queue) == ["two-by-name", "ab-2", "ab-3"]


def test_a_run_behind_many_jobs_of_another_gets_its_half(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims as a worker makes them; 125 jobs of a run are behind 20,000 of another, and before more."""
    monkeypatch.setattr(system, "monotonic", lambda: 0.0)  # how far each claim looks follows the time
    queue = RunStore(Client(url, model="demo").store.redis).queue("long")
    connection: Any = queue.connection
    large, small = new_run_id("bulk"), new_run_id("bulk")
    chunks = {large: range(0, 200_000, 8), small: range(0, 1000, 8)}
    jobs = [keys.job_id(large, chunk) for chunk in chunks[large]]
    behind = [keys.job_id(small, chunk) for chunk in chunks[small]]
    connection.rpush(queue.key, *jobs[:20_000], *behind, *jobs[20_000:])
    order, taken = ClaimOrder(4096), list[str]()
    order.began(large, 8)
    while not set(behind) <= set(taken):
        found = queue.take(["bulk"], order.names, further=order.further(queue.name))
        order.saw({queue.name: found.waiting}, workers=1)
        taken.append(found.job_id.decode())
        order.began(taken[-1].partition("-")[0], 8)
    assert len(taken) < 1500  # 250 are a fair half; and it takes some until the run is found
    assert [job for job in taken if job in behind] == behind  # in their order
    early = [job for job in taken if job not in behind]
    assert early == jobs[: len(early)]
    left = ids(queue)
    assert sorted([*left, *taken]) == sorted(jobs + behind)  # each once


def test_requests_stay_before_bulk_jobs_that_a_worker_brings_from_far_behind(url: str) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("far")
    connection: Any = queue.connection
    large = [keys.job_id("aa", chunk) for chunk in range(1000)]
    small = [keys.job_id("bb", chunk) for chunk in range(100)]
    connection.rpush(queue.key, "ra-1", "ra-2", *large[:500], *small, *large[500:], "by-name")
    # a job that RQ alone has put behind bulk work fills no place in the middle, where nobody looks for it
    assert queue.take(["bulk"], ["aa"], further=(450, 400)).job_id == large[0].encode()
    assert connection.rpop(queue.key) == b"by-name"
    assert queue.take(["bulk"], ["aa"], further=(450, 400)).job_id == small[0].encode()
    part = LOOK_AT // 2
    assert ids(queue)[: 2 + part] == ["ra-1", "ra-2", *small[1:part], large[1]]
    assert queue.take(["bulk"], ["aa", "bb"], further=(500, 400)).job_id == large[1].encode()
    assert queue.take(["request"]).job_id == b"ra-1"
    assert sorted(ids(queue)) == sorted(["ra-2", *large[2:], *small[1:]])


@pytest.mark.parametrize("runs", [3, 12])
def test_many_runs_in_one_long_queue_share_it(url: str, runs: int) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue(f"{runs}-runs")
    connection: Any = queue.connection
    known = [new_run_id("bulk") for _ in range(runs)]
    for run in known:
        connection.rpush(queue.key, *(keys.job_id(run, chunk) for chunk in range(0, 80_000, 8)))
    order, had = ClaimOrder(4096), Counter[str]()
    for _ in range(3000):
        found = queue.take(["bulk"], order.names, further=order.further(queue.name))
        order.saw({queue.name: found.waiting}, workers=1)
        run = found.job_id.decode().partition("-")[0]
        order.began(run, 8)
        had[run] += 1
    assert min(had[run] for run in known) > 3000 / runs / 4, had


def test_an_idle_worker_is_given_one_chunk_and_counted_once(url: str) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("quiet")
    assert queue.take(["request", "bulk"], worker="a", idle=True).idle == 1
    assert queue.take(["request", "bulk"], worker="b", idle=True).idle == 2
    assert queue.claim_idle(5) == 2
    assert queue.claim_idle(5) == 0
    assert queue.take(["request", "bulk"], worker="a", idle=True).idle == 1
    assert queue.take(["request", "bulk"], worker="a").idle == 0  # it has got work elsewhere
    assert queue.take(["request", "bulk"], worker="a", idle=True).idle == 1
    queue.push_job_id("ab-1")
    assert queue.claim_idle(5) == 0  # the idle worker will take the job that waits
    assert queue.take(["bulk"]).idle == 1
    assert all(queue.connection.ttl(key) > 0 for key in queue.connection.scan_iter("rankmill:queue:*"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which goes on when the test says so."""
    now = [0.0]
    monkeypatch.setattr(system, "monotonic", lambda: now[0])
    return now


def claimed(
    clock: list[float],
    queue: OrderedQueue,
    kind: Priority,
    jobs: int,
    weights: dict[str, float],
    before: int = 0,
) -> Counter[str]:
    """Jobs that a worker takes, four a second, by the group of their tenant, after so many `before`."""
    order, had = ClaimOrder(4096), Counter[str]()
    for number in range(before + jobs):
        clock[0] += 0.25
        found = queue.take([kind], order.names, further=order.further(queue.name))
        order.saw({queue.name: found.waiting}, workers=1)
        run = found.job_id.decode().partition("-")[0]
        group = run[-GROUP:]
        order.began(run, 8, weights.get(group, 1.0))
        had[group] += number >= before
    return had


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_tenant_with_one_run_gets_its_part_beside_one_with_two_hundred(
    url: str, weight: float, clock: list[float]
) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue(f"tenants-{weight}")
    connection: Any = queue.connection
    for _ in range(200):
        run = new_run_id("bulk", "greedy")
        connection.rpush(queue.key, *(keys.job_id(run, chunk) for chunk in range(0, 800, 8)))
    mine = new_run_id("bulk", "modest")
    connection.rpush(queue.key, *(keys.job_id(mine, chunk) for chunk in range(0, 16_000, 8)))
    until_found = 20_000 // LOOK_AT + 50  # its jobs are behind all others
    had = claimed(clock, queue, "bulk", 2000, {group_of("modest"): weight}, until_found)
    ratio = had[group_of("modest")] / had[group_of("greedy")]
    assert ratio == pytest.approx(weight, rel=0.1), had


def test_requests_of_a_greedy_tenant_do_not_take_the_others_place(url: str, clock: list[float]) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("greedy-requests")
    for _ in range(100):
        queue.push_job_id(keys.job_id(new_run_id("request", "greedy"), 0))
    modest = [keys.job_id(new_run_id("request", "modest"), 0) for _ in range(5)]
    for job in modest:
        queue.push_job_id(job)
    had = claimed(clock, queue, "request", 10, {})
    assert had == {group_of("greedy"): 5, group_of("modest"): 5}
    assert set(modest).isdisjoint(ids(queue))


def test_a_run_that_a_worker_refuses_is_last_whoever_its_tenant_is(url: str) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue("refused-tenant")
    refused, other = new_run_id("bulk", "a"), new_run_id("bulk", "b")
    for run in (refused, other):
        cast("Any", queue.connection).rpush(queue.key, keys.job_id(run, 0))
    order = ClaimOrder(4096)
    order.began(other, 1000)
    order.refused(refused)
    assert queue.take(["bulk"], order.names).job_id.decode().startswith(other)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_request_that_a_worker_refuses_keeps_no_other_from_it(
    url: str, clock: list[float], by_name: bool
) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue(f"refused-request-{by_name}")
    theirs, mine = new_run_id("request", "a"), new_run_id("request", "b")
    refused = "one-by-name" if by_name else keys.job_id(theirs, 0)
    queue.push_job_id(refused)
    queue.push_job_id(keys.job_id(mine, 0))
    order = ClaimOrder(4096)
    order.began(mine, 1000)  # so the other has had less
    assert queue.take(["request"], order.names).job_id == refused.encode()
    order.refused(run_id_of_request(refused) if by_name else theirs)
    queue.push_job_id(refused)
    clock[0] += 1.1
    assert queue.take(["request"], order.names).job_id == keys.job_id(mine, 0).encode()
    assert queue.take(["request"], order.names).job_id == refused.encode()


@pytest.mark.parametrize("kind", ["request", "bulk"])
def test_what_a_worker_has_just_refused_it_leaves_alone_and_finds_what_lies_behind(
    url: str, clock: list[float], kind: Priority
) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue(f"left-alone-{kind}")
    connection: Any = queue.connection
    refused, mine = new_run_id(kind, "a"), new_run_id(kind, "b")
    connection.rpush(queue.key, *(keys.job_id(refused, chunk) for chunk in range(600)))
    order = ClaimOrder(4096)

    def looks() -> str:
        taken = queue.take([kind], order.names, bring=False, further=order.further(queue.name))
        order.saw({queue.name: taken.waiting}, taken.workers)
        clock[0] += 0.1
        return taken.job_id.decode()

    connection.rpush(queue.key, looks())
    order.refused(refused)
    assert order.leaves_some
    assert not any(looks() for _ in range(5))
    connection.rpush(queue.key, keys.job_id(mine, 0))
    assert any(looks().startswith(mine) for _ in range(3))
    clock[0] += 1.1
    assert not order.leaves_some
    assert looks().startswith(refused)  # it tries again


@pytest.mark.parametrize("kind", ["request", "bulk"])
def test_a_worker_that_refuses_a_hundred_runs_comes_to_the_one_that_it_can_score(
    url: str, kind: Priority, clock: list[float]
) -> None:
    queue = RunStore(Client(url, model="demo").store.redis).queue(f"hundred-{kind}")
    connection: Any = queue.connection
    for _ in range(100):
        connection.rpush(queue.key, keys.job_id(new_run_id(kind, "a"), 0))
    mine = new_run_id(kind, "b")
    order, refusals = ClaimOrder(4096), Refusals()
    order.began(mine, 1000)  # so the others have had less

    def looks(seconds: float) -> bool:
        until = clock[0] + seconds
        while clock[0] < until:
            job = queue.take([kind], order.names, bring=False).job_id.decode()
            if job.startswith(mine):
                return True
            if not job:
                clock[0] += 0.1
                continue
            order.refused(job.partition("-")[0])
            connection.rpush(queue.key, job)
            refusals.sent_back(job)
            clock[0] += 0.004 + refusals.rest
        return False

    looks(15.0)  # now it rests for as long as it ever does
    connection.rpush(queue.key, keys.job_id(mine, 0))
    assert looks(5.0)


def test_small_runs_of_known_size_are_requests_unless_the_caller_says_otherwise(url: str) -> None:
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
    with pytest.raises(ConfigError, match="priority: 'soon' is none; it is request or bulk"):
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
            assert len(redis.xrange(keys.results(bulk.id), since, answered)) <= 2
            check(request.scores(timeout=60), wanted)
        assert redis.llen("rq:queue:rankmill") >= 8
        bulk.cancel()


@pytest.mark.slow
def test_bulk_work_keeps_a_fifth_beside_endless_requests() -> None:
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
def test_a_small_bulk_run_behind_a_large_window_of_small_chunks_takes_twice_its_time() -> None:
    with simulated_cluster(1, 2.0, QUICK) as cluster:
        client, given = client_of(cluster, chunk_size=8, window="auto"), pairs(1000)
        large = client_of(cluster, chunk_size=8, window=4_000).submit(endless_pairs())
        collector = threading.Thread(target=collect, args=(large,))
        collector.start()
        wait_until(lambda: cluster.client.llen("rq:queue:rankmill") > 2_500)
        before = finished(cluster.client, large.id)
        check(client.submit(given).scores(timeout=120), given)
        had = finished(cluster.client, large.id) - before
        large.cancel()
        collector.join()
        assert had <= 4 * len(given) / 8, had  # a fair half is as many, and what the worker had claimed


@pytest.mark.slow
@pytest.mark.parametrize("kill", [pytest.param(False, id="late"), pytest.param(True, id="killed")])
def test_workers_that_come_late_are_given_chunks_and_each_row_is_scored_once(kill: bool) -> None:
    with simulated_cluster(1, 10.0, QUICK if kill else {**QUICK, "RANKMILL_LEASE_SECONDS": "60"}) as cluster:
        given, first = pairs(12 * 100), cast(int, cluster.workers["simulated-0"].pid)
        run = client_of(cluster, chunk_size=100).submit(given)
        wait_until(lambda: cluster.client.llen("rq:queue:rankmill") <= 4)  # the first has claimed most
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


def test_the_oldest_job_of_a_queue_is_the_bulk_chunk_that_requests_overtake(url: str) -> None:
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


def test_workers_of_the_release_before_score_requests_first() -> None:
    """They pop RQ's list from its front, and know nothing of priorities."""
    with valkey() as url:
        client = Client(url, model="demo", chunk_size=10)
        bulk = client.submit(iter(pairs(50)))
        requests = [client.submit(pairs(5)) for _ in range(2)]
        queue = OrderedQueue("rankmill", connection=client.store.redis)
        taken = [client.store.redis.lmove(queue.key, queue.intermediate_queue_key).decode() for _ in range(7)]
        assert taken[:2] == [f"{run.id}-0" for run in requests]
        assert taken[2:] == [f"{bulk.id}-{first}" for first in range(0, 50, 10)]
        # what they put back, and what was lost between a queue and a worker, is in order again
        client.store.redis.lpush(queue.key, taken[2])
        client.store.redis.rpush(queue.key, taken[0])
        queue.push_job_id(taken[1], at_front=True)
        queue.sort()
        assert ids(queue) == [taken[1], taken[0], taken[2]]
