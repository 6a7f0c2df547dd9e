"""score-workers keeps a host's workers running, and takes them down as it is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rankmill import Client
from rankmill.cli.workers import keep
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.system import system
from rankmill.producer.local import processes as local_processes
from rankmill.producer.local.processes import WorkerProcesses
from tests.conftest import ENVIRON, Server, run_command, wait_for
from tests.harness.models.tiny import make_bert
from tests.harness.preloaded import EXECUTED, PreloadedProcess
from tests.harness.waiting import waiting_jobs

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def pool(server: Server, tmp_path: Path) -> Iterator[Start]:
    """Starts score-workers; nothing of it outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "pool.log").open("ab") as log:
            command = ["score-workers", "--redis", server.url, *options]
            started.append(
                PreloadedProcess(
                    command, stdout=log, stderr=log, env={**ENVIRON, EXECUTED: "1"}, cwd=tmp_path
                )
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_killed_worker_s_chunks_run_at_once_and_sigterm_ends_all(
    server: Server, pool: Start, tmp_path: Path
) -> None:
    """Shows: a worker is killed, or its host is gone."""
    process = pool("--workers", "2", "--threads", "1")
    wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2, process)
    slow = make_bert(tmp_path / "slow", hidden=128, layers=4)
    client = Client(server.url, model=str(slow), chunk_size=20)
    run = client.submit([("big cat", "the moon over the river " * 20)] * 200)
    wait_for(lambda: server.client.zcard("rq:wip:rankmill") >= 2)
    host = socket.gethostname().partition(".")[0]
    names = [f"{host}.cpu.{process.pid}-{number}" for number in (1, 2)]
    assert queue_workers(server.client, "rankmill").scoring == set(names)
    workers = [c for c in psutil.Process(process.pid).children() if "rq.cli" in c.cmdline()]
    workers[0].kill()
    wait_for(lambda: (tmp_path / "pool.log").read_text().count("starting it again") == 1, seconds=10)
    assert np.isfinite(run.scores(timeout=120)).all()
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_workers_that_cannot_start_end_it_loudly(pool: Start, tmp_path: Path) -> None:
    process = pool("--device", "mps")
    assert process.wait(timeout=120) == 1
    log = (tmp_path / "pool.log").read_text()
    assert "device mps is not available on this machine" in log
    assert f".mps.{process.pid} cannot start; its last lines above say why" in log


@pytest.mark.slow
def test_workers_that_die_at_each_start_end_the_command(
    pool: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "import os, sys\nif 'rq.cli' in sys.orig_argv: os._exit(3)\n"
    (tmp_path / "sitecustomize.py").write_text(dies)
    monkeypatch.setitem(ENVIRON, "PYTHONPATH", str(tmp_path))
    assert pool().wait(timeout=120) == 1
    log = (tmp_path / "pool.log").read_text()
    assert log.count("worker died with status 3, starting it again") == 3
    assert "has died 3 times in a row at its start; its last lines above say why" in log


def test_a_signal_ends_workers_that_are_just_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """They got no signal, and the command waited for them until the next one."""
    handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    start = system.Popen

    def start_late(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(local_processes, "worker_command", lambda *_: ["sleep", "30"])
    monkeypatch.setattr(system, "Popen", start_late)
    processes = WorkerProcesses(["q"], "unix:///none", [{}, {}], names=["a", "b"], wait_seconds=1)
    try:
        keep(processes, lambda: None)
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
    first, second = (worker.process for worker in processes.workers)
    assert first
    assert (first.returncode, second) == (-signal.SIGTERM, None)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_command("score-workers", "--redis", "redis://:secret@127.0.0.1:1/0")
    assert done.code == 1
    assert "no usable Redis at redis://:***@127.0.0.1:1/0" in done.err


def test_workers_of_several_queues_take_jobs_of_the_first_one_first(
    server: Server, pool: Start, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        name: Client(server.url, model=str(tiny_model), queue=name, chunk_size=10).submit(
            [("q", "cat")] * 300
        )
        for name in ("later", "urgent")
    }
    monkeypatch.setitem(ENVIRON, "RANKMILL_CLAIM_AHEAD", "10")  # one chunk at a time
    pool("--queue", "urgent,later", "--workers", "1", "--device", "cpu")
    redis: Any = server.client
    streams = {name: f"rankmill:run:{run.id}:results" for name, run in runs.items()}
    wait_for(lambda: all(redis.xlen(stream) == 30 for stream in streams.values()))
    times = {name: [entry for entry, _ in redis.xrange(stream)] for name, stream in streams.items()}
    assert sum(entry < max(times["urgent"]) for entry in times["later"]) <= 2
    assert all(np.isfinite(run.scores(timeout=60)).all() for run in runs.values())
    assert queue_workers(server.client, "urgent") == queue_workers(server.client, "later")


def test_workers_end_with_the_process_that_keeps_them_running(
    server: Server, pool: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would start them again, and nobody who stops score-workers would stop them.

    Shows: score-workers, or the parent of embedded workers, is killed.
    """
    monkeypatch.setitem(ENVIRON, "RANKMILL_CLAIM_AHEAD", "20")
    process = pool("--workers", "2", "--threads", "1")
    wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2, process)
    workers = psutil.Process(process.pid).children()
    slow = make_bert(tmp_path / "slow", hidden=128, layers=4)
    client = Client(server.url, model=str(slow), chunk_size=10)
    run = client.submit([("big cat", "the moon over the river " * 20)] * 2000)
    redis: Any = server.client
    wait_for(lambda: redis.zcard("rq:wip:rankmill") >= 2)
    process.kill()
    wait_for(lambda: not any(worker.is_running() for worker in workers))
    assert "keeps it running, is gone" in (tmp_path / "pool.log").read_text()
    assert not queue_workers(redis, "rankmill").scoring  # they have unregistered
    assert not redis.zcard("rq:wip:rankmill")  # and handed back what they had
    assert len(waiting_jobs(redis))
    run.cancel()
