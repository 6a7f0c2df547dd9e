"""The waiting lists of runs, and whose turn it is: each script on a real server."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from rq import Queue
from rq.job import Job

from benchmarks.cluster import valkey, wait_until
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.priority import Priority, Tenant, new_run_id
from rankmill.jobs.contract.run import Run, new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import set_aside
from rankmill.jobs.protocol.worker_report import SCORING_FIELD

BOTH: tuple[Priority, Priority] = ("request", "bulk")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as found:
        yield found


@pytest.fixture
def store(url: str) -> RunStore:
    found = Client(url, model="demo").store
    found.redis.flushall()
    return found


@pytest.fixture
def queue(store: RunStore) -> OrderedQueue:
    return store.queue("q")


def put(
    store: RunStore,
    chunks: Iterable[int],
    *,
    tenant: str = "",
    weight: float = 1.0,
    kind: Priority = "bulk",
    pairs: int = 10,
    ttl: int = 3600,
    run: Run | None = None,
) -> Run:
    """Put chunks of a run, a new one unless it is given, into the queue."""
    is_new = run is None
    run = run or new_run(
        ScoreSpec(model="m"), queue="q", ttl=ttl, max_retries=2, priority=kind, tenant=Tenant(tenant, weight)
    )
    store.enqueue(run, {chunk: Payload(b"pairs", pairs) for chunk in chunks}, new=is_new)
    return run


def taken(queue: OrderedQueue, *kinds: Priority, **how: Any) -> str:
    return queue.take(kinds or BOTH, **how).job_id.decode()


def test_chunks_are_taken_in_order_each_once_and_counted(store: RunStore, queue: OrderedQueue) -> None:
    run = put(store, range(5))
    assert queue.count == 5
    found = [queue.take(BOTH) for _ in range(6)]
    assert [each.job_id.decode() for each in found] == [*(f"{run.id}-{at}" for at in range(5)), ""]
    assert [each.waiting for each in found] == [4, 3, 2, 1, 0, 0]
    assert queue.count == 0
    transit = store.redis.lrange(queue.intermediate_queue_key, 0, -1)
    assert [each.decode() for each in transit] == [f"{run.id}-{at}" for at in range(5)]


def test_requests_come_first_unless_bulk_work_is_asked_for_first(
    store: RunStore, queue: OrderedQueue
) -> None:
    bulk, request = put(store, range(3)), put(store, [0, 1], kind="request")
    assert taken(queue) == f"{request.id}-0"
    assert taken(queue, "bulk", "request") == f"{bulk.id}-0"
    assert taken(queue, "bulk") == f"{bulk.id}-1"
    assert taken(queue, "bulk", "request") == f"{bulk.id}-2"
    assert taken(queue, "bulk", "request") == f"{request.id}-1"
    assert taken(queue) == ""


def test_requests_of_a_greedy_tenant_and_jobs_by_name_take_turns(
    store: RunStore, queue: OrderedQueue
) -> None:
    for _ in range(30):
        put(store, [0], kind="request", tenant="greedy")
    modest = put(store, [0], kind="request", tenant="modest")
    store.redis.rpush(queue.key, "by-name", "another")
    first = [taken(queue) for _ in range(4)]
    assert {f"{modest.id}-0", "by-name"} < set(first)


def test_tenants_get_pairs_by_weight_and_runs_of_a_tenant_alike(store: RunStore, queue: OrderedQueue) -> None:
    dice, weights = random.Random(3), {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    sizes, tenants, had, of_runs = dict[str, int](), dict[str, str](), Counter[str](), Counter[str]()
    for tenant, weight in weights.items():
        runs = 20 if tenant == "a" else 2
        for number in range(runs):
            size = 256 if number % 2 else 64
            run = put(store, range(800 // runs), tenant=tenant, weight=weight, pairs=size)
            sizes[run.id], tenants[run.id] = size, tenant
            put(store, range(1000, 1000 + 800 // runs), run=run, pairs=size)
    for _ in range(1200):
        job = taken(queue, "bulk")
        run_id = job.partition("-")[0]
        if dice.random() < 0.03:
            queue.place(store.redis, job, at_front=True)  # a worker hands it back
            continue
        had[tenants[run_id]] += sizes[run_id]
        of_runs[run_id] += sizes[run_id]
    shares = {tenant: had[tenant] / had.total() for tenant in weights}
    for tenant, weight in weights.items():
        assert shares[tenant] == pytest.approx(weight / 8, rel=0.05), shares
    alike = [of_runs[run] for run, tenant in tenants.items() if tenant == "a"]
    assert max(alike) - min(alike) <= 2 * 256


def test_who_comes_late_starts_level_with_the_others(store: RunStore, queue: OrderedQueue) -> None:
    first = put(store, range(100), tenant="a")
    for _ in range(50):
        taken(queue)
    second = put(store, range(100), tenant="b")
    had = Counter(taken(queue).partition("-")[0] for _ in range(20))
    assert abs(had[first.id] - had[second.id]) <= 2
    # and who had nothing waiting for a while gains nothing by that
    store.cancel(second)
    for _ in range(10):
        taken(queue)
    third = put(store, range(100), tenant="b")
    had = Counter(taken(queue).partition("-")[0] for _ in range(20))
    assert abs(had[first.id] - had[third.id]) <= 2


@pytest.mark.parametrize("kind", BOTH)
def test_who_sends_a_chunk_at_a_time_gets_no_more(
    store: RunStore, queue: OrderedQueue, kind: Priority
) -> None:
    runs = [put(store, range(100), tenant=tenant, kind=kind) for tenant in "ab"]
    for sender in runs:
        had = Counter[str]()
        for chunk in range(20):
            had[taken(queue).partition("-")[0]] += 1
            put(store, [1000 + chunk], kind=kind, run=sender)
        assert abs(had[runs[0].id] - had[runs[1].id]) <= 2


def test_runs_that_a_worker_leaves_alone_are_no_obstacle(store: RunStore, queue: OrderedQueue) -> None:
    refused = [put(store, range(30), tenant=tenant) for tenant in "abc"]
    mine = put(store, range(2), tenant="a")
    alone = [run.id for run in refused]
    assert [taken(queue, alone=alone) for _ in range(3)] == [f"{mine.id}-0", f"{mine.id}-1", ""]
    asked = put(store, [0], kind="request", tenant="a")
    other = put(store, [0], kind="request", tenant="a")
    assert taken(queue, alone=[asked.id]) == f"{other.id}-0"
    store.redis.rpush(queue.key, "by-name", f"{mine.id}-1")  # a chunk of bulk work, for a worker that waits
    assert taken(queue, "request", alone=[asked.id, "rby-name"]) == ""
    assert {taken(queue, "request") for _ in range(2)} == {f"{asked.id}-0", "by-name"}
    # who could not be served for long does not come before all others then
    for _ in range(20):
        put(store, range(9), tenant="d")
    for _ in range(100):
        taken(queue, alone=alone)
    of_tenants = Counter(taken(queue).partition("-")[0][-12:] for _ in range(8))
    assert len(of_tenants) == 4, of_tenants


def test_a_chunk_that_is_handed_back_is_next_and_costs_no_turn(store: RunStore, queue: OrderedQueue) -> None:
    run, other = put(store, range(4), tenant="a"), put(store, range(4), tenant="b")
    for _ in range(2):
        taken(queue)
    queue.place(store.redis, f"{run.id}-0", at_front=True)
    had = [taken(queue) for _ in range(3)]
    assert had[0] == f"{run.id}-0"
    assert {each.partition("-")[0] for each in had[1:]} == {run.id, other.id}


def test_a_chunk_that_stock_rq_enqueues_comes_to_its_run(store: RunStore, queue: OrderedQueue) -> None:
    run, request = put(store, range(3)), put(store, [0], kind="request")
    assert [taken(queue) for _ in range(2)] == [f"{request.id}-0", f"{run.id}-0"]
    stock = Queue("q", connection=store.redis)
    for job in (f"{run.id}-0", f"{request.id}-0"):
        stock.push_job_id(job)
    assert queue.count == 4
    assert [taken(queue) for _ in range(4)] == [
        f"{request.id}-0",
        *(f"{run.id}-{chunk}" for chunk in range(3)),
    ]
    assert queue.count == 0


def test_each_worker_that_waits_is_woken_by_one_chunk(store: RunStore, queue: OrderedQueue) -> None:
    assert taken(queue, worker="a", waits=True) == taken(queue, worker="b", waits=True) == ""
    got: list[bytes] = []

    def wait() -> None:
        got.append(store.redis.blmove(queue.key, queue.intermediate_queue_key, 20))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: store.redis.info("clients")["blocked_clients"] == 2)
    run = put(store, range(5), pairs=7)
    for thread in threads:
        thread.join()
    assert sorted(got) == [f"{run.id}-0".encode(), f"{run.id}-1".encode()]
    assert (store.redis.llen(queue.key), queue.count) == (0, 3)
    tenant = run.id[-12:]
    assert store.redis.zscore(keys.turns("q", f"bulk:{tenant}"), run.id) == 0  # that was no turn
    # a third one that has died is in the list of those who wait: its chunk does not stay there
    assert taken(queue, worker="a") == f"{run.id}-2"
    assert taken(queue, "request", worker="c", waits=True) == ""
    put(store, [9], run=run, pairs=7)
    assert store.redis.zcard(keys.waiters("q"))
    assert store.redis.llen(queue.key) > 0
    assert sorted(taken(queue, worker="a") for _ in range(3)) == [f"{run.id}-{at}" for at in (3, 4, 9)]


def test_no_chunk_is_put_where_a_plain_worker_waits(store: RunStore, queue: OrderedQueue) -> None:
    store.redis.sadd("rq:workers:q", "rq:worker:ours", "rq:worker:plain")
    store.redis.hset("rq:worker:ours", mapping={"birth": "x", SCORING_FIELD: 1})
    store.redis.hset("rq:worker:plain", "birth", "x")
    assert taken(queue, worker="ours", waits=True) == ""
    queue.count_waiting()
    run = put(store, [0])
    assert (store.redis.llen(queue.key), queue.count) == (0, 1)
    assert taken(queue, worker="ours", waits=True) == f"{run.id}-0"
    store.redis.delete("rq:worker:plain")
    queue.count_waiting()
    assert taken(queue, worker="ours", waits=True) == ""
    put(store, [1], run=run)
    assert (store.redis.llen(queue.key), queue.count) == (1, 1)


def test_an_idle_worker_is_given_one_chunk_and_counted_once(store: RunStore, queue: OrderedQueue) -> None:
    assert queue.take(BOTH, worker="a", idle=True).idle == 1
    assert queue.take(BOTH, worker="b", idle=True).idle == 2
    assert queue.claim_idle(5) == 2
    assert queue.claim_idle(5) == 0
    assert queue.take(BOTH, worker="a", idle=True).idle == 1
    assert queue.take(BOTH, worker="a").idle == 0  # it has got work elsewhere
    assert queue.take(BOTH, worker="a", idle=True).idle == 1
    put(store, [0])
    assert queue.claim_idle(5) == 0  # the idle worker will take the job that waits
    assert queue.take(["bulk"]).idle == 1


def test_a_request_rings_for_workers_that_are_full_of_bulk_work(store: RunStore, queue: OrderedQueue) -> None:
    put(store, [0])
    assert not store.redis.exists(keys.bell("q"))
    put(store, [0], kind="request")
    assert store.redis.llen(keys.bell("q")) == 1
    put(store, [0, 1], kind="request")
    assert store.redis.llen(keys.bell("q")) == 3  # one worker perhaps has room for one chunk
    while taken(queue, "request"):
        pass
    assert not store.redis.exists(keys.bell("q"))


def test_a_job_that_reached_no_worker_is_put_back_and_wakes_one(store: RunStore, queue: OrderedQueue) -> None:
    run = put(store, range(2), pairs=5)
    job = taken(queue).encode()
    queue.rescue(job, b"seen", 100.0, 5.0)
    assert queue.count == 1  # it was seen for the first time
    assert taken(queue, "request", worker="a", waits=True) == ""
    queue.rescue(job, b"seen", 106.0, 5.0)
    assert store.redis.lrange(queue.key, 0, -1) == [job]  # where the worker waits
    assert [taken(queue), taken(queue)] == [f"{run.id}-0", f"{run.id}-1"]
    queue.rescue(job, b"seen", 112.0, 5.0)
    assert queue.count == 0  # it has left the queue anew, and is seen for the first time again
    store.redis.lrem(queue.intermediate_queue_key, 1, job)  # its worker begins it
    queue.rescue(job, b"seen", 118.0, 5.0)
    assert queue.count == 0


@pytest.mark.parametrize("kind", BOTH)
def test_what_the_server_has_lost_of_the_lists_is_put_back_once(
    store: RunStore, queue: OrderedQueue, kind: Priority
) -> None:
    run = put(store, range(6), kind=kind)
    jobs = [f"{run.id}-{chunk}" for chunk in range(6)]
    assert queue.put_back(jobs) == 0
    assert taken(queue) == jobs[0]
    store.redis.zadd(queue.scheduled_job_registry.key, {jobs[1]: 1})
    store.redis.zadd(queue.started_job_registry.key, {f"{jobs[2]}:execution": 1})
    store.redis.hset(Job.key_for(jobs[3]), "status", "failed")
    store.redis.delete(keys.waiting("q", run.id))
    assert queue.put_back(jobs) == 2
    assert queue.put_back(jobs[4:]) == 0
    queue.count_waiting()
    assert queue.count == 2
    assert [taken(queue) for _ in range(3)] == [jobs[4], jobs[5], ""]


@pytest.mark.parametrize("kind", BOTH)
def test_lists_are_read_only_until_all_jobs_are_found(
    store: RunStore, queue: OrderedQueue, kind: Priority
) -> None:
    run = put(store, range(2000), kind=kind)
    scored = taken(queue, kind)
    store.redis.rpush(queue.key, *(f"by-name-{number}" for number in range(5000)))
    store.redis.lrem(queue.intermediate_queue_key, 1, scored)
    store.redis.zadd(queue.started_job_registry.key, {f"{scored}:execution": 1})
    store.redis.config_resetstat()
    assert queue.put_back([f"{run.id}-1", f"{run.id}-2"]) == 0
    assert store.redis.info("commandstats")["cmdstat_lrange"]["calls"] == 1
    assert queue.put_back([scored]) == 0
    assert store.redis.info("commandstats")["cmdstat_lrange"]["calls"] == 1 + 2  # none in RQ's list


@pytest.mark.parametrize("scope", ["turns", "level"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_list_whose_turn_is_lost_gets_it_back(
    store: RunStore, queue: OrderedQueue, kind: Priority, scope: str
) -> None:
    run, other = put(store, range(30), kind=kind, tenant="a"), put(store, range(30), kind=kind, tenant="b")
    for _ in range(10):
        taken(queue)
    tenants = [each.id[-12:] for each in (run, other)]
    scopes = [kind, *(f"bulk:{tenant}" for tenant in tenants)]
    key = keys.turns if scope == "turns" else keys.level
    assert store.redis.delete(keys.waits("q"), *(key("q", each) for each in scopes)) > 1
    for each in (run, other):
        store.put_back(each, range(20, 30))
    found = Counter(taken(queue).partition("-")[0] for _ in range(10))
    assert found == {run.id: 5, other.id: 5}
    queue.count_waiting()
    assert queue.count == 40


def test_what_waits_is_told_by_kind_and_tenant(store: RunStore, queue: OrderedQueue) -> None:
    bulk = put(store, range(3), tenant="a")
    done = put(store, [0], tenant="b")
    put(store, range(2), kind="request", tenant="c")
    store.redis.rpush(queue.key, "by-name")
    assert taken(queue, "bulk", alone=[bulk.id]) == f"{done.id}-0"
    assert queue.count_waiting() == (3, {bulk.id[-12:]})


@pytest.mark.parametrize("kind", BOTH)
def test_a_cancelled_runs_chunks_are_not_taken_and_others_are(
    store: RunStore, queue: OrderedQueue, kind: Priority
) -> None:
    run, other = put(store, range(1200), kind=kind), put(store, range(3), kind=kind)
    assert taken(queue) in {f"{run.id}-0", f"{other.id}-0"}
    waiting = queue.count
    removed = store.cancel(run)
    assert waiting - removed == queue.count == 3 - (removed == 1200)
    left = [taken(queue) for _ in range(queue.count)]
    assert all(each.startswith(other.id) for each in left)
    assert taken(queue) == ""
    assert not list(store.redis.scan_iter(f"rq:job:{run.id}-[2-9]*"))
    assert not list(store.redis.scan_iter(f"rankmill:run:{run.id}:pairs:*"))


def test_a_chunk_left_for_an_idle_worker_is_removed_with_its_run(
    store: RunStore, queue: OrderedQueue
) -> None:
    assert taken(queue, worker="a", waits=True) == ""
    run = put(store, range(3))
    assert store.redis.llen(queue.key) == 1
    assert store.cancel(run) == 3
    assert (store.redis.llen(queue.key), queue.count) == (0, 0)
    assert not list(store.redis.scan_iter(f"rq:job:{run.id}*"))


def test_every_key_of_a_queue_expires_and_none_before_the_jobs(store: RunStore, queue: OrderedQueue) -> None:
    taken(queue, worker="a", idle=True, waits=True)
    runs = [put(store, range(3), tenant="a"), put(store, [0, 1], kind="request", tenant="b")]
    put(store, [0], kind="request", tenant="b", ttl=60)  # in the list of the other
    for _ in range(3):
        taken(queue, worker="b", idle=True)
    queue.place(store.redis, f"{runs[0].id}-0", at_front=True)
    queue.count_waiting()
    left = {key.decode(): store.redis.ttl(key) for key in store.redis.scan_iter("rankmill:queue:*")}
    assert all(seconds > 0 for seconds in left.values()), left
    assert all(seconds >= 3590 for key, seconds in left.items() if "waiting:" in key or "turns:" in key), left


def test_a_damaged_job_or_a_foreign_id_stops_nobody(store: RunStore, queue: OrderedQueue) -> None:
    run = put(store, range(3))
    store.redis.delete(Job.key_for(f"{run.id}-0"))
    store.redis.rpush(Job.key_for(f"{run.id}-0"), "no hash")
    store.redis.hset(Job.key_for(f"{run.id}-1"), mapping={"pairs": "nan", "weight": "-1"})
    store.redis.lpush(queue.key, b"\xff\xfe", "x-1")
    found = [taken_raw for _ in range(5) if (taken_raw := queue.take(BOTH).job_id)]
    assert set(found) == {b"\xff\xfe", b"x-1", *(f"{run.id}-{chunk}".encode() for chunk in range(3))}
    for raw_id in found:
        set_aside(queue, raw_id, "it is damaged")
    assert not store.redis.lrange(queue.intermediate_queue_key, 0, -1)  # so none is put back


def test_taking_a_job_costs_the_same_however_many_wait(store: RunStore, queue: OrderedQueue) -> None:
    def cost() -> float:
        for _ in range(20):
            taken(queue, "bulk")
        costs = []
        for _ in range(10):  # a busy machine makes the server wait in some of them
            store.redis.config_resetstat()
            for _ in range(20):
                taken(queue, "bulk")
            costs.append(float(store.redis.info("commandstats")["cmdstat_evalsha"]["usec_per_call"]))
        return min(costs)

    put(store, range(250))
    small = cost()
    for number in range(100):
        run = new_run_id("bulk", f"{number % 10}")
        store.redis.rpush(keys.waiting("q", run), *(f"{run}-{chunk}" for chunk in range(1000)))
        queue.put_back([f"{run}-0"])
    assert cost() < 3 * small  # benchmarks/waiting.py measures it


def test_a_cancelled_long_run_keeps_nobody_waiting(store: RunStore, queue: OrderedQueue) -> None:
    run = put(store, [0])
    for first in range(1, 20_001, 5000):
        queue.add(store.redis, [f"{run.id}-{chunk}" for chunk in range(first, first + 5000)])
    began = time.monotonic()
    assert queue.remove_run(run.id, range(20_001)) == 20_001
    assert time.monotonic() - began < 10
