"""Two releases on one server: workers and producers may be upgraded in either order.

The release before is the last commit whose jobs were named after packages of their own (`jobs.score_chunk`).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import ENVIRON, Server, StartWorker, wait_for
from tests.harness.models.tiny import cross_encoder
from tests.harness.tools import tool

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "f4d4b9c"
PAIRS = [("big cat", f"moon river {number}") for number in range(40)]
RQ = "import sys; sys.argv[0] = 'rq'; from rq.cli.cli import main; main()"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the release before."""
    git = tool("git", "git")
    tree = tmp_path_factory.mktemp("before")
    archive = subprocess.run([git, "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"this is no clone with the commit {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    return tree


@pytest.fixture
def old_worker(server: Server, before: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of the release before, ready to score."""
    options = ["--worker-class", "workers.ScoringWorker", "--serializer", "json", "--url", server.url]
    command = [sys.executable, "-c", RQ, "worker", "rankmill", "--name", "old", *options]
    with (tmp_path / "old.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=before, env=of_before(before), stdout=log, stderr=log)
    try:
        wait_for(lambda: "old" in queue_workers(server.client, "rankmill").scoring, process)
        yield process
    finally:
        process.kill()
        process.wait()


def of_before(tree: Path) -> dict[str, str]:
    return {**ENVIRON, "PYTHONPATH": str(tree), "PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> np.ndarray:
    return np.asarray(cross_encoder(tiny_model).predict(PAIRS))


def test_an_upgraded_producer_is_served_by_workers_of_the_release_before(
    server: Server, old_worker: subprocess.Popen[bytes], workers: StartWorker, tiny_model: Path,
    expected: np.ndarray,
) -> None:  # fmt: skip
    client = Client(server.url, model=str(tiny_model), precision="fp32", chunk_size=4)
    np.testing.assert_allclose(client.score(PAIRS, timeout=60), expected, atol=1e-5)
    workers(name="new")  # beside the old one
    run = client.submit(PAIRS * 5)
    np.testing.assert_allclose(run.scores(timeout=60), np.tile(expected, 5), atol=1e-5)
    assert run.stats.retries == 0
    old_worker.terminate()  # upgraded as well
    assert old_worker.wait(timeout=60) == 0
    np.testing.assert_allclose(client.score(PAIRS, timeout=60), expected, atol=1e-5)


def test_upgraded_workers_serve_a_producer_of_the_release_before(
    server: Server, workers: StartWorker, before: Path, tiny_model: Path, expected: np.ndarray
) -> None:
    workers()
    code = (
        "from producer import Client; import rankmill, sys\n"
        f"assert rankmill.__file__.startswith({str(before)!r})\n"
        f"client = Client({server.url!r}, model={str(tiny_model)!r}, precision='fp32', chunk_size=4)\n"
        f"print(client.score({PAIRS!r}, timeout=60).tolist())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=before, env=of_before(before), capture_output=True, text=True, check=True
    )
    np.testing.assert_allclose(eval(done.stdout), expected, atol=1e-5)
