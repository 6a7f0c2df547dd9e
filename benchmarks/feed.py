"""Measures how many pairs a second a host can feed, with a device that computes nothing.

    python -m benchmarks.feed                                    # the shipped model and pairs
    python -m benchmarks.feed --model DIR --pairs FILE --runs 3
    python -m benchmarks.feed --model DIR --token-ns 20          # a device of 50 million tokens/s
    python -m benchmarks.feed --token-ns 7 --launches 300 --launch-us 20    # launches as those of CUDA
    python -m benchmarks.feed --workers 2                        # processes that share the device
    python -m benchmarks.feed --switch-us 10                     # threads of the worker take turns so often

A score-file, a server and one or more workers work as always. The texts are tokenized by the model's
tokenizer, and batches are put together, planned and sent to a device. As a GPU would, the device answers
after a given time for each token, while the host prepares the next batch. With ``--launches``, the forward's
thread spends the given CPU time for each launch of a batch, outside of Python's lock, and takes the lock
again after each, as PyTorch's operations do. The command prints the pairs a second from the call of
score-file to the finished file, with processes, model and tokenizer ready before. It also prints the CPU time
for a pair of each process and of the busiest thread, which is the limit if there are enough cores. A file's
pairs are repeated, with a number before each passage, so no two are the same. A fast tokenizer library, if
one is installed, is proven before, as on a host that knows the tokenizer; ``--slow`` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import timeit
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.cluster import Cluster, cluster
from benchmarks.producer import measure, write_input
from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.torch.packed import PackedRows
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.models.description import describe
from rankmill.workers.models.loading import Loaded
from rankmill.workers.models.sources import find_source
from rankmill.workers.worker import ScoringWorker

TOKEN_NS = "FEED_TOKEN_NS"
"""Environment variable with the nanoseconds that the device takes for a token; the default is 0."""

LAUNCHES, LAUNCH_US = "FEED_LAUNCHES", "FEED_LAUNCH_US"
"""Environment variables with the launches of a batch, and the µs of CPU time of each."""

SLOW = "FEED_SLOW"
"""Environment variable that is set if no fast tokenizer library is to be used."""

SWITCH_US = "FEED_SWITCH_US"
"""Environment variable with the µs after which the worker's threads take turns; the default is Python's."""

WARM_UP = 4096
"""Pairs of a run that precedes the measured ones."""


class FeedWorker(ScoringWorker):
    """A ScoringWorker with a model's own tokenizer, and a device that computes nothing."""

    def load(self, spec: ScoreSpec) -> Loaded:
        if microseconds := float(os.environ.get(SWITCH_US, "0")):
            sys.setswitchinterval(microseconds / 1e6)
        cache = cache_folder(self._settings.cache_dir)
        found = find_source(spec, self._copies, cache)
        about = describe(found.files, found.revision, cache)
        if SLOW in os.environ:
            about = replace(about, cache=None)
        elif about.joiner:
            about.joiner.texts.settle()
        launches = Launches(int(os.environ.get(LAUNCHES, "0")), float(os.environ.get(LAUNCH_US, "0")) / 1e6)
        device: Any = IdleDevice("fp32", float(os.environ.get(TOKEN_NS, "0")) / 1e9, launches)
        return Loaded(about, device, found.revision)


class Launches:
    """Spends the CPU time of a batch's launches in checksums, which need Python's lock only between each
    other.

    How many bytes take this time is measured at the start.
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._data = count, b""
        if count:
            sample = bytes(1 << 20)
            taken = min(timeit.repeat(lambda: zlib.crc32(sample), number=10, repeat=5)) / 10
            self._data = bytes(max(round(len(sample) * seconds / taken), 1))

    def run(self) -> None:
        for _ in range(self._count):
            zlib.crc32(self._data)


@dataclass
class IdleDevice:
    """An asynchronous backend that takes `seconds` for each token, for one batch after the other."""

    precision: str
    seconds: float
    launches: Launches
    name: str = "idle"
    device: str = "cpu"
    depth: int = 2
    bytes: int = 0
    shares_prefixes: bool = False
    packs: bool = True
    pieces: int = 1
    _free: float = 0.0

    def submit(self, batch: Batch) -> IdleForward:
        """Begin a batch, packed as for a GPU; a row's score is the number of its first token."""
        rows = PackedRows.of(batch.rows, None, 0)
        rows.filled(rows.shape)
        self.launches.run()
        self._free = max(self._free, time.monotonic()) + len(rows.ids) * self.seconds
        return IdleForward(rows.ids[rows.read + 1].astype(np.float32), self._free)


@dataclass(frozen=True)
class IdleForward:
    """A batch that is done at a set time."""

    logits: Logits
    end: float

    def result(self) -> Logits:
        left = self.end - time.monotonic()
        if left > 0:
            time.sleep(left)
        return self.logits


def main() -> None:
    """Measure, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="whose tokenizer; a directory, or demo")
    parser.add_argument("--pairs", default="varied", help="a file, or varied, example")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chunk-size", default="8192", help="rows, or auto")
    parser.add_argument("--token-ns", type=float, default=0.0, help="for a token; 0: at once")
    parser.add_argument("--launches", type=int, default=0, help="of each batch")
    parser.add_argument("--launch-us", type=float, default=0.0, help="CPU time of a launch, in µs")
    parser.add_argument("--token-budget", type=int, default=65536, help="padded tokens in a batch")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a worker")
    parser.add_argument("--switch-us", type=float, default=0.0, help="to find races; 0: Python's interval")
    parser.add_argument("--slow", action="store_true", help="tokenize by tokenizers alone")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="folder for the last run's profile of score-file")
    args = parser.parse_args()
    os.environ[TOKEN_NS] = str(args.token_ns)
    os.environ |= {LAUNCHES: str(args.launches), LAUNCH_US: str(args.launch_us)}
    os.environ[SWITCH_US] = str(args.switch_us)
    if args.slow:
        os.environ[SLOW] = "1"
    os.environ["RANKMILL_TOKEN_BUDGET"] = str(args.token_budget)
    os.environ.setdefault("RANKMILL_CLAIM_AHEAD", "65536")
    with (
        tempfile.TemporaryDirectory() as name,
        cluster(args.workers, args.threads, "benchmarks.feed.FeedWorker") as place,
    ):
        source = write_input(Path(name), args.pairs, args.rows, "parquet")
        (Path(name) / "first").mkdir()
        first = write_input(Path(name) / "first", args.pairs, WARM_UP, "parquet")
        feed(first, WARM_UP, place, args, None)
        for run in range(args.runs):
            profile = args.profile if run == args.runs - 1 else None
            print(json.dumps(feed(source, args.rows, place, args, profile)), flush=True)


def feed(
    source: Path, rows: int, place: Cluster, args: argparse.Namespace, profile: Path | None
) -> dict[str, Any]:
    """Score a file of `rows` pairs; returns the pairs a second, and by process the µs of CPU for a pair."""
    before = cpu_seconds(place)
    threads = thread_seconds(place.workers)
    found = measure(str(source), place.url, rows, args.chunk_size, profile, args.model)
    cpu = {name: seconds - before[name] for name, seconds in cpu_seconds(place).items()}
    cpu["producer"] = found["cpu_seconds"]
    later = thread_seconds(place.workers)
    busiest = max(seconds - threads.get(each, 0.0) for each, seconds in later.items())
    micro = {name: round(1e6 * seconds / rows, 2) for name, seconds in cpu.items()}
    return {
        "rows": rows,
        "pairs_per_second": round(rows / found["seconds"]),
        "cpu_us_per_pair": round(sum(micro.values()), 2),
        **micro,
        "busiest_thread_of_worker": round(1e6 * busiest / rows, 2),
        "busiest_thread_of_producer": found["busiest_thread_per_million"],
    }


def thread_seconds(workers: list[psutil.Process]) -> dict[int, float]:
    """CPU time of each thread of the workers so far, by its id."""
    threads = [thread for worker in workers for thread in worker.threads()]
    return {thread.id: thread.user_time + thread.system_time for thread in threads}


def cpu_seconds(place: Cluster) -> dict[str, float]:
    """CPU time so far of the server, and of the workers together."""
    processes = {"server": [place.server], "worker": place.workers}
    return {name: sum(sum(each.cpu_times()[:2]) for each in of) for name, of in processes.items()}


if __name__ == "__main__":
    main()
