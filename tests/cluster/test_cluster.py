"""What is seen of a cluster from outside: queues, workers, runs."""

from __future__ import annotations

import io
import itertools
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
from rich.console import Console
from rq.utils import utcformat

from rankmill import Client, ScoringRun
from rankmill.cluster.snapshot import Snapshot, WorkerState, read_cluster
from rankmill.cluster.tables import Overview
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunCancelled
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.run import Progress, RowError
from rankmill.jobs.protocol.queues import UNUSED_SECONDS
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.system import system
from tests.conftest import QUICK_LEASE, Server, StartWorker, wait_for
from tests.harness.environ import SIMULATED
from tests.harness.runs import stored_run


def worker_named(cluster: Snapshot, name: str) -> WorkerState | None:
    return next((worker for worker in cluster.workers if worker.name == name), None)


def read(run: ScoringRun) -> None:
    """Take the results until the run is cancelled."""
    with suppress(RunCancelled):
        run.scores()


def test_a_cluster_at_work_is_seen_as_it_is(server: Server, workers: StartWorker) -> None:
    client = Client(server.url, model="demo", chunk_size=64, window=8)
    pairs: list[tuple[str, str | None]] = [("big cat", "the moon " * 40)] * 200_000
    pairs[3] = ("big cat", None)
    run = client.submit(pairs)
    before = read_cluster(server.client)
    (queue,) = before.queues
    assert (queue.name, queue.waiting, queue.started, queue.workers) == ("rankmill", 8, 0, 0)
    assert queue.oldest_seconds is not None
    (seen,) = before.runs
    assert (seen.id, seen.queue, seen.model) == (run.id, "rankmill", "demo")
    assert (seen.rows, seen.rows_done, seen.seconds_left, before.runs_total) == (200_000, 0, None, 1)
    workers(name="w1", worker_class=SIMULATED, environ={"RANKMILL_CLAIM_AHEAD": "64"})
    reader = threading.Thread(target=read, args=(run,))
    reader.start()
    found: list[Snapshot] = []

    def at_work() -> bool:
        found.append(read_cluster(server.client))
        (worker,), runs = found[-1].workers, found[-1].runs
        under_way = bool(runs) and 3 * 64 <= runs[0].rows_done < 200_000 and runs[0].seconds_left is not None
        return worker.state == "busy" and found[-1].queues[0].started > 0 and under_way

    wait_for(at_work)
    errors, damaged = client.store.row_errors(run.id)
    assert damaged == 0
    unkept = [key for key in server.client.scan_iter("rankmill:*") if server.client.ttl(key) == -1]
    (worker,) = found[-1].workers
    assert (worker.name, worker.queues, found[-1].queues[0].workers) == ("w1", ("rankmill",), 1)
    assert worker.report
    assert worker.report.device == "cpu"
    assert found[-1].runs[0].row_errors == 1
    assert errors == [RowError(row=3, error="passage is null", attempts=1, worker="w1")]
    assert not unkept
    run.cancel()
    reader.join()
    wait_for(lambda: (found := worker_named(read_cluster(server.client), "w1")) and found.state == "idle")
    after = read_cluster(server.client)
    assert (after.runs, after.runs_total, after.queues[0].waiting) == ((), 0, 0)
    assert not list(server.client.scan_iter("rankmill:run*"))


def test_a_killed_worker_is_lost_then_gone_and_others_are_foreign(
    server: Server, workers: StartWorker
) -> None:
    """Shows: a worker is killed, or its host is gone."""
    killed = workers(name="mine", environ=QUICK_LEASE)
    workers(name="other", worker_class="rq.SimpleWorker", ready=False)
    stopped = workers(name="stopped")
    wait_for(lambda: worker_named(read_cluster(server.client), "other"))
    killed.kill()
    stopped.terminate()
    stopped.wait(timeout=30)

    def state(name: str) -> str | None:
        found = worker_named(read_cluster(server.client), name)
        return found.state if found else None

    wait_for(lambda: state("mine") == "lost")
    assert state("other") == "foreign"
    assert state("stopped") is None
    assert 0 < server.client.ttl("rq:worker:mine") < 900
    server.client.delete("rq:worker:mine")  # as its expiry does
    assert state("mine") is None


def test_workers_are_whole_again_after_the_server_has_lost_its_data(
    server: Server, workers: StartWorker
) -> None:
    workers(name="mine", environ=QUICK_LEASE)
    server.client.flushall()

    def is_whole() -> bool:
        found = worker_named(read_cluster(server.client), "mine")
        return bool(found and (found.queues, found.state) == (("rankmill",), "idle"))

    wait_for(is_whole)  # a heartbeat in progress may have written a part of it


def test_a_run_cancelled_elsewhere_ends_its_producer(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=1, window=8)
    run = client.submit((f"cat {n}", "moon") for n in itertools.count())
    other = RunStore(redis.Redis.from_url(server.url))
    (found,) = other.find(run.id[:8])
    known = other.load(found)
    assert known
    assert other.cancel(known) == 8
    left = {key for key in server.client.scan_iter("*") if run.id.encode() in key}
    assert left == {keys.cancelled(run.id).encode()}
    assert all(server.client.ttl(key) > 0 for key in left)
    with pytest.raises(RunCancelled):
        run.scores(timeout=60)
    assert not [key for key in server.client.scan_iter("*") if run.id.encode() in key]
    assert not server.client.exists(keys.runs())


def test_thousands_of_runs_are_paged_and_expired_ones_are_not_shown() -> None:
    client = fakeredis.FakeRedis()
    store = RunStore(client)
    made = [stored_run(store, ttl=60 + number, rows=9) for number in range(230)]
    pages = [read_cluster(client, page=page, page_size=100) for page in range(3)]
    assert [len(page.runs) for page in pages] == [100, 100, 30]
    assert {run.id for page in pages for run in page.runs} == {run.id for run in made}
    assert pages[0].runs[0].id == made[-1].id  # the last that was worked on
    assert pages[2].runs_total == 230
    client.zadd(keys.runs(), {made[0].id: time.time() - 1})
    assert read_cluster(client).runs_total == 229
    stored_run(store)
    assert client.zscore(keys.runs(), made[0].id) is None


def test_a_look_takes_the_same_round_trips_however_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fakeredis.FakeRedis()
    store = RunStore(client)
    sent: list[object] = []
    execute = redis.client.Pipeline.execute
    execute_alone: Any = redis.Redis.execute_command

    def counted(pipe: redis.client.Pipeline, raise_on_error: bool = True) -> object:
        if pipe.connection_pool is client.connection_pool:
            sent.append(pipe)
        return execute(pipe, raise_on_error)

    def counted_alone(single: redis.Redis, *command: Any, **options: Any) -> object:
        if single.connection_pool is client.connection_pool:
            sent.append(command)
        return execute_alone(single, *command, **options)

    monkeypatch.setattr(redis.client.Pipeline, "execute", counted)
    monkeypatch.setattr(redis.Redis, "execute_command", counted_alone)
    for runs in (1, 40):
        for _ in range(runs):
            store.enqueue(stored_run(store), {0: Payload(b"pairs", 1)})
        sent.clear()
        read_cluster(client)
        assert len(sent) == 14


def test_a_queue_that_nobody_has_used_for_a_day_leaves_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fakeredis.FakeRedis()
    stored_run(RunStore(client), queue="new")
    for name in ("old", "full", "served"):
        client.sadd("rq:queues", f"rq:queue:{name}")
    client.zadd(keys.queues(), {"old": time.time() - UNUSED_SECONDS - 1})
    client.rpush("rq:queue:full", "job")
    client.sadd("rq:workers", "rq:worker:w")
    client.hset("rq:worker:w", mapping={"birth": "2026-01-01T00:00:00.000000Z", "queues": "served"})
    announce_worker(client, "w", WorkerReport(device="cpu", started=0, beat=0), 60)
    assert [queue.name for queue in read_cluster(client).queues] == ["full", "new", "served"]
    assert 0 < client.ttl(keys.queues()) <= UNUSED_SECONDS
    monkeypatch.setattr(system, "now", lambda: 2e9)
    stored_run(RunStore(client), queue="later")
    assert client.zrange(keys.queues(), 0, -1) == [b"later"]


def test_what_another_release_wrote_does_not_break_the_view() -> None:
    client = fakeredis.FakeRedis()
    store = RunStore(client)
    old, new = (stored_run(store) for _ in range(2))
    client.hset(keys.run(old.id), "format", 99)
    client.sadd("rq:workers", "rq:worker:old")
    client.set(keys.worker("old"), '{"device": 7}', ex=60)
    seen = read_cluster(client)
    assert [run.id for run in seen.runs] == [new.id]
    assert [(worker.name, worker.state, worker.report) for worker in seen.workers] == [("old", "idle", None)]


def test_refusals_of_workers_are_shown_whatever_is_in_them() -> None:
    client = fakeredis.FakeRedis()
    client.sadd("rq:workers", "rq:worker:w")
    report = WorkerReport(
        device="cpu",
        started=0,
        beat=0,
        refusals=("no\x1b[31m model" + "x" * 5000, "b", "c"),
    )
    announce_worker(client, "w", report, 60)
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(Overview(read_cluster(client), 10))
    found = console.export_text()
    assert "Worker w leaves chunks to other workers: no\N{REPLACEMENT CHARACTER}[31m model" in found
    assert "(and 2 more)" in found
    assert "\x1b" not in found
    assert found.count("x") < 400


def test_speed_counts_from_the_first_result_of_this_run() -> None:
    assert Progress(rows=50, since_rows=50, since=10, at=10).rows_per_second(10) is None
    assert Progress(rows=150, since_rows=50, since=10, at=15).rows_per_second(15) == 20


def test_a_run_without_results_has_no_speed_any_more() -> None:
    brief, long = Progress(rows=100, since=10, at=15), Progress(rows=100, since=10, at=110)
    assert [brief.rows_per_second(at) for at in (45, 46)] == [20, None]
    assert [long.rows_per_second(at) for at in (210, 211)] == [1, None]
    assert brief.seconds_left(200, 46) is None


def test_a_run_shows_how_many_of_its_chunks_wait() -> None:
    store = RunStore(fakeredis.FakeRedis())
    run = stored_run(store)
    store.enqueue(run, {chunk: Payload(b"pairs", 1) for chunk in range(3)})
    store.queue(run.queue).take(["bulk"])
    seen = read_cluster(store.redis)
    assert ([each.waiting for each in seen.runs], [each.waiting for each in seen.queues]) == ([2], [2])
    store.redis.rpush(f"rq:queue:{run.queue}", keys.job_id(run.id, 3), "odd")
    seen = read_cluster(store.redis)
    assert ([each.waiting for each in seen.runs], [each.waiting for each in seen.queues]) == ([3], [4])


@pytest.mark.parametrize("scope", ["request", "bulk", "bulk:t"])
def test_the_oldest_job_is_looked_for_in_256_lists(scope: str) -> None:
    client = fakeredis.FakeRedis()
    names = [f"{place:03}" for place in range(257)]
    client.zadd(keys.turns("q", scope), dict.fromkeys(names, 0))
    if scope == "bulk":
        for name in names:
            client.zadd(keys.turns("q", f"bulk:{name}"), {name: 0})
    elif scope == "bulk:t":
        client.zadd(keys.turns("q", "bulk"), {"t": 0})
    of = keys.waiting_requests if scope == "request" else keys.waiting
    for name, born in ((names[-2], time.time() - 60), (names[-1], 1)):
        client.rpush(of("q", name), name)
        client.hset(f"rq:job:{name}", "created_at", utcformat(datetime.fromtimestamp(born, UTC)))
    client.set(keys.waits("q"), 2)
    client.sadd("rq:queues", "rq:queue:q")
    (queue,) = read_cluster(client).queues
    assert queue.oldest_seconds == pytest.approx(60, abs=30)


@pytest.mark.parametrize("width", [80, 140])
def test_forty_workers_fit_into_24_lines_those_in_trouble_first(width: int) -> None:
    client = fakeredis.FakeRedis()
    store = RunStore(client)
    for _ in range(7):
        store.enqueue(stored_run(store), {0: Payload(b"pairs", 1)})
    for number in range(1, 41):
        name = f"box.cpu.{number}"
        client.sadd("rq:workers", f"rq:worker:{name}")
        born = {"birth": "2026-01-01T00:00:00.000000Z", "queues": "q", "state": "busy"}
        client.hset(f"rq:worker:{name}", mapping=born)  # type: ignore[arg-type]
        refusals = ("no such model",) if number == 33 else ()
        report = WorkerReport(device="cpu", started=0, beat=time.time(), refusals=refusals)
        announce_worker(client, name, report, 60)
    console = Console(width=width, height=24, force_terminal=True, record=True, file=io.StringIO())
    console.print(Overview(read_cluster(client), 5))
    lines = console.export_text().splitlines()
    assert len(lines) < 24
    assert "box.cpu.33 leaves chunks" in lines[0]
    shown = [line.split()[0] for line in lines if line.startswith("box.cpu.")]
    assert shown[:3] == ["box.cpu.33", "box.cpu.1", "box.cpu.2"]
    assert f"and {40 - len(shown)} busy: rankmill workers" in lines
    everything = Console(width=200, record=True, file=io.StringIO())
    everything.print(Overview(read_cluster(client), 5))
    assert everything.export_text().count("\nbox.cpu.") == 40


def test_workers_are_listed_whatever_their_names_are() -> None:
    client = fakeredis.FakeRedis()
    names = ["box.10", "box.2", "box.\N{SUPERSCRIPT TWO}", "box." + "7" * 5000]
    for name in names:
        client.sadd("rq:workers", f"rq:worker:{name}")
        announce_worker(client, name, WorkerReport(device="cpu", started=0, beat=time.time()), 60)
    console = Console(width=6000, record=True, file=io.StringIO())
    console.print(Overview(read_cluster(client), 5))
    shown = [line.split()[0] for line in console.export_text().splitlines() if line.startswith("box.")]
    assert sorted(shown) == sorted(names)
    assert shown.index("box.2") < shown.index("box.10") < shown.index(names[-1])
