"""Servers that are found through Sentinel: a failover in the middle of a run loses nothing."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from rankmill import AsyncClient, Client
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.runtime.connection import client_for
from tests.conftest import Server, StartExporter, start_worker, wait_for
from tests.harness.servers.sentinel import Service

pytest_plugins = ["tests.harness.servers.sentinel"]

PAIRS = [("big cat", f"moon river {number}") for number in range(400)]


async def in_a_loop(url: str, model: str, found: list[float], begun: threading.Event) -> None:
    """An asyncio client's run at the same time."""
    async with AsyncClient(url, model=model, chunk_size=5, window=4) as client:
        run = await client.submit(PAIRS[: len(PAIRS) // 2])
        async for score in run:
            found.append(score)
            begun.set()


@pytest.mark.parametrize("how", [pytest.param("demoted", marks=pytest.mark.slow), "killed"])
def test_a_failover_in_the_middle_of_a_run_loses_nothing(
    how: str, service: Service, exporters: StartExporter, tiny_model: Path, tmp_path: Path
) -> None:
    """Shows: the server loses its last writes, or a failover does.
    Shows: there are two masters.
    """
    client = client_for(service.url, 60)
    environ = {"RQ_CONNECTION_CLASS": "rankmill.Connection", "RANKMILL_CLAIM_AHEAD": "20"}
    worker = start_worker(Server(service.url, client), "rankmill", tmp_path, environ=environ)
    try:
        wait_for(lambda: queue_workers(client, "rankmill").scoring, worker)
        page = exporters(service.url)
        producer = Client(service.url, model=str(tiny_model), chunk_size=5, window=4)
        undisturbed = producer.score(PAIRS, timeout=60)
        run = producer.submit(PAIRS)
        parts = run.tables()
        found = [next(parts)]
        beside: list[float] = []
        begun = threading.Event()
        loop = threading.Thread(
            target=lambda: asyncio.run(in_a_loop(service.url, str(tiny_model), beside, begun))
        )
        loop.start()
        assert begun.wait(60)
        before = service.master
        service.demote() if how == "demoted" else service.kill()
        collecting = threading.Thread(target=lambda: found.extend(parts))
        collecting.start()
        wait_for(lambda: service.master != before)
        collecting.join(200)
        loop.join(200)
        np.testing.assert_allclose(beside, undisturbed[: len(PAIRS) // 2], atol=1e-5)
        scores = np.concatenate([part.scores.to_numpy() for part in found])
        np.testing.assert_allclose(scores, undisturbed, atol=1e-5)
        assert not run.errors
        assert worker.poll() is None
        assert "Traceback" not in (tmp_path / "worker.log").read_text()
        wait_for(lambda: b"rankmill_redis_up 1.0" in urllib.request.urlopen(f"{page}/metrics").read())
    finally:
        worker.kill()
        worker.wait()
