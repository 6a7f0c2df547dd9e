"""Jobs that cannot be read end no process: they are set aside, and the good ones beside them are scored."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rq.job import Job

from benchmarks.faults.damaged_jobs import FIELDS, put_damaged, put_leases
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunFailed
from rankmill.jobs.contract.schema import FORMAT
from rankmill.jobs.protocol.leases import server_time
from rankmill.jobs.protocol.recovery import clean_queue, failure_handler
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import SET_ASIDE
from rankmill.jobs.protocol.worker_report import queue_workers, worker_reports
from tests.conftest import Server, StartWorker, run_command, serve, start_worker, wait_for
from tests.harness.waiting import lose_waiting, waiting_jobs

PAIRS = [("big cat", f"moon river {number}") for number in range(30)]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    directory = tmp_path_factory.mktemp("worker")
    for server in serve():
        environ = {"RANKMILL_HEARTBEAT_SECONDS": "1", "RANKMILL_LEASE_SECONDS": "3"}
        worker = start_worker(server, "rankmill", directory, environ=environ)
        wait_for(lambda server=server: queue_workers(server.client, "rankmill").scoring, worker)  # type: ignore[misc]
        yield server, worker
        worker.kill()
        worker.wait()
        log = (directory / "worker.log").read_text(errors="replace")
        assert "heartbeat failed" not in log
        assert "found an unhandled exception" not in log


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_no_damaged_job_ends_a_worker(
    seed: int, one_worker: tuple[Server, subprocess.Popen[bytes]], tiny_model: Path
) -> None:
    server, worker = one_worker
    rng = random.Random(seed)
    client = Client(server.url, model=str(tiny_model), chunk_size=10)
    run = client.submit(PAIRS)
    fields: Any = server.client.hgetall(Job.key_for(keys.job_id(run.id, 0))) or {b"data": b""}
    for _ in range(20):
        put_leases(server.client, "rankmill", put_damaged(server.client, "rankmill", fields, rng), rng)
    assert np.isfinite(run.scores(timeout=60)).all()
    wait_for(lambda: not waiting_jobs(server.client), worker)
    assert worker.poll() is None


def test_what_stands_in_the_list_of_workers_ends_nobody(
    one_worker: tuple[Server, subprocess.Popen[bytes]], tiny_model: Path
) -> None:
    server, worker = one_worker
    server.client.sadd("rq:workers:rankmill", b"\xff", "odd")
    assert len(queue_workers(server.client, "rankmill").scoring) == 1
    with pytest.raises(RunFailed, match="no such directory"):
        Client(server.url, model="/gone/model").score(PAIRS, timeout=60)
    assert np.isfinite(Client(server.url, model=str(tiny_model)).score(PAIRS, timeout=60)).all()
    assert worker.poll() is None


@pytest.mark.parametrize("what", ["bomb", "no header"])
def test_a_damaged_payload_is_submitted_again(
    what: str,
    one_worker: tuple[Server, subprocess.Popen[bytes]],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 1)
    server, worker = one_worker
    client = Client(server.url, model=str(tiny_model), chunk_size=10)
    bomb = b"RKML" + FORMAT.to_bytes(4, "big") + (100).to_bytes(8, "big")
    bomb += pa.compress(bytes(1 << 20), codec="zstd", asbytes=True)
    worker.send_signal(signal.SIGSTOP)
    run = client.submit(PAIRS)
    server.client.set(keys.pairs(run.id, 10), bomb if what == "bomb" else b"not arrow", ex=60)
    worker.send_signal(signal.SIGCONT)
    assert np.isfinite(run.scores(timeout=60)).all()
    set_aside = {each.job: each.reason for each in SET_ASIDE.read(server.client)}
    reason = "a payload is damaged" if what == "bomb" else "a payload does not have rankmill's header"
    assert reason in set_aside[keys.job_id(run.id, 10)]
    leases = server.client.zrange("rq:wip:rankmill", 0, -1)
    assert not [lease for lease in leases if run.id in str(lease)]
    (report,) = worker_reports(server.client, queue_workers(server.client, "rankmill").scoring).values()
    assert not [reason for reason in report.refusals if str(tiny_model) in reason]


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_job_with_any_damaged_field_keeps_no_other_from_the_queue(
    field: bytes, server: Server, tiny_model: Path
) -> None:
    """As `hand_on_jobs` and every heartbeat meet it: started, its lease ended."""
    client = Client(server.url, model=str(tiny_model), chunk_size=1, window=len(FIELDS[field]) + 1)
    run = client.submit(PAIRS)
    store = RunStore(server.client)
    queue = store.queue("rankmill")
    for number, value in enumerate(FIELDS[field]):
        job_id = keys.job_id(run.id, number)
        server.client.hset(Job.key_for(job_id), mapping={"status": "started", field: value})
        server.client.zadd(queue.started_job_registry.key, {f"{job_id}:x": 1})
    good = keys.job_id(run.id, len(FIELDS[field]))
    server.client.hset(Job.key_for(good), "status", "started")
    server.client.zadd(queue.started_job_registry.key, {f"{good}:x": 1})
    lose_waiting(server.client)
    clean_queue(queue, failure_handler(store), 15, server_time(server.client), trusts_leases=True)
    assert good in waiting_jobs(server.client)
    assert not server.client.zcard(queue.started_job_registry.key)


def test_what_is_set_aside_is_shown_and_its_chunk_is_submitted_again(
    server: Server, workers: StartWorker, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 1)
    client = Client(server.url, model=str(tiny_model), chunk_size=10)
    run = client.submit(PAIRS)
    job_id = keys.job_id(run.id, 10)
    server.client.hset(Job.key_for(job_id), "timeout", "ten")
    worker = workers()
    assert np.isfinite(run.scores(timeout=60)).all()
    (found,) = SET_ASIDE.read(server.client)
    assert (found.job, found.queue) == (job_id, "rankmill")
    assert found.reason == "its timeout is b'ten', not a number"
    assert 0 < server.client.ttl(keys.set_aside()) <= 7 * 86400
    shown = status(server)
    assert "1 job could not be read" in " ".join(shown.split())
    assert "its timeout is b'ten', not a number" in shown.replace("\n", " ")
    assert json.loads(status(server, "--json"))["set_aside"][0]["job"] == job_id
    assert worker.poll() is None
    assert "Traceback" not in (tmp_path / "worker.log").read_text()


def status(server: Server, *options: str) -> str:
    """What ``rankmill status`` prints."""
    done = run_command("rankmill", "status", "--redis", server.url, *options)
    assert done.code == 0, done.err
    return done.out


def test_a_list_of_jobs_set_aside_does_not_grow(server: Server) -> None:
    from rankmill.jobs.protocol.latest import MAX_LISTED
    from rankmill.jobs.protocol.set_aside import set_aside

    queue = RunStore(server.client).queue("q")
    for number in range(MAX_LISTED + 20):
        set_aside(queue, b"job-%d" % number, "for the test")
    server.client.lpush(keys.set_aside(), b"\xff")
    found = SET_ASIDE.read(server.client)
    assert len(found) == MAX_LISTED - 1
    assert found[0].job == f"job-{MAX_LISTED + 19}"
