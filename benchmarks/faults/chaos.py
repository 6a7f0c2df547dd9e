"""Measures losses when processes die; a command runs one scenario, with kills at random moments of a seed.

    python -m benchmarks.faults.chaos producer    # --rows 100000 --kills 20 --seed 1

A scenario makes a file, scores it once undisturbed and once under kills with the same model, compares the two
row by row and prints the figures. A scenario fails if a row is lost, doubled, moved or different.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from benchmarks.cluster import start_worker, valkey, wait_until
from benchmarks.engine.models import random_bert
from benchmarks.faults.batches import everybody_dies_in_a_batch
from benchmarks.faults.kills import damage, environment, finished_jobs, run_under_kills, start
from benchmarks.faults.outages import full, replica
from benchmarks.faults.submitted import Keeper, Toll, everybody_dies
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import queue_workers

CHUNK = 128
WINDOW = 8

OPTIONS: list[object] = ["--precision", "fp32", "--chunk-size", CHUNK, "--quiet"]

T = TypeVar("T")

Figures = dict[str, object]


def main() -> None:
    """Run one scenario and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--rows", type=int, help="default: those of the documents")
    parser.add_argument("--kills", type=int, help="default: those of the documents")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    rows, kills = options.rows or scenario.rows, options.kills or scenario.kills
    with tempfile.TemporaryDirectory() as name:
        figures = scenario.run(Path(name), rows, kills, options.seed)
    for what, figure in figures.items():
        shown = f"{figure:,}" if isinstance(figure, int) else figure
        print(f"{what:<28} {figure:>12,.6g}" if isinstance(figure, float) else f"{what:<28} {shown:>12}")
    harmed = ("lost", "doubled", "different", "moved", "scored again")
    if any(figures.get(f"rows {what}") for what in harmed):
        sys.exit("rows were harmed")


def producer(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL score-file while its server and worker keep running, and run the same command again."""
    source = write_rows(directory / "a.parquet", rows)
    model = random_bert(directory / "model", hidden=32, layers=2)
    output, undisturbed = directory / "killed.parquet", directory / "undisturbed.parquet"
    environ = {"RANKMILL_WINDOW": str(WINDOW)}
    command: list[object] = [source, *OPTIONS, "--model", model]
    with valkey() as url:
        client = redis.Redis.from_url(url)
        command += ["--redis", url]
        worker = start_worker(url, directory / "worker.log", environment())
        wait_until(lambda: queue_workers(client, "rankmill").scoring, worker)
        calm, _ = timed(lambda: score_file(*command, "-o", undisturbed, environ=environ))
        before = finished_jobs(client)
        seconds, end = timed(
            lambda: run_under_kills(
                [*command, "-o", output],
                output,
                kills=kills,
                writes=rows // CHUNK // kills // 4,  # a write keeps several chunks at a time
                seed=seed,
                environ=environ,
            )
        )
        if end.code or end.kills < kills:
            sys.exit(end.err or f"the run ended after {end.kills} kills; give it more --rows")
        wait_until(lambda: RunStore(client).queue("rankmill").count == 0)
        chunks = -(-rows // CHUNK)
        repeated = finished_jobs(client) - before - chunks
        worker.terminate()
        worker.wait()
        return {
            "rows": rows,
            "kills": end.kills,
            "restarts": end.kills,
            **harm(output, undisturbed),
            "chunks": chunks,
            "chunks repeated": repeated,
            "at most (kills x window)": end.kills * WINDOW,
            "seconds": seconds,
            "seconds undisturbed": calm,
            "Redis peak, MiB": peak(client),
            "run keys left in Redis": len(list(client.scan_iter("rankmill:run:*"))),
        }


def worker(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL a random one of score-file's two workers every few seconds; its supervisor restarts them."""
    source, model = write_rows(directory / "a.parquet", rows), slow_model(directory)
    output, undisturbed = directory / "killed.parquet", directory / "undisturbed.parquet"
    command = [source, *OPTIONS, "--model", model, "--workers", 2, "--json"]
    calm, _ = timed(lambda: score_file(*command, "-o", undisturbed))
    rng = random.Random(seed)
    end = run_under(
        [*command, "-o", output], lambda pid: kill_one(psutil.Process(pid), rng), kills, calm, rng
    )
    return {
        "rows": rows,
        "kills": end.hits,
        "retries": end.retries,
        **harm(output, undisturbed),
        "seconds": end.seconds,
        "seconds undisturbed": calm,
        "worker seconds lost a kill": 2 * (end.seconds - calm) / max(end.hits, 1),
    }


def rq_worker(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL one of two ``rq worker`` processes while the server keeps running, and start another at once.

    Nobody reports the death, so the chunks of the dead worker run again when its leases lapse. A worker is
    killed only while both score, which takes some seconds after each kill.
    """
    source, model = write_rows(directory / "a.parquet", rows), slow_model(directory)
    output, undisturbed = directory / "killed.parquet", directory / "undisturbed.parquet"
    rng = random.Random(seed)
    with valkey() as url:
        client = redis.Redis.from_url(url)
        command = [source, *OPTIONS, "--model", model, "--redis", url, "--json"]
        workers: dict[str, subprocess.Popen[bytes]] = {}
        numbers = count()

        def begin() -> None:
            name = f"worker-{next(numbers)}"
            workers[name] = start_worker(url, directory / "worker.log", environment(), name=name)

        def both_score() -> bool:
            return workers.keys() <= queue_workers(client, "rankmill").scoring

        def hit(_: int) -> bool:
            if not both_score():
                return False
            killed = workers.pop(rng.choice(list(workers)))
            killed.kill()
            killed.wait()
            begin()
            return True

        begin()
        begin()
        wait_until(both_score)
        calm, _ = timed(lambda: score_file(*command, "-o", undisturbed))
        end = run_under([*command, "-o", output], hit, kills, calm, rng)
        for process in workers.values():
            process.terminate()
            process.wait()
        return {
            "rows": rows,
            "kills": end.hits,
            "restarts": end.hits,
            "retries": end.retries,
            **harm(output, undisturbed),
            "seconds": end.seconds,
            "seconds undisturbed": calm,
            "worker seconds lost a kill": 2 * (end.seconds - calm) / max(end.hits, 1),
            "Redis peak, MiB": peak(client),
            "run keys left in Redis": len(list(client.scan_iter("rankmill:run:*"))),
        }


@dataclass
class Ending:
    """How a command ended after the given number of disturbances."""

    hits: int
    seconds: float
    retries: int


def run_under(
    command: list[object], hit: Callable[[int], bool], hits: int, calm: float, rng: random.Random
) -> Ending:
    """Run score-file and disturb it, spread over the `calm` seconds that it takes undisturbed; `hit` gets its
    process id.
    """
    done = 0
    started = time.monotonic()
    process = start(*command)
    while done < hits and process.poll() is None:
        time.sleep(rng.uniform(0.5, 1.5) * calm / hits)
        done += hit(process.pid)
    out, err = process.communicate()
    if process.returncode:
        sys.exit(err)
    return Ending(done, time.monotonic() - started, json.loads(out)["retries"])


def score_file(*arguments: object, environ: Mapping[str, str] | None = None) -> None:
    """Run score-file undisturbed."""
    process = start(*arguments, environ=environ)
    _, err = process.communicate()
    if process.returncode:
        sys.exit(err)


def kill_one(parent: psutil.Process, rng: random.Random) -> bool:
    """SIGKILL one of the RQ workers below `parent`; returns whether there was one."""
    with suppress(psutil.NoSuchProcess):
        workers = [child for child in parent.children(recursive=True) if "rq.cli" in child.cmdline()]
        if workers:
            rng.choice(workers).kill()
            return True
    return False


def redis_aof(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL the server, which keeps an append-only file, and start it again."""
    return _redis(directory, rows, kills, seed, "aof")


def redis_bare(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL the server, which stores nothing on disk, and start it again."""
    return _redis(directory, rows, kills, seed, "bare")


def redis_flush(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """Delete all data of the server (FLUSHALL)."""
    return _redis(directory, rows, kills, seed, "flush")


def redis_behind(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """Delete all data of the server, after results had higher numbers than any that follow."""
    return _redis(directory, rows, kills, seed, "behind")


def redis_lists(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """Delete only the queue's list."""
    return _redis(directory, rows, kills, seed, "lists")


def redis_failover(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """Make the server a replica of an unreachable master for ten seconds."""
    return _redis(directory, rows, kills, seed, "failover")


def redis_full(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """Make the server run out of memory for twelve seconds."""
    return _redis(directory, rows, kills, seed, "full")


_OUTAGES = {"failover": (replica, 10), "full": (full, 12)}
"""Ways in which the server cannot serve, and for how many seconds."""


def _redis(directory: Path, rows: int, kills: int, seed: int, how: str) -> Figures:
    source, model = write_rows(directory / "a.parquet", rows), slow_model(directory)
    output, undisturbed = directory / "killed.parquet", directory / "undisturbed.parquet"
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        keeper = Keeper(Path(name), appendonly=how == "aof")
        url, client = keeper.url, redis.Redis.from_url(keeper.url)
        of_server: Any = client.execute_command
        scorer = start_worker(url, directory / "worker.log", environment())
        try:
            wait_until(lambda: queue_workers(client, "rankmill").scoring, scorer)
            command = [source, *OPTIONS, "--model", model, "--redis", url, "--json"]
            calm, _ = timed(lambda: score_file(*command, "-o", undisturbed))
            before = set(client.scan_iter(count=1000))
            rng = random.Random(seed)

            def hit(_: int) -> bool:
                if how == "lists":
                    client.delete("rq:queue:rankmill", *client.scan_iter("rankmill:queue:rankmill:waiting:*"))
                elif how in {"flush", "behind"}:
                    for results in client.scan_iter("rankmill:run:*:results") if how == "behind" else ():
                        of_server("XSETID", results, f"{1 << 50}-0")
                        time.sleep(0.5)  # results with such numbers are read
                    client.flushall()
                elif how in _OUTAGES:
                    outage, seconds = _OUTAGES[how]
                    with outage(client):
                        time.sleep(seconds)
                else:
                    keeper.kill()
                    time.sleep(rng.uniform(0, 2))
                    keeper.start()
                return True

            end = run_under([*command, "-o", output], hit, kills, calm, rng)
            return {
                "rows": rows,
                "kills": end.hits,
                "retries": end.retries,
                **harm(output, undisturbed),
                "seconds": end.seconds,
                "seconds undisturbed": calm,
                "seconds lost a kill": (end.seconds - calm) / max(end.hits, 1),
                "Redis peak, MiB": peak(client),
                "new keys": b" ".join(sorted(set(client.scan_iter(count=1000)) - before)).decode(),
            }
        finally:
            scorer.kill()
            scorer.wait()
            keeper.kill()


def submitted(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL the submitter of a file, then repeatedly its runner, the worker and the server (with AOF)."""
    toll = everybody_dies(directory, rows=rows, kills=kills, seed=seed, seconds=0.3)
    return {
        "rows": rows,
        "kills": toll.kills,
        **_harmed(toll),
        "rows submitted to workers": toll.submitted,
        "rows scored again": toll.scored_again,
        "rows journalled at a kill": max(toll.journalled, default=0),
        "seconds": toll.seconds,
    }


def batch(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL the gateway, a runner, the worker and the server (with AOF), in the middle of a batch."""
    toll = everybody_dies_in_a_batch(directory, lines=rows, kills=kills, seed=seed, seconds=0.3)
    return {
        "lines": rows,
        "kills": toll.kills,
        **_harmed(toll),
        "seconds": toll.seconds,
    }


def _harmed(toll: Toll) -> Figures:
    return {f"rows {what}": getattr(toll, what) for what in ("lost", "doubled", "different", "moved")}


def harm(output: Path, undisturbed: Path) -> Figures:
    """How the rows of an output differ from those of an undisturbed run."""
    return {f"rows {what}": count for what, count in asdict(damage(output, undisturbed)).items()}


def slow_model(directory: Path) -> Path:
    """A random model that takes about a millisecond for a pair on a core, so that kills find work."""
    return random_bert(directory / "model", hidden=128, layers=3)


@dataclass(frozen=True)
class Scenario:
    """The function of a scenario, and the size of it that the documents show."""

    run: Callable[[Path, int, int, int], Figures]
    rows: int
    kills: int


SCENARIOS = {
    "producer": Scenario(producer, 100_000, 20),
    "worker": Scenario(worker, 100_000, 55),
    "rq-worker": Scenario(rq_worker, 250_000, 50),
    "redis-aof": Scenario(redis_aof, 100_000, 10),
    "redis-bare": Scenario(redis_bare, 100_000, 10),
    "redis-flush": Scenario(redis_flush, 100_000, 10),
    "redis-behind": Scenario(redis_behind, 100_000, 10),
    "redis-lists": Scenario(redis_lists, 100_000, 10),
    "redis-failover": Scenario(redis_failover, 100_000, 5),
    "redis-full": Scenario(redis_full, 100_000, 5),
    "submitted": Scenario(submitted, 100_000, 5),
    "batch": Scenario(batch, 50_000, 3),
}


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `action` took, and what it returned."""
    started = time.monotonic()
    result = action()
    return time.monotonic() - started, result


def peak(client: redis.Redis) -> float:
    """The most memory the server has used, in MiB."""
    return float(client.info("memory")["used_memory_peak"]) / (1 << 20)


def write_rows(path: Path, rows: int) -> Path:
    """Pairs with an ``id``, of different lengths."""
    texts = [f"{'moon river ' * (n % 7)}{n}" for n in range(rows)]
    pq.write_table(pa.table({"id": range(rows), "query": ["big cat"] * rows, "passage": texts}), path)
    return path


if __name__ == "__main__":
    main()
