"""Rows that break things: every other row is scored, each of them ends with its error."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.protocol.recovery import hand_on_jobs
from rankmill.jobs.protocol.runs import RunStore
from tests.conftest import Server, start_worker, wait_for
from tests.harness.misbehaving import MARKS
from tests.harness.models.tiny import make_bert
from tests.harness.waiting import waiting_jobs

WORKER = "tests.harness.misbehaving.MisbehavingWorker"
ROWS = 256


@pytest.fixture(scope="session")
def marked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose vocabulary has the marks."""
    return make_bert(tmp_path_factory.mktemp("marked"), extra_words=MARKS)


@pytest.fixture
def forwards(tmp_path: Path) -> Path:
    """Where each forward leaves a line with its rows."""
    return tmp_path / "forwards"


@pytest.fixture
def restarting(server: Server, tmp_path: Path, forwards: Path) -> Iterator[None]:
    """A misbehaving worker, started again when it dies and its jobs handed on, as in the embedded mode."""
    stop = threading.Event()
    environ = {
        "FORWARDS": str(forwards),
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "WEDGED_SECONDS": "10",
    }

    def keep() -> None:
        worker: subprocess.Popen[bytes] | None = None
        names = (f"misbehaving-{number}" for number in count())
        name = ""
        while not stop.wait(0.1):
            if worker is None or worker.poll() is not None:
                if worker:
                    hand_on_jobs(RunStore(server.client), "rankmill", name)
                name = next(names)
                worker = start_worker(server, "rankmill", tmp_path, WORKER, environ=environ, name=name)
        if worker:
            worker.kill()
            worker.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    yield
    stop.set()
    thread.join()


def pairs(mark: str, rows: int = ROWS, at: int = 77) -> list[tuple[str, str]]:
    """Pairs, one of them marked."""
    return [("a cat", f"{mark} moon" if row == at else "the moon") for row in range(rows)]


@pytest.mark.parametrize("mark", ["raise", "exhaust"])
def test_a_row_that_raises_or_exhausts_memory(
    mark: str, server: Server, restarting: None, marked_model: Path, forwards: Path
) -> None:
    """Shows: a row raises an exception."""
    run = Client(server.url, model=str(marked_model), chunk_size=ROWS).submit(pairs(mark))
    scores = run.scores(timeout=200)
    assert list(run.errors) == [77]
    assert np.isnan(scores[77])
    assert np.isfinite(np.delete(scores, 77)).all()
    # A small batch, the others together, their halves, and a look whether there is memory for another row.
    assert len(forwards.read_text().splitlines()) <= 3 + 2 * 8


@pytest.mark.slow
def test_an_attempt_that_fails_is_made_again_after_a_pause(
    server: Server, restarting: None, marked_model: Path, forwards: Path
) -> None:
    forwards.with_name("stumble").touch()
    run = Client(server.url, model=str(marked_model), chunk_size=ROWS).submit(pairs("nothing"))
    wait_for(lambda: server.client.zcard("rq:scheduled:rankmill"))
    (part,) = run.tables()
    assert part.attempts == 2
    assert part.errors.null_count == ROWS


def test_a_row_that_kills_its_worker_each_time(
    server: Server, restarting: None, marked_model: Path, forwards: Path
) -> None:
    """Shows: a row kills each worker."""
    client = Client(server.url, model=str(marked_model), chunk_size=4, max_retries=1)
    deadly = client.submit(pairs("kill", 4, at=2))
    others = client.submit([("a cat", "the moon")] * 40)
    assert np.isfinite(others.scores(timeout=240)).all()
    scores = deadly.scores(timeout=240)
    assert {row: reason.split(":")[0] for row, reason in deadly.errors.items()} == {
        2: "given up after attempt 2"
    }
    assert np.isfinite(np.delete(scores, 2)).all()


@pytest.mark.slow
def test_a_wedged_forward_ends_its_worker(
    server: Server, restarting: None, marked_model: Path, forwards: Path
) -> None:
    """Shows: a forward never ends."""
    run = Client(server.url, model=str(marked_model), chunk_size=ROWS).submit(pairs("hang"))
    assert np.isfinite(run.scores(timeout=240)).all()  # the forward takes 600 s


@pytest.mark.slow
def test_a_second_sigterm_hands_work_back_at_once(
    server: Server, marked_model: Path, tmp_path: Path, forwards: Path
) -> None:
    environ = {"FORWARDS": str(forwards), "PYTHONPATH": str(Path(__file__).parents[3])}
    worker = start_worker(server, "rankmill", tmp_path, WORKER, environ=environ)
    Client(server.url, model=str(marked_model), chunk_size=ROWS).submit(pairs("hang"))
    wait_for((tmp_path / "hung").exists, worker)
    worker.terminate()
    time.sleep(3)  # RQ takes a second one within a second for the same
    assert worker.poll() is None
    worker.terminate()
    worker.wait(timeout=60)  # of the 600 s that the forward takes
    assert len(waiting_jobs(server.client)) == 1
    assert not server.client.zcard("rq:wip:rankmill")
