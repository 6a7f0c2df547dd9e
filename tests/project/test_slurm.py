"""The jobs of examples/slurm: SLURM's on a real one (requeued, preempted, at its time limit); SkyPilot's."""

from __future__ import annotations

import getpass
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import BIN, ENVIRON, score_file, wait_for
from tests.harness.tools import free_port, tool

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "score.sh"
ROWS = 15_000
CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=1 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """A SLURM of this test's own."""

    folder: Path

    def run(self, *command: str) -> str:
        environ = {
            **ENVIRON,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "RANKMILL_METRICS_ADDRESS": "none",
        }
        done = subprocess.run(
            command, env=environ, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job, asked at most three times a second."""
        time.sleep(0.3)
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    munged, slurmctld, slurmd = (
        tool("munged", "munge"),
        tool("slurmctld", "slurm-wlm"),
        tool("slurmd", "slurm-wlm"),
    )
    munge = tmp_path / "munge"
    for folder in (munge, tmp_path / "state"):
        folder.mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    ports = {name: free_port() for name in ("port", "first", "second")}
    text = CONFIG.format(folder=tmp_path, user=getpass.getuser(), **ports)
    (tmp_path / "slurm.conf").write_text(text)
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        [munged, "--foreground", "--force", f"--socket={munge / 'socket'}", "--num-threads=2", *files],
        [slurmctld, "-D", "-i"],
        [slurmd, "-D", "-N", "n1"],
        [slurmd, "-D", "-N", "n2"],
    ]
    started = []
    with (tmp_path / "daemons.log").open("wb") as log:
        try:
            for command in commands:
                started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
                if len(started) == 1:
                    wait_for((munge / "socket").exists, started[0])
            found = Slurm(tmp_path)
            wait_for(lambda: _idle(found), started[1])
            yield found
            found.run("scancel", "--state=RUNNING")
            wait_for(lambda: not found.run("squeue", "--noheader", "--states=RUNNING,COMPLETING"))
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(30)


def _idle(slurm: Slurm) -> bool:
    try:
        return slurm.run("sinfo", "--noheader", "--format=%D %t", "--partition=low").split() == ["2", "idle"]
    except AssertionError:  # it does not answer yet
        return False


def requeue(slurm: Slurm, job: str) -> None:
    slurm.run("scontrol", "requeue", job)


def preempt(slurm: Slurm, job: str) -> None:
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--output=high.log", "--wrap", "true")


def reach_the_time_limit(slurm: Slurm, job: str) -> None:
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # which --signal sends two minutes before it


@pytest.mark.parametrize(
    "interrupt", [requeue, pytest.param(preempt, marks=pytest.mark.long), reach_the_time_limit]
)
def test_a_job_goes_on_where_it_was_interrupted(
    interrupt: Callable[[Slurm, str], None], slurm: Slurm, tmp_path: Path, tiny_model: Path
) -> None:
    passages = [f"passage {row} of a cat " + "and the moon " * (row % 9) for row in range(ROWS)]
    pq.write_table(pa.table({"query": ["big cat"] * ROWS, "passage": passages}), tmp_path / "in.parquet")
    options = ["--model", str(tiny_model), "--precision", "fp32"]
    job = slurm.run(
        "sbatch", "--parsable", "--nodes=2", "--output=log", "--time=10",
        str(SCRIPT), "in.parquet", "--output", "out.parquet", "--chunk-size", "16", *options,
    ).strip()  # fmt: skip
    log = tmp_path / "log"

    wait_for(lambda: log.exists() and log.read_text().count('"loaded ') == 2)
    kept = tmp_path / "out.parquet.rankmill" / "journal.db-wal"
    before = kept.stat().st_size
    wait_for(lambda: kept.stat().st_size > before)  # which grows with each chunk
    interrupt(slurm, job)
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", seconds=120)
    assert slurm.job(job)["Restarts"] == "1"
    assert "continuing: " in log.read_text()
    assert log.read_text().count("listening on rankmill") == 4  # on two nodes, twice
    scored = pq.read_table(tmp_path / "out.parquet")
    assert scored["passage"].to_pylist() == passages
    done = score_file("in.parquet", "--limit", "200", "--output", "some.parquet", *options, cwd=tmp_path)
    assert done.code == 0, done.err
    some = pq.read_table(tmp_path / "some.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scored["score"].to_numpy()[:200], some, atol=1e-4)
    assert np.isfinite(scored["score"].to_numpy()).all()


def test_a_job_ends_when_no_worker_is_left(slurm: Slurm, tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["a"], "passage": ["b"]}), tmp_path / "in.parquet")
    broken = tmp_path / "broken" / "score-workers"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    path = f"--export=ALL,PATH={broken.parent}:{BIN}:{os.environ['PATH']}"
    job = slurm.run(
        "sbatch", "--parsable", path, "--nodes=2", "--output=log", str(SCRIPT), "in.parquet"
    ).strip()
    wait_for(lambda: slurm.job(job)["JobState"] == "FAILED")
    assert "score.sh: all workers, or the server, have ended" in (tmp_path / "log").read_text()


def test_a_spot_job_goes_on_after_rows_without_a_score_and_skips_what_the_bucket_has(tmp_path: Path) -> None:
    job = yaml.safe_load(SCRIPT.with_name("skypilot.yaml").read_text())
    (bucket := tmp_path / "bucket").mkdir()
    table = pa.table({"query": ["a", "b", "c", "d"], "passage": ["x", None, "y", None]})
    pq.write_table(table, bucket / "pairs.parquet")
    own = {"PATH": f"{BIN}:{os.environ['PATH']}", "MODEL": "demo", "SHARDS": "2"}

    def run(machine: str) -> None:
        (folder := tmp_path / machine).mkdir()
        done = subprocess.run(
            ["sh", "-c", job["run"].replace("/bucket", str(bucket))],
            env={**ENVIRON, **own}, cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    run("first")
    (bucket / "scores" / "part-00001.parquet").unlink()
    run("second")  # which has only the bucket
    assert {path.name for path in (tmp_path / "second").glob("part-*.parquet")} == {"part-00001.parquet"}
    assert pq.read_table(bucket / "scores.parquet")["score"].is_null().to_pylist() == [False, True] * 2
    assert len((bucket / "scores.parquet.errors.jsonl").read_text().splitlines()) == 2
