"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import Server, StartWorker, serve, start_worker, wait_for
from tests.harness.misbehaving import MARKS
from tests.harness.models.tiny import make_bert


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server and a worker, apart from other tests': what is killed here leaves its remains there."""
    with contextmanager(serve)() as server:
        worker = start_worker(server, "rankmill", tmp_path_factory.mktemp("worker"))
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        yield server
        worker.terminate()
        worker.wait(timeout=60)


@dataclass
class Held:
    """A queue whose worker scores no row with the word ``hold``, and what it has claimed with it, until `go`.

    So a run with such a row is in progress for as long as a test wants, however fast the machine is.
    """

    server: Server
    model: Path
    file: Path

    def go(self) -> None:
        """Let the worker go on."""
        self.file.touch()


@pytest.fixture(scope="session")
def model_with_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose vocabulary has `MARKS`."""
    return make_bert(tmp_path_factory.mktemp("marks"), extra_words=MARKS)


@pytest.fixture
def held(server: Server, workers: StartWorker, model_with_marks: Path, tmp_path: Path) -> Held:
    """See `Held`."""
    environ = {"FORWARDS": str(tmp_path / "forwards"), "PYTHONPATH": str(Path(__file__).parents[2])}
    workers(worker_class="tests.harness.misbehaving.MisbehavingWorker", environ=environ)
    return Held(server, model_with_marks, tmp_path / "go")
