"""The processes of a simulated cluster: the product's own code, with a model that follows from the texts."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rq.timeouts import BaseDeathPenalty

from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.producer.client.sync_client import Client
from rankmill.workers.batches.tokens import Batch, Tokens
from rankmill.workers.models.loading import Loaded, Model
from rankmill.workers.worker import ScoringWorker
from tests.simulation.world import Process, World, world

if TYPE_CHECKING:
    from tests.simulation.disk import Disk
    from tests.simulation.producers import Command

MODEL = "simulated/model"
POISON = "kills its worker"
"""A passage whose forward ends the worker's process."""


Pair = tuple[str | None, str | None]


@dataclass(frozen=True)
class Submitted:
    """A run of a scenario: what is scored, how, and when it begins."""

    name: str
    pairs: tuple[Pair, ...]
    at: float
    kind: str


def score_of(query: str, passage: str) -> float:
    """The score of a pair, as a float32 has it."""
    return float(np.float32(first_token(query, passage) / 2**31 - 1))


def first_token(query: str, passage: str) -> int:
    """The token with which a pair begins, which says its score."""
    return zlib.crc32(f"{query}\0{passage}".encode())


class Tokenizer:
    """One token for each word, of which the first is a digest of the pair."""

    pad_id = 0

    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        pairs = list(zip(queries, passages, strict=True))
        lengths = [1 + len(query.split()) + len(passage.split()) for query, passage in pairs]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.ones(offsets[-1], np.int64)
        ids[offsets[:-1]] = [first_token(*pair) + (2**40 if pair[1] == POISON else 0) for pair in pairs]
        return Tokens(ids, None, offsets)


@dataclass
class Pending:
    """A forward that takes its time."""

    batch: Batch
    seconds: float

    def result(self) -> npt.NDArray[np.float32]:
        world().sleep(self.seconds)
        first = self.batch.ids[:, 0]
        world().computed.update(first.tolist())
        if (first >= 2**40).any():
            world().tell("a row kills its worker")
            world().exit(137)
        return (first / 2**31 - 1).astype(np.float32)


@dataclass
class Device:
    """A backend that computes nothing; ``row_seconds`` is its time for a row."""

    row_seconds: float
    name: str = "simulated"
    device: str = "cpu"
    precision: str = "fp32"
    depth: int = 1
    bytes: int = 1
    shares_prefixes: bool = False

    def submit(self, batch: Batch) -> Pending:
        return Pending(batch, self.row_seconds * len(batch.ids))


class SimulatedLoaded(Loaded):
    """Its model is the same for every spec."""

    def model(self, spec: ScoreSpec) -> Model:
        return Model(MODEL, Tokenizer(), self.backend, lambda logits: logits, None)  # type: ignore[arg-type]


class NoPenalty(BaseDeathPenalty):
    """Virtual time needs no alarm."""

    def setup_death_penalty(self) -> None:
        pass

    def cancel_death_penalty(self) -> None:
        pass


class Worker(ScoringWorker):
    """A ScoringWorker with a simulated model, and without signals and listeners."""

    death_penalty_class = NoPenalty
    row_seconds = 0.01

    def load(self, spec: ScoreSpec) -> Loaded:
        world().sleep(0.5)
        return SimulatedLoaded(None, Device(self.row_seconds), None)  # type: ignore[arg-type]

    def _install_signal_handlers(self) -> None:
        pass

    def subscribe(self) -> None:
        self.pubsub_thread = None

    def unsubscribe(self) -> None:
        pass


class Cluster:
    """A server, its workers and producers.

    Parameters
    ----------
    mine
        The world.
    settings
        Settings by name, for all processes.
    """

    def __init__(self, mine: World, **settings: Any) -> None:
        self.world = mine
        self.options = {"model": MODEL, "queue": "q", "chunk_size": 16, "log_level": "error", **settings}
        self.settings: Settings = load_settings(self.options)
        for name in ("heartbeat_seconds", "lease_seconds", "redis_wait_seconds", "claim_ahead"):
            value = self.options.get(name)
            if value is not None:
                mine.patch_environ(f"RANKMILL_{name.upper()}", str(value))
        mine.patch_environ("RANKMILL_METRICS_ADDRESS", "none")
        mine.patch_environ("RANKMILL_TOKEN_BUDGET", "2048")  # the search for one computes batches again
        self.workers: list[Process] = []
        self.runners: list[Process] = []
        self.producers: list[Command] = []
        self.disk: Disk | None = None
        self.begun: dict[Process, set[str]] = defaultdict(set)
        """Runs that each process has begun."""
        self.abandoned: set[str] = set()
        """Runs whose process has died, or that are kept for others: their keys stay until they expire."""
        self._number = 0
        mine.patch(Client, "_new_run", self._noting(Client._new_run))

    def worker(self, *, row_seconds: float = 0.01, clock: float = 0.0) -> Process:
        """Start a worker."""
        self._number += 1
        name = f"worker-{self._number}"

        def main() -> None:
            worker = Worker([self.settings.queue], connection=self.world.redis.client(), name=name)
            worker.row_seconds = row_seconds
            worker.work(logging_level="ERROR")

        process = self.world.process(name, main, clock=clock)
        self.workers.append(process)
        return process

    def keep(self, *, row_seconds: float, clock: float = 0.0) -> None:
        """Start a worker, and another one in its place a second after each of its ends."""
        process = self.worker(row_seconds=row_seconds, clock=clock)
        process.on_exit.append(
            lambda: self.later(1.0, lambda: self.keep(row_seconds=row_seconds, clock=clock))
        )

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something after some seconds, outside of all processes."""
        mine = self.world

        def main() -> None:
            mine.sleep(seconds)
            do()

        mine.process("world", main)

    def _noting(self, new_run: Callable[..., Run]) -> Callable[..., Run]:
        def noting(*args: Any, **options: Any) -> Run:
            run = new_run(*args, **options)
            assert self.world.current
            self.begun[self.world.current.process].add(run.id)
            return run

        return noting

    @property
    def file_settings(self) -> Settings:
        """Settings of processes with files."""
        assert self.disk
        cache = str(self.disk.root / "cache")
        own = {"redis_url": "redis://simulated", "metrics_address": "none", "cache_dir": cache}
        return self.settings.model_copy(update=own)

    def client(self) -> Client:
        """A client, for the code of a producer's process."""
        return SimulatedClient("redis://simulated", settings=self.settings)

    def producer(self, name: str, main: Callable[[Client], object], *, clock: float = 0.0) -> Process:
        """Start a process that submits runs."""
        return self.world.process(name, lambda: main(self.client()), clock=clock)


class SimulatedClient(Client):
    """A client of the world's server."""

    def _connect(self, url: str) -> RunStore:
        return RunStore(world().redis.client(self.settings.redis_wait_seconds))
