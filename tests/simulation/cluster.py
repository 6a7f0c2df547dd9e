"""The processes of a simulated cluster: the product's own code, with a model that follows from the texts."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rq.timeouts import BaseDeathPenalty

from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.priority import NOBODY, Priority, Tenant
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.orders import give_order
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import WorkerReport
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.jobs.system import system
from rankmill.producer.client import sync_client
from rankmill.producer.client.sync_client import Client
from rankmill.producer.collect.detached import submit_detached
from rankmill.workers.batches.tokens import Batch, Tokens
from rankmill.workers.engine import batch_size
from rankmill.workers.models.loading import Loaded, Model
from rankmill.workers.worker import ScoringWorker
from tests.simulation.world import Process, World, world

if TYPE_CHECKING:
    from tests.simulation.disk import Disk
    from tests.simulation.producers import Command

LOAD, PROOF = 0.5, 0.1
"""Seconds that a simulated model takes to load, and to score the probes."""

MODEL = "simulated/model"
NO_MODEL = "nobody/has-it"
REQUEST_ROWS = 8
"""Pairs of each of the requests that one producer sends after the other."""

_ANSWER_SECONDS = 10.0
"""How long somebody waits for a worker's answer to an order."""

REFUSALS = ("has content", "cannot be had", "the run is deterministic")
"""What a worker says that is another machine than the run's first one, by a part of it."""
POISON = "kills its worker"
"""A passage whose forward ends the worker's process."""


Pair = tuple[str | None, str | None]


@dataclass(frozen=True)
class Machine:
    """What decides a worker's scores, apart from the pairs: its precision, its model's files, its CPU."""

    precision: str = "fp32"
    content: str | None = None
    cpu: str = "x"

    @property
    def kind(self) -> str:
        """What decides the bits of deterministic scores."""
        return f"{self.cpu}, {self.precision}"


MACHINES = (
    Machine(),
    Machine("bf16"),
    Machine(cpu="y"),
    Machine("int8 weights"),
    Machine(content="a" * 64),
    Machine(content="b" * 64),
    Machine("bf16", content="b" * 64),
)
"""What workers may be; the place of one says what it adds to its scores."""

_APART = 4.0
"""What a machine adds to its scores more than the one before it; scores of a broken device are 2 too high."""


@dataclass(frozen=True)
class Submitted:
    """A run of a scenario: its pairs, options and tenant, and when it begins."""

    name: str
    pairs: tuple[Pair, ...]
    at: float
    kind: str
    priority: Priority | None = None
    model: str = MODEL
    tenant: Tenant = NOBODY
    deterministic: bool = False
    of_texts: bool = False
    """Whether the passages alone are scored."""

    def texts(self, row: int) -> tuple[str, str]:
        """What of a row is scored."""
        query, passage = self.pairs[row]
        return "" if self.of_texts else query or "", passage or ""

    @property
    def kills(self) -> bool:
        """Whether one of its rows ends the worker that scores it."""
        return any(passage == POISON for _, passage in self.pairs)


class Told(NamedTuple):
    """What a score says of its device: the place of its machine, and whether it was broken."""

    place: int
    broken: bool


def told_by(score: float, query: str, passage: str) -> Told | None:
    """What a pair's score says of the device; ``None``: it is not that pair's."""
    twice = (score - (first_token(query, passage) / 2**31 - 1)) / (_APART / 2)
    place, broken = divmod(round(twice) if math.isfinite(twice) else -1, 2)
    if place not in range(len(MACHINES)) or not math.isclose(twice, round(twice), abs_tol=1e-5):
        return None
    return Told(place, bool(broken))


def first_token(query: str, passage: str) -> int:
    """The token with which a pair begins, which says its score."""
    return zlib.crc32(f"{query}\0{passage}".encode())


class Tokenizer:
    """One token for each word, of which the first is a digest of the pair."""

    pad_id = 0
    texts = None

    def __call__(self, queries: Sequence[str], passages: Sequence[str] | None) -> Tokens:
        alone = passages is None  # these are no queries then
        pairs = [("", text) for text in queries] if alone else list(zip(queries, passages or (), strict=True))
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
    device: Device

    def result(self) -> npt.NDArray[np.float32]:
        first = self.batch.ids[:, 0]
        world().sleep(self.seconds)
        world().history.forwarded()
        world().computed.update(first.tolist())
        if (first >= 2**40).any():
            world().tell("a row kills its worker")
            world().exit(137)
        return (first / 2**31 - 1 + self.device.added).astype(np.float32)


@dataclass
class Proven:
    """What the probes have shown."""

    holds: bool


@dataclass
class Device:
    """A backend that computes nothing; ``row_seconds`` is its time for a row.

    ``broken``: since when it has computed wrong scores.
    """

    row_seconds: float
    machine: Machine
    process: Process
    name: str = "simulated"
    device: str = "cpu"
    depth: int = 1
    pieces: int = 1
    bytes: int = 1
    shares_prefixes: bool = False
    packs: bool = False

    @property
    def precision(self) -> str:
        """That of its machine."""
        return self.machine.precision

    @property
    def added(self) -> float:
        """What it adds to its scores."""
        return _APART * (MACHINES.index(self.machine) + 0.5 * (self.process in world().history.broken))

    def submit(self, batch: Batch) -> Pending:
        world().history.forward(batch.ids[:, 0].tolist())
        return Pending(batch, self.row_seconds * len(batch.ids), self)

    def prove(self) -> Proven:
        """Score the probes."""
        world().sleep(PROOF)
        if is_broken := self.process in world().history.broken:
            world().history.noticed.add(self.process)
        return Proven(not is_broken)


class Memory:
    """A host's memory, always the same: that of the host that simulates would decide what follows."""

    _USED, _FREE, _FORWARD = 1 << 30, 16 << 30, 1 << 20

    def used(self) -> int:
        return self._USED

    def free(self) -> int:
        return self._FREE

    def peak(self) -> int:
        return self._USED + self._FORWARD

    def begin(self) -> None:
        pass


class SimulatedLoaded(Loaded):
    """Its model is the same for every spec, but for what rows are."""

    def model(self, spec: ScoreSpec) -> Model:
        device: Any = self.backend
        tokenizer: Any = Tokenizer()
        return Model(
            MODEL,
            tokenizer,
            device,
            lambda logits: logits,
            self.revision,
            kind=device.machine.kind if spec.deterministic else None,
            prove_again=device.prove,
            inputs=spec.inputs,
        )


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
    machine = MACHINES[0]
    lame_until = 0.0
    """Until when it can load no model."""

    def load(self, spec: ScoreSpec) -> Loaded:
        world().sleep(LOAD)
        if spec.model == NO_MODEL or world().now < self.lame_until:
            raise SpecError("there is no such directory on this host") from OSError()
        if world().stumbles:
            world().stumbles -= 1
            raise RuntimeError("an error that nobody has foreseen")
        here, machine = world().current, self.machine
        assert here
        if spec.precision not in {"auto", machine.precision.partition(" ")[0]}:
            raise SpecError(f"{spec.precision} cannot be had on this host")
        if spec.revision not in {None, machine.content}:
            raise WorkerError(f"the model has content {machine.content}, and the run has {spec.revision}")
        world().history.loads()
        device = Device(self.row_seconds, machine, here.process)
        return SimulatedLoaded(None, device, machine.content)  # type: ignore[arg-type]

    def _report(self) -> WorkerReport:
        """Without figures, which all workers of this process would have in common."""
        return WorkerReport(
            device="cpu",
            started=self._started,
            beat=system.now(),
            claim_ahead=self._claim_ahead,
            refusals=(*self._refusals.reasons(), *self._orders.cold.values()),
            drained=self._orders.drained,
            answers=self._orders.answers(),
            doing=self._doing,
        )

    def terminate(self) -> None:
        """As SIGTERM does, which RQ answers with signal handlers of the real process."""
        if hasattr(self, "_heartbeat"):
            self.signalled(1)
            self._shutdown()

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
    token_budget
        Tokens of a batch at most: the search for it computes batches again.
    settings
        Settings by name, for all processes.
    """

    def __init__(self, mine: World, *, token_budget: int = 2048, **settings: Any) -> None:
        self.world = mine
        self.options = {"model": MODEL, "queue": "q", "chunk_size": 16, "log_level": "error", **settings}
        self.settings: Settings = load_settings(self.options)
        for name in ("heartbeat_seconds", "lease_seconds", "redis_wait_seconds", "claim_ahead"):
            value = self.options.get(name)
            if value is not None:
                mine.patch_environ(f"RANKMILL_{name.upper()}", str(value))
        mine.patch_environ("RANKMILL_METRICS_ADDRESS", "none")
        mine.patch_environ("RANKMILL_TOKEN_BUDGET", str(token_budget))
        self.workers: list[Process] = []
        self._running: dict[Process, Worker] = {}
        self.runners: list[Process] = []
        self.producers: list[Command] = []
        self.disk: Disk | None = None
        self.begun: dict[Process, set[str]] = defaultdict(set)
        """Runs that each process has begun."""
        self.abandoned = mine.history.abandoned
        """Runs whose process has died, or that are kept for others: their keys stay until they expire."""
        self._number = 0
        mine.patch(batch_size, "memory_of", lambda device: Memory())
        mine.patch(Client, "_new_run", self._noting(Client._new_run))
        mine.patch(sync_client, "submit_detached", self._noting_detached(submit_detached))

    def worker(
        self,
        *,
        row_seconds: float = 0.01,
        clock: float = 0.0,
        lame: float = 0.0,
        machine: int = 0,
    ) -> Process:
        """Start a worker, which is `lame` for the first seconds of the world: it can load no model."""
        self._number += 1
        name = f"worker-{self._number}"

        def main() -> None:
            worker = Worker([self.settings.queue], connection=self.world.redis.client(), name=name)
            worker.row_seconds, worker.lame_until = row_seconds, lame
            worker.machine = MACHINES[machine]
            self._running[process] = worker
            worker.work(logging_level="ERROR")

        process = self.world.process(name, main, clock=clock)
        self.workers.append(process)
        return process

    def keep(self, **how: Any) -> None:
        """Start a worker, and another one in its place a second after each of its ends."""
        process = self.worker(**how)
        process.on_exit.append(lambda: self.later(1.0, lambda: self.keep(**how)))

    def leave_runs_of(self, process: Process) -> None:
        """A process has ended, and the next one deletes what is left of its runs."""
        self.world.history.orphans |= self.begun.pop(process, set())

    def terminate(self, process: Process) -> None:
        """Send SIGTERM to a worker."""
        if worker := self._running.get(process):
            worker.terminate()
            self.world.history.ending[process] = self.world.now

    def drain(self, process: Process, seconds: float) -> None:
        """Order a worker to take no jobs for so many seconds.

        The order to resume is given until the worker has read it, as the server may lose it.
        """
        worker, client, history = self._running.get(process), self.world.redis.client(), self.world.history
        if worker is None or not hasattr(worker, "_orders"):
            return
        give_order(client, worker.name, "drain", started=worker._started)
        history.drained[process] = since = self.world.now
        history.resuming.discard(process)
        self.world.sleep(seconds)
        history.resuming.add(process)
        order = ""
        while process.alive and order not in worker._orders._answers:
            order = give_order(client, worker.name, "resume", started=worker._started)
            self.world.sleep(_ANSWER_SECONDS)
        if history.drained.get(process) == since:  # not drained anew meanwhile
            del history.drained[process]

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

    def _noting_detached(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def noting(store: RunStore, run: Run, *args: Any) -> Any:
            self.world.history.detached.add(run.id)
            return submit(store, run, *args)

        return noting

    def settings_of(self, run: Submitted | None) -> Settings:
        """Settings of a process that submits a run, or of one that submits none."""
        if run is None:
            return self.settings
        own = {"deterministic": run.deterministic, "tenant": run.tenant.name, "weight": run.tenant.weight}
        return self.settings.model_copy(update=own)

    def file_settings(self, run: Submitted | None = None) -> Settings:
        """Settings of processes with files."""
        assert self.disk
        cache = str(self.disk.root / "cache")
        own = {"redis_url": "redis://simulated", "metrics_address": "none", "cache_dir": cache}
        return self.settings_of(run).model_copy(update=own)

    def client(self, run: Submitted | None = None) -> Client:
        """A client, for the code of a producer's process."""
        return SimulatedClient("redis://simulated", settings=self.settings_of(run))

    def producer(self, name: str, main: Callable[[Client], object], *, clock: float = 0.0) -> Process:
        """Start a process that submits runs."""
        return self.world.process(name, lambda: main(self.client()), clock=clock)


class SimulatedClient(Client):
    """A client of the world's server."""

    def _store_at(self, url: str) -> RunStore:
        return RunStore(world().redis.client(self.settings.redis_wait_seconds))

    def _opened(self) -> None:
        """Do not look at the server's settings, which the simulation does not have."""
