"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import Server, serve, start_worker, wait_for


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server and a worker, apart from other tests': what is killed here leaves its remains there."""
    with contextmanager(serve)() as server:
        worker = start_worker(server, "rankmill", tmp_path_factory.mktemp("worker"))
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        yield server
        worker.terminate()
        worker.wait(timeout=60)
