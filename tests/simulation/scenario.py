"""One simulated cluster from its beginning to its end: who is there, what goes wrong, what must be true."""

from __future__ import annotations

import logging
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rankmill.workers.worker as worker_module
from tests.simulation import checker, files, host_faults, producers, runners, tasks
from tests.simulation.cluster import POISON, Cluster, Pair, Submitted
from tests.simulation.disk import Disk
from tests.simulation.faults import KINDS as SERVER_KINDS
from tests.simulation.faults import Fault
from tests.simulation.server import Server
from tests.simulation.world import Deadlock, TooLong, World, living_in

KINDS = {**SERVER_KINDS, **host_faults.KINDS}

RUNS: dict[str, type[producers.Command]] = {
    **producers.KINDS,
    "file": files.FileCommand,
    "submitted": runners.SubmittedCommand,
    "batch": runners.BatchCommand,
}
"""How runs are submitted, by the first word of their kind."""

FILES = ("file", "submitted", "batch")
"""How the kinds of runs begin that need a disk."""

RUN_KINDS = (
    "live", "live", "detached", "detached", "asyncio", "asyncio", "requests", "cancelled", "file parquet",
    "file jsonl", "file parts", "submitted parquet", "submitted parts", "submitted cancelled", "batch",
)  # fmt: skip

SETTLING_SECONDS = 60.0
"""How long the workers go on after the last run has ended, until nothing of it may be left."""


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed decides before the world begins; a smaller one is made by leaving out lines."""

    seed: int
    workers: tuple[float, ...]
    clocks: tuple[float, ...]
    runs: tuple[Submitted, ...]
    faults: tuple[Fault, ...]
    chunk_size: int
    runners: tuple[float, ...] = ()
    """Clocks of the runners' hosts."""

    @classmethod
    def drawn(cls, seed: int) -> Scenario:
        """The scenario of a seed."""
        dice = random.Random(f"scenario {seed}")
        workers = tuple(dice.choice([0.002, 0.01, 0.05, 0.3]) for _ in range(dice.randint(1, 4)))
        clocks = tuple(dice.choice([0.0, 0.0, 3600.0, -3600.0]) for _ in workers)
        runs = tuple(_run(dice, number) for number in range(dice.randint(1, 3)))
        has_files = any(run.kind.startswith(FILES) for run in runs)
        possible = KINDS if has_files else {*SERVER_KINDS, "kill_producer", "stop_producer"}
        kinds = dice.sample(sorted(possible), k=dice.randint(0, 4))
        faults = tuple(
            Fault(dice.uniform(0.0, 25.0), kind, dice.choice([0.1, 2.0, 20.0, 45.0]), dice.randrange(64))
            for kind in kinds
            for _ in range(dice.randint(1, 2))
        )
        in_order = tuple(sorted(faults, key=lambda each: each.at))
        hosts = dice.randint(1, 2) if any(run.kind.startswith(FILES[1:]) for run in runs) else 0
        ahead = tuple(dice.choice([0.0, 0.0, 3600.0, -3600.0]) for _ in range(hosts))
        return cls(seed, workers, clocks, runs, in_order, dice.choice([4, 16]), ahead)

    def __str__(self) -> str:
        """The scenario in a few lines."""
        runs = ", ".join(
            f"{run.name}: {len(run.pairs)} rows, {run.kind}, at {run.at:.2f} s" for run in self.runs
        )
        workers = ", ".join(
            f"{speed} s a row, clock {clock:+.0f} s"
            for speed, clock in zip(self.workers, self.clocks, strict=True)
        )
        faults = "".join(f"\n  {fault}" for fault in self.faults) or " none"
        return f"workers: {workers}\nruns: {runs}; chunks of {self.chunk_size}\nfaults:{faults}"


def _run(dice: random.Random, number: int) -> Submitted:
    pairs: list[Pair] = [
        (f"query {dice.randrange(5)}", "passage " + " ".join("w" * dice.randint(1, 9)) + f" {number} {row}")
        for row in range(dice.choice([1, 3, 40, 200]))
    ]
    for _ in range(dice.choice([0, 0, 1]) if len(pairs) > 1 else 0):
        pairs[dice.randrange(len(pairs))] = (None, "a passage without a query")
    for _ in range(dice.choice([0, 0, 0, 1])):
        pairs[dice.randrange(len(pairs))] = (f"query {number}", POISON)
    return Submitted(f"run-{number}", tuple(pairs), dice.uniform(0.0, 10.0), dice.choice(RUN_KINDS))


@dataclass
class Outcome:
    """What became of a scenario; ``problems`` are sentences, none if all is well."""

    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0
    commands: int = 0
    writes: int = 0
    """Changes of files, and their syncs."""


def play(scenario: Scenario, *, traced: bool = False, seconds: float = 900.0) -> Outcome:
    """Let a scenario happen, and check it."""
    world = World(scenario.seed, traced=traced)
    outcome = Outcome()
    logging.disable(logging.CRITICAL)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="simulation-"))
            stack.enter_context(living_in(world))
            world.redis = Server(world)
            world.redis.remembers = any(fault.kind == "roll_back" for fault in scenario.faults)
            world.patch(worker_module, "set_up", lambda *_, **__: None)
            world.patch(worker_module, "require_worker_packages", lambda: None)
            cluster = Cluster(world, chunk_size=scenario.chunk_size)
            tasks.prepare(world)
            if any(run.kind.startswith(FILES) for run in scenario.runs):
                cluster.disk = Disk(world, Path(folder))
                files.prepare(cluster)
                runners.prepare(cluster)
            for speed, clock in zip(scenario.workers, scenario.clocks, strict=True):
                cluster.keep(row_seconds=speed, clock=clock)
            lost = any(fault.kind in {"flush", "roll_back"} for fault in scenario.faults)
            commands = [RUNS[run.kind.partition(" ")[0]](cluster, run) for run in scenario.runs]
            if cluster.disk:
                cluster.disk.settle()
            for clock in scenario.runners:
                runners.keep(cluster, clock=clock)
            for fault in scenario.faults:
                cluster.later(fault.at, _happens(cluster, fault))
            try:
                world.run(lambda: not any(each.alive for each in commands), seconds=seconds)
                ended = world.now + SETTLING_SECONDS
                world.run(lambda: world.now >= ended, seconds=2 * SETTLING_SECONDS)
                if not scenario.faults:
                    outcome.problems += checker.computed_again(world, [each.run for each in commands])
                if not lost:  # a server that goes back in time has keys of runs that have ended
                    outcome.problems += checker.left(world, cluster.abandoned)
            except (Deadlock, TooLong) as error:
                outcome.problems.append(f"{type(error).__name__}: {error}")
            outcome.problems += checker.crashes(world)
            outcome.problems += [why for each in commands for why in each.wrong(lost_data=lost)]
            outcome.seconds, outcome.events = world.now, world.events
            outcome.commands = world.redis.commands
            outcome.writes = cluster.disk.steps if cluster.disk else 0
            outcome.trace = list(world.trace)
    finally:
        logging.disable(logging.NOTSET)
    return outcome


def _happens(cluster: Cluster, fault: Fault) -> Any:
    def happens() -> None:
        cluster.world.tell(f"FAULT {fault}")
        KINDS[fault.kind](cluster, fault)

    return happens


def shrink(scenario: Scenario) -> Scenario:
    """A smaller scenario that fails as well: without faults, runs and workers that it does not need."""
    smaller = True
    while smaller:
        smaller = False
        for part in ("faults", "runs", "workers"):
            have = getattr(scenario, part)
            for number in range(len(have)):
                if part != "faults" and len(have) == 1:
                    break
                change: dict[str, Any] = {part: have[:number] + have[number + 1 :]}
                if part == "workers":
                    change["clocks"] = scenario.clocks[:number] + scenario.clocks[number + 1 :]
                candidate = replace(scenario, **change)
                if play(candidate).problems:
                    scenario, smaller = candidate, True
                    break
    return scenario
