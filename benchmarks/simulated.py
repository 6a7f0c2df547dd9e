"""Measures how well the queue keeps many workers busy, with workers that sleep instead of computing.

    python -m benchmarks.simulated --workers 1 8 32 64 --kill-every 10
    python -m benchmarks.simulated --workers 8 --chunk-seconds 0.25 --kill-after 10

Claims, leases, heartbeats, pipeline and results are those of every ScoringWorker; only the models are
replaced. For each number of workers it prints and plots the chunks finished in each second, and prints their
share of the ideal, in which no live worker ever waits. A killed worker is not replaced without ``--replace``.

The workers are forked from one process that has imported their modules, so that 64 of them start in seconds
on two cores. To start one by hand: ``rq worker rankmill --serializer json --worker-class
benchmarks.simulated.SimulatedWorker``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks.cluster import valkey, wait_until
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunCancelled
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.producer.client.runs import ScoringRun
from rankmill.workers.batches.layout import PLAIN
from rankmill.workers.batches.tokens import Batch, Tokens
from rankmill.workers.models.description import Description
from rankmill.workers.models.loading import Loaded, Model
from rankmill.workers.worker import ScoringWorker

SECONDS = "RANKMILL_SIMULATED_SECONDS"
"""Environment variable with the seconds that a simulated forward of 1,000 pairs takes; the default is 1."""

FIRST = "SIMULATED_FIRST"
"""Environment variable with a file that gets the time (s, `time.monotonic`) of any worker's first score."""

LENGTHS = "SIMULATED_LENGTHS"
"""Environment variable with the number of tokens of the average pair. If it is set, a simulated pair has as
many tokens as words, and a forward takes as long as its padded tokens.
"""

SCORED = "SIMULATED_SCORED"
"""Environment variable with a file that gets the end (s, `time.monotonic`) and the tokens of each batch."""

TOKENS = 16
"""Tokens of a simulated pair without `LENGTHS`; a batch of the default token budget holds 128 such pairs."""

_MODULES = [
    "benchmarks.cluster",
    "producer",
    "rq.cli.cli",
    "rankmill.workers.worker",
]
"""The modules that workers import, apart from this one, which runs as ``__main__``."""

WARM_UP = 5.0
"""Seconds at the start of a run that are not measured, because the window is still growing."""

SAMPLE = 0.1
"""Seconds between two looks at the number of finished chunks."""


class SimulatedWorker(ScoringWorker):
    """A ScoringWorker whose forward sleeps; a score depends only on the two texts (`simulated_score`)."""

    def load(self, spec: ScoreSpec) -> Loaded:
        precision = "fp32" if spec.precision == "auto" else spec.precision
        sleeper: Any = _Backend(precision, float(os.environ.get(SECONDS, "1")))
        return _SimulatedModel(Description(None, _Tokenizer(), PLAIN), sleeper, None)

    def _prepare(self, settings: WorkerSettings) -> None:
        fixed: dict[str, object] = {"device": "cpu", "threads": 1}
        if settings.token_budget == "auto" and LENGTHS not in os.environ:  # a search for one would sleep
            fixed["token_budget"] = TOKEN_BUDGETS["cpu"]
        super()._prepare(settings.model_copy(update=fixed))


def simulated_score(query: str, passage: str) -> float:
    """The score that a SimulatedWorker gives a pair, from 0 to 1."""
    return (zlib.crc32(passage.encode(), zlib.crc32(query.encode())) & 0xFFFF) / 0xFFFF


class _Tokenizer:
    """Makes pairs of `TOKENS` tokens, or of one for each word; the first token is the score."""

    pad_id = 0
    texts = None
    max_length = 512

    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        pairs = list(zip(queries, passages, strict=True))
        words = LENGTHS in os.environ
        lengths = [len(" ".join(pair).split()[: self.max_length]) if words else TOKENS for pair in pairs]
        starts = np.cumsum([0, *lengths])
        ids = np.zeros(starts[-1], np.int64)
        ids[starts[:-1]] = [round(simulated_score(*pair) * 0xFFFF) for pair in pairs]
        return Tokens(ids, None, starts)


@dataclass(frozen=True)
class _Pending:
    logits: np.ndarray
    end: float
    tokens: int

    def result(self) -> np.ndarray:
        time.sleep(max(self.end - time.monotonic(), 0.0))
        if FIRST in os.environ:
            with suppress(FileExistsError), Path(os.environ[FIRST]).open("x") as file:
                file.write(str(time.monotonic()))
        if SCORED in os.environ:
            with Path(os.environ[SCORED]).open("a") as file:
                file.write(f"{time.monotonic()} {self.tokens}\n")
        return self.logits


@dataclass
class _Backend:
    """Runs batches one after the other while the CPU prepares the next one, as a GPU does."""

    precision: str
    seconds: float
    name: str = "simulated"
    device: str = "cpu"
    depth: int = 2
    bytes: int = 0
    shares_prefixes: bool = False
    packs: bool = False
    pieces: int = 1
    _free: float = 0.0

    def submit(self, batch: Batch) -> _Pending:
        pairs = batch.ids.size / float(os.environ[LENGTHS]) if LENGTHS in os.environ else len(batch.ids)
        self._free = max(self._free, time.monotonic()) + pairs * self.seconds / 1000
        return _Pending((batch.ids[:, 0] / 0xFFFF).astype(np.float32), self._free, int(batch.mask.sum()))


class _SimulatedModel(Loaded):
    """Like a loaded model, for any spec."""

    def model(self, spec: ScoreSpec) -> Model:
        return Model(spec.model, self.about.tokenizer, self.backend, lambda logits: logits, None)


@dataclass
class SimulatedCluster:
    """A server, and SimulatedWorkers on queue ``rankmill``, which can be killed one by one."""

    url: str
    folder: Path
    environ: Mapping[str, str]
    workers: dict[str, BaseProcess] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.client: Any = redis.Redis.from_url(self.url)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_MODULES)

    def start(self, workers: int = 1) -> None:
        """Start workers, and wait until they listen."""
        for _ in range(workers):
            name = f"simulated-{next(self.numbers)}"
            options = (self.url, name, self.folder / "workers.log", dict(self.environ))
            self.workers[name] = self._context.Process(target=_work, args=options, name=name)
            self.workers[name].start()
        wait_until(lambda: self.workers.keys() <= queue_workers(self.client, "rankmill").scoring)

    def kill(self, rng: random.Random) -> str:
        """SIGKILL a worker; returns its name."""
        name = rng.choice(sorted(self.workers))
        process = self.workers.pop(name)
        process.kill()
        process.join()
        return name

    def stop(self) -> None:
        while self.workers:
            self.kill(random.Random(0))


@contextmanager
def simulated_cluster(
    workers: int, seconds: float, environ: Mapping[str, str] | None = None
) -> Iterator[SimulatedCluster]:
    """A server and `workers` SimulatedWorkers that take `seconds` for 1,000 pairs; all end with the block."""
    own = {SECONDS: str(seconds), "RANKMILL_METRICS_ADDRESS": "none", **(environ or {})}
    with tempfile.TemporaryDirectory() as name, valkey() as url:
        cluster = SimulatedCluster(url, Path(name), own)
        try:
            cluster.start(workers)
            yield cluster
        finally:
            cluster.stop()


def _work(url: str, name: str, log: Path, environ: Mapping[str, str]) -> None:
    """Run RQ's own command line in a forked process."""
    os.environ.update(environ)
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["rq", "worker", "rankmill", "--url", url, "--name", name, "--serializer", "json"]
    sys.argv += ["--worker-class", f"benchmarks.simulated.{SimulatedWorker.__name__}"]
    from rq.cli.cli import main

    main()


@dataclass
class Flow:
    """How the chunks of a run were finished; times are in seconds since the end of the first chunk.

    ``samples`` are ``(time, chunks finished, live workers)``, ``kills`` the times of the SIGKILLs, and
    ``server_cpu`` is the CPU time (s) of the server.
    """

    workers: int
    chunk_seconds: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    server_cpu: float = 0.0

    def finished(self, since: float, until: float) -> float:
        times, chunks, _ = zip(*self.samples, strict=True)
        first, last = np.interp([since, until], times, chunks)
        return float(last - first)

    @property
    def end(self) -> float:
        return self.samples[-1][0]

    @property
    def each_second(self) -> list[int]:
        return [round(self.finished(second, second + 1)) for second in range(int(self.end))]

    @property
    def share(self) -> float:
        """Chunks finished after the warm-up, over those of live workers that never wait."""
        worked = sum(
            live * (now - before)
            for (before, _, _), (now, _, live) in zip(self.samples, self.samples[1:], strict=False)
            if before >= WARM_UP
        )
        since = next(now for now, _, _ in self.samples if now >= WARM_UP)
        return self.finished(since, self.end) * self.chunk_seconds / worked

    def dip(self, seconds: float = 2.0) -> float:
        """The speed of the slowest `seconds` after the first kill, over the speed before it."""
        kill = self.kills[0]
        before = self.finished(WARM_UP, kill) / (kill - WARM_UP)
        starts = np.arange(kill, self.end - seconds, SAMPLE)
        return min(self.finished(start, start + seconds) for start in starts) / seconds / before


def measure(
    workers: int,
    *,
    chunk_seconds: float,
    chunk_size: int = 300,
    seconds: float = 30.0,
    kill_after: float | None = None,
    kill_every: float | None = None,
    replace: bool = False,
    seed: int = 1,
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> Flow:
    """Score an endless run for a time with simulated workers, and kill some of them.

    Parameters
    ----------
    workers
        How many workers there are at the start.
    chunk_seconds, chunk_size
        Time that a chunk takes, and its pairs.
    seconds
        How long to look, from the first finished chunk on.
    kill_after, kill_every
        Seconds until the only kill, or between kills.
    replace
        Whether another worker is started after each kill.
    seed
        Fixes which workers are killed.
    environ, settings
        Further settings of workers, as variables of their environment, and of the producer.
    """
    flow = Flow(workers, chunk_seconds)
    rng = random.Random(seed)
    # As with a second's work in 1,024 pairs: a worker holds two chunks, and a chunk is eight batches.
    scale = {"RANKMILL_CLAIM_AHEAD": str(chunk_size), "RANKMILL_TOKEN_BUDGET": str(TOKENS * chunk_size // 8)}
    with simulated_cluster(
        workers, chunk_seconds * 1000 / chunk_size, {**scale, **(environ or {})}
    ) as cluster:
        client = Client(cluster.url, model="demo", chunk_size=chunk_size, **settings)
        run = client.submit(endless_pairs())
        producer = threading.Thread(target=collect, args=(run,), daemon=True)
        producer.start()
        wait_until(lambda: finished(cluster.client, run.id))
        before = server_cpu(cluster.client)
        began, due = time.monotonic(), kill_after or kill_every
        while (now := time.monotonic() - began) < seconds:
            flow.samples.append((now, finished(cluster.client, run.id), len(cluster.workers)))
            if due is not None and now >= due and cluster.workers:
                cluster.kill(rng)
                flow.kills.append(now)
                due = now + kill_every if kill_every else None
                if replace:
                    cluster.start()
            time.sleep(SAMPLE)
        flow.server_cpu = server_cpu(cluster.client) - before
        run.cancel()
        producer.join()
    return flow


def endless_pairs() -> Iterator[tuple[str, str]]:
    """Distinct pairs without end."""
    for number in count():
        yield f"query {number // 100}", f"passage {number}: far from here, the river meets the sea at night"


def collect(run: ScoringRun) -> None:
    """Take the results of a run, as a caller does, until it is cancelled."""
    with suppress(RunCancelled):
        run.scores()


def finished(client: Any, run_id: str) -> int:
    """Results that workers have written for a run so far."""
    return int(client.xinfo_stream(keys.results(run_id))["entries-added"]) - 1  # one entry makes the stream


def server_cpu(client: Any) -> float:
    found = client.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def plot(flows: Sequence[Flow], path: Path) -> None:
    """Plot the chunks finished in each second, with a panel for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 1.7 * len(flows)), layout="constrained")
    for axes, flow in zip(figure.subplots(len(flows), squeeze=False)[:, 0], flows, strict=True):
        each = flow.each_second
        axes.step(range(len(each)), each, where="post", color="#c2410c")
        times, _, live = zip(*flow.samples, strict=True)
        axes.plot(times, np.array(live) / flow.chunk_seconds, color="#94a3b8", linestyle=":")
        for kill in flow.kills:
            axes.axvline(kill, color="black", linewidth=0.8)
        axes.set_ylim(0)
        axes.set_ylabel("chunks/s")
        axes.set_title(
            f"workers: {flow.workers}; share of the ideal: {flow.share:.2f}", loc="left", fontsize=9
        )
    axes.set_xlabel("seconds; dotted: the ideal of the live workers; lines: SIGKILLs")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--chunk-seconds", type=float, default=1.0, help="time that a chunk takes")
    parser.add_argument("--chunk-size", type=int, default=300, help="pairs in a chunk; few cost little CPU")
    parser.add_argument("--seconds", type=float, default=30, help="length of each run")
    kills = parser.add_mutually_exclusive_group()
    kills.add_argument("--kill-after", type=float, metavar="S", help="SIGKILL one worker after S seconds")
    kills.add_argument("--kill-every", type=float, metavar="S", help="SIGKILL one worker every S seconds")
    parser.add_argument("--replace", action="store_true", help="start another worker after each kill")
    parser.add_argument("--seed", type=int, default=1, help="fixes which workers are killed")
    parser.add_argument("--out", type=Path, default=Path("simulated.svg"), help="the plot, .svg or .png")
    options = vars(parser.parse_args())
    out = options.pop("out")
    flows = []
    for workers in options.pop("workers"):
        flows.append(flow := measure(workers, **options))
        print(f"workers: {workers}; chunks in each second:", *flow.each_second)
        cpu = flow.server_cpu / flow.end
        print(f"  share of the ideal {flow.share:.3f}; the server used {cpu:.3f} of a core")
        if options["kill_after"]:
            print(f"  slowest 2 s window after over before: {flow.dip():.2f}", flush=True)
    plot(flows, out)


if __name__ == "__main__":
    main()
