"""Two releases on one server: workers and producers may be upgraded in either order.

The release before is the last commit whose jobs were named after packages of their own (`jobs.score_chunk`).
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq.job import Job
from rq.serializers import JSONSerializer

from benchmarks.faults.kills import finished_jobs
from rankmill import Client, ScoringRun
from rankmill.jobs.contract.encodings import TokensAsked
from rankmill.jobs.contract.job import JOB_FUNCTION
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import ENVIRON, QUICK_LEASE, Server, StartRunner, StartWorker, wait_for
from tests.harness.environ import BIN
from tests.harness.models.tiny import cross_encoder
from tests.harness.tools import tool

pytestmark = pytest.mark.own_precision

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


@pytest.fixture
def old_runner(server: Server, before: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A runner of the release before, ready to take submitted files."""
    code = "from rankmill.cli.main import rankmill; rankmill()"
    command = [sys.executable, "-c", code, "runner", "--redis", server.url]
    environ = {**of_before(before), **QUICK_LEASE, "RANKMILL_METRICS_ADDRESS": "none"}
    with (tmp_path / "old-runner.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=before, env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: bool(Client(server.url).files.runners()), process)
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
    asked = TokensAsked(text="big cat", special=True).written()
    for _ in range(5):  # the old one leaves it to the new one
        run = client.submit([asked], inputs="tokens")
        assert run.scores(timeout=60).tolist() == [4.0]
        assert len(run.found) == 1
    old_worker.terminate()  # upgraded as well
    assert old_worker.wait(timeout=60) == 0
    np.testing.assert_allclose(client.score(PAIRS, timeout=60), expected, atol=1e-5)


def test_a_worker_of_the_release_before_that_nobody_knew_of_costs_no_row(
    server: Server, old_worker: subprocess.Popen[bytes], tiny_model: Path, expected: np.ndarray
) -> None:
    """As after a loss of data: a worker that has just begun was seen, and this one comes back later."""
    client = Client(server.url, model=str(tiny_model), precision="fp32", chunk_size=20, max_retries=1)
    for detached in (False, True):
        client.store._functions["rankmill"] = time.monotonic() + 60, JOB_FUNCTION
        run = client.submit(PAIRS, detached=detached)
        scores = run.scores(timeout=60)
        assert not run.errors
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    attached = client.attach(run.id)
    assert isinstance(attached, ScoringRun)
    np.testing.assert_allclose(attached.scores(timeout=60), expected, atol=1e-5)


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
    refused = subprocess.run(  # its producer knows no field that names the option
        [sys.executable, "-c", code.replace("timeout=60", "timeout=60, max_length=1000000")],
        cwd=before, env=of_before(before), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.stderr.splitlines()[-1].startswith("jobs.errors.RunFailed: max_length 1000000 is more")


ENDLESS = """
import os, sys, numpy
begun, over, found = sys.argv[1:]
def pairs():
    row = 0
    while row % len(PAIRS) or not os.path.exists(over):
        yield PAIRS[row % len(PAIRS)]
        row += 1
scores = []
for score in client.submit(pairs()):
    scores.append(score)
    if len(scores) == 100:
        open(begun, "w").close()
numpy.save(found, scores)
"""
"""A run that goes on until a file is there."""


@pytest.mark.parametrize(
    "producer", ["upgraded", pytest.param("of the release before", marks=pytest.mark.slow)]
)
def test_workers_are_upgraded_in_the_middle_of_a_run_and_beside_requests(
    server: Server, old_worker: subprocess.Popen[bytes], workers: StartWorker, before: Path, producer: str,
    tmp_path: Path, tiny_model: Path, expected: np.ndarray,
) -> None:  # fmt: skip
    package, where, environ = ("rankmill", ROOT, ENVIRON)
    if producer != "upgraded":
        package, where, environ = ("producer", before, of_before(before))
    client = f"Client({server.url!r}, model={str(tiny_model)!r}, precision='fp32', chunk_size=4)"
    code = f"from {package} import Client\nPAIRS = {PAIRS!r}\nclient = {client}\n{ENDLESS}"
    begun, over, found = (tmp_path / name for name in ("begun", "over", "found.npy"))
    command = [sys.executable, "-c", code, *map(str, (begun, over, found))]
    run = subprocess.Popen(command, cwd=where, env=environ)
    try:
        wait_for(begun.exists, run)
        workers(name="new")
        wait_for(lambda: {"old", "new"} <= queue_workers(server.client, "rankmill").scoring, run)
        caller = Client(server.url, model=str(tiny_model), precision="fp32")
        np.testing.assert_allclose(caller.score(PAIRS, timeout=60), expected, atol=1e-5)
        old_worker.terminate()  # full of claimed chunks
        np.testing.assert_allclose(caller.score(PAIRS, timeout=60), expected, atol=1e-5)
        assert old_worker.wait(timeout=60) == 0
        np.testing.assert_allclose(caller.score(PAIRS, timeout=60), expected, atol=1e-5)
        assert run.poll() is None
        over.touch()
        assert run.wait(timeout=120) == 0
    finally:
        run.kill()
        run.wait()
    scores = np.load(found)
    np.testing.assert_allclose(scores, np.tile(expected, len(scores) // len(PAIRS)), atol=1e-5)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    queries, passages = zip(*PAIRS, strict=True)
    pq.write_table(pa.table({"query": queries, "passage": passages}), path)
    return path


def scores_of(output: Path) -> list[float]:
    found: list[float] = pq.read_table(output)["score"].to_pylist()
    return found


def test_runners_of_both_releases_score_what_an_upgraded_producer_submits(
    server: Server, workers: StartWorker, runners: StartRunner, old_runner: subprocess.Popen[bytes],
    source: Path, tmp_path: Path, tiny_model: Path, expected: np.ndarray,
) -> None:  # fmt: skip
    client = Client(server.url, model=str(tiny_model), precision="fp32", chunk_size=4)

    def submitted(output: str) -> str | None:
        """The name of a job that is done, read before there is a worker for it."""
        run = client.submit_file(str(source), str(tmp_path / output), force=True)
        name = Job.fetch(run.id, client.store.redis, JSONSerializer).func_name
        worker = workers()
        run.wait(timeout=60)
        worker.terminate()
        worker.wait(timeout=60)
        np.testing.assert_allclose(scores_of(tmp_path / output), expected, atol=1e-5)
        return name

    assert submitted("old.parquet") == "jobs.score_file"
    runners(server)  # beside the old one, which may take the job
    assert submitted("both.parquet") == "jobs.score_file"
    old_runner.terminate()  # upgraded as well
    assert old_runner.wait(timeout=60) == 0
    assert submitted("new.parquet") == "rankmill.score_file"


@pytest.fixture
def worker_of_a_hub(server: Server, tiny_model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that has ``some/model`` from a hub. It is no fork: the hub's client looks when imported."""
    kept, commit = tmp_path / "hub" / "models--some--model", "0123456789" * 4
    shutil.copytree(tiny_model, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    options = ["--worker-class", "rankmill.ScoringWorker", "--serializer", "json", "--url", server.url]
    command = [str(BIN / "rq"), "worker", "rankmill", *options]
    with (tmp_path / "worker.log").open("wb") as log:
        environ = {**ENVIRON, "HF_HOME": str(tmp_path)}
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, process)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_runner_of_the_release_before_goes_on_where_an_upgraded_one_was_killed(
    server: Server, worker_of_a_hub: subprocess.Popen[bytes], runners: StartRunner,
    old_runner: subprocess.Popen[bytes], tmp_path: Path, tiny_model: Path,
) -> None:  # fmt: skip
    """What that has journalled, of parts in place and of the next one, is not scored again."""
    rows, part, chunk, window = 800, 300, 4, 4
    pairs = [("big cat", f"moon river {number}") for number in range(rows)]
    source, output = tmp_path / "a.parquet", tmp_path / "out"
    pq.write_table(pa.table(dict(zip(("query", "passage"), zip(*pairs, strict=True), strict=True))), source)
    client = Client(server.url, model="some/model", precision="fp32", chunk_size=chunk)
    old_runner.send_signal(signal.SIGSTOP)
    try:
        run = client.submit_file(str(source), str(output), rows_per_part=part)
        upgraded = runners(server, environ={"RANKMILL_WINDOW": str(window)})
        wait_for(lambda: run.status().progress.rows > part + 100, upgraded)
        upgraded.kill()
        upgraded.wait()
    finally:
        old_runner.send_signal(signal.SIGCONT)
    assert run.wait(timeout=60).state == "done"
    found = pq.read_table(output)["score"].to_numpy()
    np.testing.assert_allclose(found, cross_encoder(tiny_model).predict(pairs), atol=1e-5)
    assert finished_jobs(server.client) <= rows // chunk + window


def test_an_upgraded_runner_scores_what_the_release_before_submits(
    server: Server, workers: StartWorker, runners: StartRunner, before: Path, source: Path, tmp_path: Path,
    tiny_model: Path, expected: np.ndarray,
) -> None:  # fmt: skip
    workers()
    runners(server)
    output = tmp_path / "out.parquet"
    code = (
        "from producer import Client; import rankmill\n"
        f"assert rankmill.__file__.startswith({str(before)!r})\n"
        f"client = Client({server.url!r}, model={str(tiny_model)!r}, precision='fp32', chunk_size=4)\n"
        f"run = client.submit_file({str(source)!r}, {str(output)!r})\n"
        "print(run.wait(timeout=60).state)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=before, env=of_before(before), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "done"
    np.testing.assert_allclose(scores_of(output), expected, atol=1e-5)
