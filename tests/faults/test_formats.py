"""Two formats on one server: each process leaves what it cannot read to others, and says so."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from benchmarks.faults.kills import folder_of
from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.extensions.runners.submitted import on_server
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunFailed
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import (
    ENVIRON,
    QUICK_LEASE,
    Server,
    StartRunner,
    StartWorker,
    score_file,
    start_command,
    wait_for,
)
from tests.harness.models.tiny import cross_encoder
from tests.harness.preloaded import PreloadedProcess

pytestmark = pytest.mark.own_precision

PAIRS = [("big cat", f"moon river {number}") for number in range(40)]
OTHER = """
import sys
import rankmill.jobs.contract.schema
for name in [*sys.modules]:
    if name.startswith("rankmill.") and hasattr(sys.modules[name], "FORMAT"):
        sys.modules[name].FORMAT = 7
"""
"""What gives a process another format, before it begins."""
WORKER = f"{OTHER}sys.argv[0] = 'rq'; from rq.cli.cli import main; main()"
RUNNER = f"{OTHER}from rankmill.cli.main import rankmill; rankmill()"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Start]:
    """Starts processes of another format, whose log goes to ``other.log``."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *words: str) -> subprocess.Popen[bytes]:
        environ = {**ENVIRON, **QUICK_LEASE, "RANKMILL_METRICS_ADDRESS": "none"}
        with (tmp_path / "other.log").open("ab") as log:
            command = ["python", "-c", code, *words]
            started.append(PreloadedProcess(command, env=environ, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def other_worker(server: Server, others: Start) -> subprocess.Popen[bytes]:
    """A worker of another format, ready to score."""
    options = ["--worker-class", "rankmill.ScoringWorker", "--serializer", "json", "--url", server.url]
    worker = others(WORKER, "worker", "rankmill", "--name", "other", *options)
    wait_for(lambda: "other" in queue_workers(server.client, "rankmill").scoring, worker)
    return worker


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> np.ndarray:
    return np.asarray(cross_encoder(tiny_model).predict(PAIRS))


def test_a_mixed_queue_loses_nothing(
    server: Server, other_worker: subprocess.Popen[bytes], others: Start, workers: StartWorker,
    tmp_path: Path, tiny_model: Path, expected: np.ndarray,
) -> None:  # fmt: skip
    """Shows: two formats are on one queue."""
    worker = workers()
    worker.send_signal(signal.SIGSTOP)  # so that the other one meets all runs
    client = Client(server.url, model=str(tiny_model), precision="fp32", chunk_size=4)
    runs = [client.submit(PAIRS * 3, priority=priority) for priority in ("bulk", "request")]
    for run in runs:
        wait_for(partial(server.client.hexists, keys.refusals(run.id), "other"), other_worker)
    found = tmp_path / "found.npy"
    theirs = others(
        f"{OTHER}import numpy; from rankmill import Client\n"
        f"client = Client({server.url!r}, model={str(tiny_model)!r}, precision='fp32', chunk_size=4)\n"
        f"numpy.save({str(found)!r}, client.score({PAIRS * 3!r}, timeout=60))"
    )
    worker.send_signal(signal.SIGCONT)
    for run in runs:
        np.testing.assert_allclose(run.scores(timeout=60), np.tile(expected, 3), atol=1e-5)
        assert run.stats.retries == 0
    assert theirs.wait(timeout=60) == 0, (tmp_path / "other.log").read_text()
    np.testing.assert_allclose(np.load(found), np.tile(expected, 3), atol=1e-5)
    said = (tmp_path / "other.log").read_text()
    for run in runs:
        assert f"left to other workers: run {run.id} has format 1, this release reads 7: run the same" in said
    assert "Traceback" not in said
    shown = CliRunner().invoke(rankmill, ["status", "--redis", server.url], env={"COLUMNS": "200"}).output
    assert "the report has format 7, this release reads 1" in shown


def test_a_run_ends_where_all_workers_have_another_format(
    server: Server, other_worker: subprocess.Popen[bytes], tiny_model: Path
) -> None:
    """Shows: two formats are on one queue."""
    client = Client(server.url, model=str(tiny_model), precision="fp32")
    for detached in (False, True):
        run = client.submit(PAIRS, detached=detached)
        with pytest.raises(RunFailed, match=f"run {run.id} has format 1, this release reads 7: run the same"):
            run.scores(timeout=60)


def test_a_runner_of_another_format_leaves_a_submitted_run_to_others(
    server: Server, others: Start, workers: StartWorker, runners: StartRunner, tmp_path: Path,
    tiny_model: Path, expected: np.ndarray,
) -> None:  # fmt: skip
    """Shows: two formats are on one queue."""
    source, output = tmp_path / "a.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table(dict(zip(("query", "passage"), zip(*PAIRS, strict=True), strict=True))), source)
    client = Client(server.url, model=str(tiny_model), precision="fp32")
    runner = others(RUNNER, "runner", "--redis", server.url)
    wait_for(on_server(client.store, client.settings).store.runners, runner)
    run = client.submit_file(str(source), str(output))
    told = f"left to other runners: submitted run {run.id} has format 1, this release reads 7: run the same"
    wait_for(lambda: told in (tmp_path / "other.log").read_text(), runner)
    workers()
    runners(server)
    assert run.wait(timeout=60).state == "done"
    np.testing.assert_allclose(pq.read_table(output)["score"].to_numpy(), expected, atol=1e-5)


def test_an_output_of_another_format_is_begun_anew_with_restart(
    server: Server, workers: StartWorker, tmp_path: Path, tiny_model: Path, expected: np.ndarray
) -> None:
    source, output = tmp_path / "a.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table(dict(zip(("query", "passage"), zip(*PAIRS, strict=True), strict=True))), source)
    command = [source, "-o", output, "--redis", server.url, "--model", tiny_model, "--precision", "fp32"]
    process = start_command("score-file", *command)
    wait_for(lambda: server.client.zcard(keys.runs()), process)
    process.kill()
    process.wait()
    with closing(sqlite3.connect(folder_of(output) / "journal.db")) as db:
        db.execute("PRAGMA user_version = 7")
    workers()
    again = score_file(*command)
    assert again.code == 2
    (complaint,) = again.complaints
    assert (
        "journal.db has format 7, this release reads 1: continue with the release that began it" in complaint
    )
    done = score_file(*command, "--restart")
    assert done.code == 0, done.err
    np.testing.assert_allclose(pq.read_table(output)["score"].to_numpy(), expected, atol=1e-5)
