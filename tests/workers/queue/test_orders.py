"""What people tell live workers to do, and what workers answer: drain, resume, warm, unload."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakeredis
import numpy as np
import pytest
from rq.suspension import resume, suspend

from rankmill import Client
from rankmill.cluster.orders import WorkerOutOfReach, find_worker, order_workers, queues_without
from rankmill.cluster.snapshot import WorkerState, read_cluster
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.orders import give_order
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker, worker_reports
from rankmill.producer.collect import presence
from rankmill.producer.collect.presence import WorkerPresence
from tests.cli.test_commands import rankmill
from tests.conftest import QUICK_LEASE, Outcome, Server, StartWorker, wait_for
from tests.harness.misbehaving import MARKS
from tests.harness.models.tiny import make_bert
from tests.harness.waiting import waiting_jobs
from tests.workers.test_metrics import get

pytestmark = pytest.mark.usefixtures("interleaved")

Told = Callable[..., Outcome]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bert(tmp_path / "model", extra_words=MARKS)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a worker that claims two chunks; a batch with the word "hold" waits for the file ``go``."""
    forwards = {"PYTHONPATH": str(ROOT), "FORWARDS": str(tmp_path / "forwards")}
    return {**QUICK_LEASE, **forwards, "RANKMILL_CLAIM_AHEAD": "11", "RANKMILL_HEARTBEAT_SECONDS": "0.1"}


@pytest.fixture
def told(server: Server) -> Told:
    """What ``rankmill workers`` says to these arguments."""
    return lambda *arguments: rankmill("workers", *arguments, "--redis", server.url)


def report(server: Server, name: str) -> WorkerReport:
    return worker_reports(server.client, [name])[name]


def answers(server: Server, name: str) -> list[str]:
    return [answer.text for answer in report(server, name).answers]


def test_a_drained_worker_finishes_its_chunks_and_takes_no_more(
    server: Server, workers: StartWorker, model: Path, environ: dict[str, str], tmp_path: Path, told: Told
) -> None:
    held = "tests.harness.misbehaving.MisbehavingWorker"
    process = workers(name="box.cpu.1", worker_class=held, environ={**environ, "RANKMILL_MAX_BATCH": "10"})
    client = Client(server.url, model=str(model), chunk_size=10)
    run = client.submit([("big cat", "hold")] * 40, priority="bulk")
    wait_for(lambda: report(server, "box.cpu.1").claimed_jobs >= 2)
    server.client.rpush(keys.orders("box.cpu.1"), "not an order")
    give_order(server.client, "box.cpu.1", "resume", started=1)  # an order to a process that is gone
    assert 0 < server.client.ttl(keys.orders("box.cpu.1")) <= 3600
    asked = told("drain", "box.cpu.1", "--wait", "0")
    assert (asked.code, asked.out) == (0, "")
    assert "no other worker takes the chunks of queue 'rankmill'" in asked.err
    wait_for(lambda: answers(server, "box.cpu.1") == ["still draining: 1 chunk"])
    assert "draining (1 left)" in told().out
    (tmp_path / "go").touch()
    drained = told("drain", "box", "--json")
    assert (drained.code, json.loads(drained.out)) == (
        0, [{"worker": "box.cpu.1", "order": "drain", "state": "done", "text": "drained"}]
    )  # fmt: skip
    assert (len(waiting_jobs(server.client)), server.client.zcard("rq:wip:rankmill")) == (3, 0)
    wait_for(lambda: not server.client.exists(keys.orders("box.cpu.1")))
    assert process.poll() is None
    cluster = read_cluster(server.client)
    assert [(worker.name, worker.state) for worker in cluster.workers] == [("box.cpu.1", "drained")]
    assert (cluster.queues[0].workers, cluster.queues[0].drained) == (0, 1)
    assert "all workers are drained, 3 chunks wait" in rankmill("status", "--redis", server.url).out
    assert "\nrankmill_drained 1.0\n" in get(report(server, "box.cpu.1").metrics_url or "")[1]
    resumed = told("resume", "box.cpu.1")
    assert (resumed.code, resumed.out) == (0, "box.cpu.1: takes chunks again\n")
    assert np.isfinite(run.scores(timeout=60)).all()
    assert not report(server, "box.cpu.1").drained


def test_a_suspended_worker_takes_no_chunk_and_hears_orders(
    server: Server, workers: StartWorker, model: Path, environ: dict[str, str], told: Told
) -> None:
    workers(name="one", environ=environ)
    suspend(server.client)
    wait_for(lambda: server.client.hget("rq:worker:one", "state") == b"suspended")
    run = Client(server.url, model=str(model)).submit([("big cat", "moon")])
    assert told("drain", "one").out == "one: drained\n"
    assert len(waiting_jobs(server.client)) == 1
    assert told("resume", "one").code == 0
    resume(server.client)
    assert np.isfinite(run.scores(timeout=60)).all()


@pytest.mark.parametrize("by", ["setting", "order"])
def test_a_worker_that_loses_its_device_while_it_warms_up_ends_with_one_line(
    server: Server, workers: StartWorker, model: Path, tmp_path: Path, told: Told, by: str
) -> None:
    environ = {**QUICK_LEASE, **({"RANKMILL_WARM": str(model)} if by == "setting" else {})}
    lost = "tests.harness.misbehaving.LostDeviceWorker"
    process = workers(name="one", worker_class=lost, environ=environ, ready=by == "order")
    if by == "order":
        give_order(server.client, "one", "warm", started=report(server, "one").started, model=str(model))
    assert process.wait(timeout=60) == 1
    log = (tmp_path / "worker.log").read_text()
    assert log.count("the worker cannot go on: the device is gone") == 1
    assert "Traceback" not in log
    assert not read_cluster(server.client).workers  # it has unregistered


@pytest.mark.slow
def test_models_are_loaded_and_unloaded_as_told(
    server: Server, workers: StartWorker, model: Path, environ: dict[str, str], tmp_path: Path, told: Told
) -> None:
    held = "tests.harness.misbehaving.MisbehavingWorker"
    workers(name="one", worker_class=held, environ=environ)
    loaded = told("warm", model)
    assert loaded.code == 0, loaded.err
    assert loaded.out.startswith(f"one: has loaded {model} in ")
    assert report(server, "one").models == (str(model),)
    assert told("warm", model, "one").out == f"one: has {model}, as before\n"
    missing = told("warm", tmp_path / "nowhere", "one")
    assert missing.code == 1
    (line,) = missing.err.splitlines()
    assert f"one: model {tmp_path / 'nowhere'}: no such directory on worker host" in line
    run = Client(server.url, model=str(model), chunk_size=10).submit([("big cat", "hold")] * 10)
    wait_for(lambda: report(server, "one").claimed_jobs == 1)
    told("unload", model, "--wait", "0")
    wait_for(lambda: answers(server, "one")[-1] == "waiting for 1 chunk that the worker has claimed")
    assert report(server, "one").models == (str(model),)
    (tmp_path / "go").touch()
    assert np.isfinite(run.scores(timeout=60)).all()
    wait_for(lambda: answers(server, "one")[-1] == f"has unloaded {model}")
    assert report(server, "one").models == ()
    assert told("unload", model, "one").out == f"one: had not loaded {model}\n"
    (listed,) = json.loads(told("--json").out)
    assert (listed["name"], listed["report"]["models"], listed["report"]["gpu"]) == ("one", [], None)
    assert listed["report"]["cpu"] >= 0
    assert (listed["report"]["model_loads"], listed["report"]["model_hits"]) == (1, 2)


def worker(name: str, state: Any = "idle", *queues: str, **about: Any) -> WorkerState:
    made = WorkerReport(device="cpu", started=1, beat=1, **about)
    reported = None if state in {"lost", "foreign"} else made
    return WorkerState(name=name, queues=queues or ("q",), state=state, beat_seconds=0, report=reported)


def test_a_worker_is_named_by_the_beginning_of_its_name() -> None:
    known = [worker("box.cpu.1"), worker("box.cpu.12"), worker("gpu.cuda0.3")]
    assert [find_worker(known, name).name for name in ("gpu", "box.cpu.1")] == ["gpu.cuda0.3", "box.cpu.1"]
    with pytest.raises(InputError, match=r"2 workers begin with box: box\.cpu\.1, box\.cpu\.12"):
        find_worker(known, "box")
    with pytest.raises(InputError, match=r"no worker is called bux\.cpu\.1, the nearest is box\.cpu\.1"):
        find_worker(known, "bux.cpu.1")


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (worker("w", "lost"), "is lost"),
        (worker("w", "foreign"), "another class than ScoringWorker"),
    ],
)
def test_who_cannot_be_told_is_named_and_nobody_is_told(one: WorkerState, reason: str) -> None:
    client = fakeredis.FakeRedis()
    with pytest.raises(WorkerOutOfReach, match=f"worker w .*{reason}"):
        order_workers(client, [worker("other"), one], "drain", wait_seconds=1)
    assert not client.keys("*")


def test_a_worker_that_ends_or_does_not_read_is_reported_as_it_is() -> None:
    client = fakeredis.FakeRedis()
    chosen = [worker("gone"), worker("again"), worker("silent")]
    for name, started in (("again", 2), ("silent", 1)):
        announce_worker(client, name, WorkerReport(device="cpu", started=started, beat=1), 60)
    found = order_workers(client, chosen, "drain", wait_seconds=0.01)
    assert [(each.worker, each.state) for each in found] == [
        ("gone", "gone"), ("again", "gone"), ("silent", "waiting")
    ]  # fmt: skip
    assert "has not read the order yet" in found[2].text


def of_presence(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, but for what threads of other tests have logged."""
    return [each.getMessage() for each in caplog.records if each.name == presence.logger.name]


def test_a_producer_says_that_workers_are_suspended(caplog: pytest.LogCaptureFixture) -> None:
    client = fakeredis.FakeRedis()
    client.sadd("rq:workers:q", "rq:worker:a")
    client.hset("rq:worker:a", "birth", "some time")
    announce_worker(client, "a", WorkerReport(device="cpu", started=1, beat=1), 60)
    suspend(client)
    WorkerPresence(RunStore(client), "url", "q", 60).check(0)
    (message,) = of_presence(caplog)
    assert "rq suspend was called" in message


def test_a_producer_says_that_all_workers_are_drained(caplog: pytest.LogCaptureFixture) -> None:
    client = fakeredis.FakeRedis()
    for name in ("a", "b"):
        client.sadd("rq:workers:q", f"rq:worker:{name}")
        client.hset(f"rq:worker:{name}", "birth", "some time")
        announce_worker(client, name, WorkerReport(device="cpu", started=1, beat=1, drained=name == "a"), 60)
    WorkerPresence(RunStore(client), "url", "q", 60).check(0)
    assert not of_presence(caplog)
    announce_worker(client, "b", WorkerReport(device="cpu", started=1, beat=1, drained=True), 60)
    WorkerPresence(RunStore(client), "url", "q", 60).check(0)
    (message,) = of_presence(caplog)
    assert "all workers of queue 'q' are drained" in message


def test_only_queues_that_lose_their_last_worker_are_warned_of() -> None:
    known = [worker("a", "idle", "x", "y"), worker("b", "busy", "y"), worker("c", "drained", "x")]
    assert queues_without(known, ["a"]) == ["x"]
    assert queues_without(known, ["a", "b"]) == ["x", "y"]
