"""Kills score-file repeatedly and compares its output, for `benchmarks.faults.chaos` and the tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import redis

from benchmarks.cluster import BIN
from rankmill.jobs.protocol.worker_report import queue_workers


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without rankmill's settings, with one thread per worker, and `environ`."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("RANKMILL_", "REDIS_URL"))}
    return {**own, "RANKMILL_THREADS": "1", **(environ or {})}


def folder_of(output: Path) -> Path:
    """The folder in which score-file keeps its scores."""
    return output.with_name(output.name + ".rankmill")


def start(*arguments: object, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the real command."""
    return subprocess.Popen(
        [str(BIN / "score-file"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(environ),
        # A suite that runs in the background ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )


def stop(process: subprocess.Popen[str], output: Path, writes: int, sent: signal.Signals) -> bool:
    """Signal `process` after a number of writes to its journal; returns whether it was still running."""
    if not written(process, output, writes):
        return False
    process.send_signal(sent)
    return process.wait() == -sent or sent is signal.SIGINT


def written(process: subprocess.Popen[str], output: Path, writes: int) -> bool:
    """Wait for a number of writes to the journal of `process`; returns whether it is still running."""
    log = folder_of(output) / "journal.db-wal"
    seen, last = -1, -1  # the first look is not a write
    while process.poll() is None:
        try:
            changed = log.stat().st_mtime_ns
        except FileNotFoundError:
            changed = -1
        seen += changed not in (last, -1)
        last = changed
        if seen >= writes:
            return True
        time.sleep(0.001)
    return False


@dataclass
class Chaos:
    """Result of a run under kills: the number of kills, and the last process's output."""

    kills: int
    code: int
    out: str
    err: str


def run_under_kills(
    arguments: list[object],
    output: Path,
    *,
    kills: int,
    writes: int,
    seed: int,
    environ: Mapping[str, str] | None = None,
    begin: Callable[..., subprocess.Popen[str]] = start,
) -> Chaos:
    """Run one command until it ends by itself, SIGKILLing it up to `kills` times before that.

    Each kill is at a random moment: in the command's first tenth of a second, or after a random number of
    writes to its journal, up to `writes`. `begin` starts the command.
    """
    rng = random.Random(seed)
    done = 0
    for _ in range(kills):
        process = begin(*arguments, environ=environ)
        wanted = rng.randint(0, writes)
        if not wanted:
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
            process.wait()
            done += 1
        elif stop(process, output, wanted, signal.SIGKILL):
            done += 1
        else:
            out, err = process.communicate()
            return Chaos(done, process.returncode, out, err)
        process.communicate()
    process = begin(*arguments, environ=environ)
    out, err = process.communicate()
    return Chaos(done, process.returncode, out, err)


@dataclass
class Damage:
    """Differences of an output from that of an undisturbed run; all zeros if nothing was lost."""

    lost: int
    doubled: int
    different: int
    moved: int


def damage(output: Path, undisturbed: Path) -> Damage:
    """Compare two outputs whose rows carry a unique ``id``, in the order of the input."""
    found, expected = (pq.read_table(path, columns=["id", "score"]) for path in (output, undisturbed))
    ids, wanted = found["id"].to_numpy(), expected["id"].to_numpy()
    _, first = np.unique(ids, return_index=True)
    scores = dict(zip(wanted.tolist(), expected["score"].to_pylist(), strict=True))
    different = [
        row
        for row, score in zip(ids.tolist(), found["score"].to_pylist(), strict=True)
        if score is None or not np.isclose(score, scores.get(row, np.nan), atol=1e-5)
    ]
    return Damage(
        lost=len(np.setdiff1d(wanted, ids)),
        doubled=len(ids) - len(first),
        different=len(different),
        moved=int(len(ids) == len(wanted) and (ids != wanted).sum()),
    )


def finished_jobs(client: redis.Redis) -> int:
    """Number of chunks that the workers of the queue have finished since their start, in all runs."""
    names = queue_workers(client, "rankmill").scoring
    return sum(int(client.hget(f"rq:worker:{name}", "successful_job_count") or 0) for name in names)
