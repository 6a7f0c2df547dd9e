"""One simulated cluster from its beginning to its end: who is there, what goes wrong, what must be true."""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rankmill.workers.engine.engine as engine_module
import rankmill.workers.worker as worker_module
from rankmill.jobs.contract.priority import NOBODY, Tenant, group_of
from tests.simulation import checker, files, host_faults, producers, runners, tasks
from tests.simulation.cluster import (
    MACHINES,
    MODEL,
    NO_MODEL,
    POISON,
    Cluster,
    Pair,
    Submitted,
    first_token,
)
from tests.simulation.disk import Disk
from tests.simulation.faults import KINDS as SERVER_KINDS
from tests.simulation.faults import LOSSES, Fault
from tests.simulation.history import LEASE, History
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
    "live", "live", "live", "detached", "detached", "asyncio", "asyncio", "requests", "cancelled",
    "detached cancelled", "file parquet",
    "file jsonl", "file parts", "submitted parquet", "submitted parts", "submitted cancelled", "batch",
)  # fmt: skip

_KILLING = 3
"""One in so many seeds may have rows that kill their worker: until these are alone, three to four minutes
go by in which little else happens. In a sixth of all seeds they took almost half of the simulation's time."""

_BY_NAME = 0.1
"""Share of the seeds with a job by name."""

SETTLING_SECONDS = 60.0
"""How long the workers go on after the last run has ended, at most, until nothing of it may be left."""

_PROVE_SECONDS = 12.0
"""After so long a worker looks again whether its device computes what it should; really that is an hour."""

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder for the files of scenarios, in memory: it is the simulated disk that syncs and loses them."""

_BUSY = 20_000
"""Events in a second, at most: ten times what is seen. Who waits for something without a pause has more."""

_QUIET_SECONDS = 5.0
"""How long they go on at least, and after the last fault: what is gone stays gone."""


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed decides before the world begins; a smaller one is made by leaving out lines."""

    seed: int
    workers: tuple[float, ...]
    clocks: tuple[float, ...]
    runs: tuple[Submitted, ...]
    faults: tuple[Fault, ...]
    chunk_size: int
    lame: tuple[float, ...] = ()
    """For how many seconds each worker can load no model; those that are not named can."""
    settings: tuple[tuple[str, Any], ...] = ()
    stumbles: int = 0
    runners: tuple[float, ...] = ()
    """Clocks of the runners' hosts."""
    machines: tuple[int, ...] = ()
    """Indexes of the workers' machines in `MACHINES`; workers without one have the first."""

    @classmethod
    def drawn(cls, seed: int, number: int | None = None) -> Scenario:
        """The scenario of a seed, perhaps with another `number` of workers than it draws."""
        dice = random.Random(f"scenario {seed}")
        workers = tuple(dice.choice([0.002, 0.01, 0.05, 0.3]) for _ in range(number or dice.randint(1, 4)))
        clocks = tuple(dice.choice([0.0, 0.0, 3600.0, -3600.0]) for _ in workers)
        kills = seed % _KILLING == 0
        runs = tuple(_run(dice, number, kills=kills) for number in range(dice.randint(1, 3)))
        has_files = any(run.kind.startswith(FILES) for run in runs)
        of_hosts = host_faults.KINDS if has_files else ("kill_producer", "stop_producer")
        possible = {*SERVER_KINDS, *of_hosts}
        kinds = dice.sample(sorted(possible), k=max(dice.randint(-1, 6), 0))
        faults = tuple(
            Fault(dice.uniform(0.0, 25.0), kind, dice.choice([0.1, 2.0, 20.0, 45.0]), dice.randrange(64))
            for kind in kinds
            for _ in range(dice.randint(1, 2))
        )
        settings = {"window": dice.choice(["auto", "auto", 8]), "claim_ahead": dice.choice(["auto", 64])}
        lame = dice.choice([0.0, 0.0, 0.0, 8.0]) if len(workers) > 1 and not faults else 0.0
        may_be = dice.choice([(0,), (0,), (0, 2), (0, 1, 2, 3), (4, 5), (4, 5, 6)])
        hosts = dice.randint(1, 2) if any(run.kind.startswith(FILES[1:]) for run in runs) else 0
        runs += _by_name(seed, len(runs))
        return cls(
            seed,
            workers,
            clocks,
            runs,
            tuple(sorted(faults, key=lambda each: each.at)),
            dice.choice([4, 16]),
            lame=(lame,) if lame else (),
            settings=tuple(settings.items()),
            stumbles=dice.choice([0, 0, 0, 1]),
            machines=tuple(dice.choice(may_be) for _ in workers),
            runners=tuple(dice.choice([0.0, 0.0, 3600.0, -3600.0]) for _ in range(hosts)),
        )

    def __str__(self) -> str:
        """The scenario in a few lines."""
        runs = ", ".join(
            f"{run.name}: {len(run.pairs)} rows, {run.kind}{', bulk' * (run.priority == 'bulk')}, "
            f"{'with a row that kills, ' * run.kills}{'of no model, ' * (run.model != MODEL)}"
            f"{'deterministic, ' * run.deterministic}{'texts alone, ' * run.of_texts}"
            f"for {run.tenant.name or 'nobody'}, "
            f"at {run.at:.2f} s"
            for run in self.runs
        )
        workers = ", ".join(
            f"{speed} s a row, clock {clock:+.0f} s"
            + (f", {MACHINES[self.machines[at]]}" if at < len(self.machines) and self.machines[at] else "")
            for at, (speed, clock) in enumerate(zip(self.workers, self.clocks, strict=True))
        )
        faults = "".join(f"\n  {fault}" for fault in self.faults) or " none"
        others = ", ".join(f"{name} {value}" for name, value in self.settings) or "settings as they come"
        others += f"; {self.stumbles} loads fail" * bool(self.stumbles)
        others += f"; the first worker is lame for {self.lame[0]} s" if self.lame else ""
        return (
            f"seed {self.seed}; {others}\nworkers: {workers}\nruns: {runs}; chunks of {self.chunk_size}\n"
            f"faults:{faults}"
        )

    def has(self, *features: str) -> bool:
        """Whether it has all of some features: kinds of faults and of runs, and those of `FEATURES`."""
        kinds = {fault.kind for fault in self.faults} | {run.kind for run in self.runs}
        return all(each in kinds or (each in FEATURES and FEATURES[each](self)) for each in features)


_QUERIES = [f"query {number}" for number in range(5)]
_PASSAGES = ["passage " + " ".join("w" * words) for words in range(1, 10)]
"""Texts to draw from, all of them made before: who looks for rare scenarios draws many."""


def _is_request(run: Submitted) -> bool:
    """Whether a run comes before bulk work; those of files do not."""
    return run.priority is None and not run.kind.startswith(FILES)


FEATURES: dict[str, Callable[[Scenario], bool]] = {
    "calm": lambda it: not it.faults,
    "only drained": lambda it: (
        {fault.kind for fault in it.faults} == {"drain"} and max(fault.amount for fault in it.faults) >= 20
    ),
    "kills": lambda it: any(run.kills for run in it.runs),
    "kills in chunks": lambda it: any(run.kills and len(run.pairs) > 30 for run in it.runs),
    "null": lambda it: any(query is None for run in it.runs for query, _ in run.pairs),
    "lame": lambda it: bool(it.lame),
    "other machines": lambda it: len(set(it.machines)) > 1,
    "deterministic": lambda it: any(run.deterministic for run in it.runs),
    "stumbles": lambda it: bool(it.stumbles),
    "no model": lambda it: any(run.model == NO_MODEL for run in it.runs),
    "window": lambda it: dict(it.settings).get("window") == 8,
    "little ahead": lambda it: dict(it.settings).get("claim_ahead") == 64,
    "small chunks": lambda it: it.chunk_size == 4,
    "slow": lambda it: min(it.workers) >= 0.05,
    "very slow": lambda it: min(it.workers) >= 0.3,
    "one worker": lambda it: len(it.workers) == 1,
    "several workers": lambda it: len(it.workers) > 1,
    "long": lambda it: min(len(run.pairs) for run in it.runs) >= 200,
    "long live": lambda it: any(len(run.pairs) >= 200 and run.kind == "live" for run in it.runs),
    "two bulk": lambda it: sum(run.priority == "bulk" for run in it.runs) >= 2,
    "both": lambda it: {_is_request(run) for run in it.runs} == {True, False},
    "long request": lambda it: any(_is_request(run) and len(run.pairs) >= 40 for run in it.runs),
    "two requests": lambda it: sum(map(_is_request, it.runs)) >= 2,
    "long file": lambda it: any(run.kind.startswith("file") and len(run.pairs) >= 40 for run in it.runs),
    "loses writes": lambda it: bool({fault.kind for fault in it.faults} & (LOSSES - {"evict", "evict_any"})),
    "a replica behind": lambda it: any(
        fault.kind == "fail_over" and fault.which % 2 and fault.amount < 10.0 for fault in it.faults
    ),
    "keeps data": lambda it: not {fault.kind for fault in it.faults} & LOSSES,
}
"""What a scenario may have, by name."""


def _by_name(seed: int, number: int) -> tuple[Submitted, ...]:
    """Perhaps a job that a service enqueues by name; its dice decide nothing else that a seed does."""
    dice = random.Random(f"by name {seed}")
    if dice.random() >= _BY_NAME:
        return ()
    pairs = tuple(
        (dice.choice(_QUERIES), f"{dice.choice(_PASSAGES)} {number} {row}")
        for row in range(dice.choice([1, 3, 40]))
    )
    return (Submitted(f"run-{number}", pairs, dice.uniform(0.0, 10.0), "by name"),)


def _run(dice: random.Random, number: int, *, kills: bool) -> Submitted:
    pairs: list[Pair] = [
        (dice.choice(_QUERIES), f"{dice.choice(_PASSAGES)} {number} {row}")
        for row in range(dice.choice([1, 3, 40, 200]))
    ]
    for _ in range(dice.choice([0, 0, 1]) if len(pairs) > 1 else 0):
        pairs[dice.randrange(len(pairs))] = (None, "a passage without a query")
    for _ in range(dice.choice([0] * 7 + [1])):
        row = dice.randrange(len(pairs))
        pairs[row] = (f"query {number}", POISON) if kills else pairs[row]
    kind = dice.choice(RUN_KINDS)
    has_files = kind.startswith(FILES)
    tenants = [NOBODY, NOBODY, Tenant("small"), Tenant("large", 3.0), Tenant(f"of run {number}")]
    tenant = NOBODY if kind == "batch" else dice.choice(tenants)
    return Submitted(
        f"run-{number}",
        tuple(pairs),
        dice.uniform(0.0, 10.0),
        kind,
        None if has_files or kind == "requests" else dice.choice([None, None, "bulk"]),
        MODEL if has_files else dice.choice([MODEL] * 19 + [NO_MODEL]),
        tenant,
        deterministic=kind != "batch" and dice.random() < 0.25,
        of_texts=not has_files and dice.random() < 0.2,
    )


@dataclass
class Outcome:
    """What became of a scenario; ``problems`` are sentences, none if all is well."""

    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0
    commands: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    writes: int = 0
    """Changes of files, and their syncs."""
    missed: list[str] = field(default_factory=list)
    """Faults whose target nobody has sent or written."""


def play(scenario: Scenario, *, traced: bool = False, seconds: float = 900.0) -> Outcome:
    """Let a scenario happen, and check it."""
    world = World(scenario.seed, traced=traced)
    outcome = Outcome()
    logging.disable(logging.CRITICAL)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=_MEMORY))
            stack.enter_context(living_in(world))
            world.redis = Server(world)
            world.patch(worker_module, "set_up", lambda *_, **__: None)
            world.patch(worker_module, "require_worker_packages", lambda: None)
            world.patch(gc, "collect", lambda: 0)
            world.patch(engine_module, "PROVE_SECONDS", _PROVE_SECONDS)
            cluster = Cluster(world, chunk_size=scenario.chunk_size, **dict(scenario.settings))
            _promise(world.history, scenario)
            world.stumbles = scenario.stumbles
            tasks.prepare(world)
            if any(run.kind.startswith(FILES) for run in scenario.runs):
                cluster.disk = Disk(world, Path(folder))
                files.prepare(cluster)
                runners.prepare(cluster)
            lame = (*scenario.lame, *(0.0 for _ in scenario.workers[len(scenario.lame) :]))
            machines = (*scenario.machines, *(0 for _ in scenario.workers[len(scenario.machines) :]))
            for speed, clock, seconds_lame, machine in zip(
                scenario.workers, scenario.clocks, lame, machines, strict=True
            ):
                cluster.keep(row_seconds=speed, clock=clock, lame=seconds_lame, machine=machine)
            world.process("checker", lambda: _look(world))
            lost = any(fault.kind in LOSSES for fault in scenario.faults)
            commands = [RUNS[run.kind.partition(" ")[0]](cluster, run) for run in scenario.runs]
            if cluster.disk:
                cluster.disk.settle()
            for clock in scenario.runners if cluster.disk else ():
                runners.keep(cluster, clock=clock)
            for fault in scenario.faults:
                cluster.later(fault.at, _happens(cluster, fault))
            try:
                found = world.history.found
                world.run(lambda: bool(found) or all(each.over for each in commands), seconds=seconds)
                lasts = max((fault.at + fault.amount for fault in scenario.faults), default=0.0)
                quiet, most = max(world.now, lasts) + _QUIET_SECONDS, world.now + SETTLING_SECONDS
                while not found and world.now < most:
                    if any(each.stopped for each in world.processes if each.alive):
                        quiet = max(quiet, world.now + _QUIET_SECONDS)  # it has something to finish, perhaps
                        most = max(most, quiet)
                    if world.now >= quiet and not checker.left(world, cluster.abandoned, lost_data=lost):
                        break
                    until = world.now + 1.0
                    world.run(lambda until=until: bool(found) or world.now >= until, seconds=2.0)  # type: ignore[misc]
                if not scenario.faults and not scenario.stumbles:
                    outcome.problems += checker.computed_again(world, [each.run for each in commands])
                outcome.problems += checker.left(world, cluster.abandoned, lost_data=lost)
            except (Deadlock, TooLong) as error:
                outcome.problems.append(f"{type(error).__name__}: {error}")
            outcome.worst = dict(world.history.worst)
            if world.history.found:  # the rest follows from it
                outcome.problems = world.history.found
            else:
                outcome.problems += checker.crashes(world)
                outcome.problems += [why for each in commands for why in each.wrong(lost_data=lost)]
                used = [(each.run.tenant.name, *each.used()) for each in commands]
                outcome.problems += (
                    checker.miscounted(
                        world, [(name, 0 if lost else least, most) for name, least, most in used]
                    )
                    if not world.history.evicts
                    else []
                )
            outcome.seconds, outcome.events = world.now, world.events
            outcome.commands = world.redis.commands
            outcome.writes = cluster.disk.steps if cluster.disk else 0
            armed = {
                each.only for each in (*world.redis.armed, *(cluster.disk.armed if cluster.disk else ()))
            }
            outcome.missed = [str(each) for each in scenario.faults if each.target and each.target in armed]
            outcome.trace = world.trace
    finally:
        logging.disable(logging.NOTSET)
    return outcome


def _happens(cluster: Cluster, fault: Fault) -> Any:
    def happens() -> None:
        cluster.world.tell(f"FAULT {fault}")
        if fault.kind not in {"term", "drain"}:  # who is asked for something keeps all promises
            cluster.world.history.disturb(max(fault.amount, 10.0) + LEASE)
        KINDS[fault.kind](cluster, fault)

    return happens


def _promise(history: History, scenario: Scenario) -> None:
    """What of the scenario the history must know to judge."""
    settings = dict(scenario.settings)
    ahead = settings.get("claim_ahead", "auto")
    history.chunk_pairs = scenario.chunk_size
    history.claim_ahead_jobs = (1024 if ahead == "auto" else ahead) // scenario.chunk_size
    window = settings.get("window", "auto")
    history.window = None if window == "auto" else window
    history.evicts = any(fault.kind.startswith("evict") for fault in scenario.faults)
    history.undisturbed = not scenario.faults and not scenario.stumbles
    alike = len(set(scenario.machines)) < 2
    history.willing = alike and all(run.model == MODEL for run in scenario.runs)
    # A job by name is no chunk: it may have more pairs, or fewer.
    history.fair = history.willing and not any(scenario.lame) and not scenario.has("by name")
    history.one_engine = len({run.deterministic for run in scenario.runs}) < 2
    history.weights = {group_of(run.tenant.name): run.tenant.weight for run in scenario.runs}
    poisoned = any(passage == POISON for run in scenario.runs for _, passage in run.pairs)
    history.calm = history.fair and not (scenario.faults or scenario.stumbles or poisoned)
    for run in scenario.runs:
        if run.kind in producers.CANCELLED:
            history.owners |= {first_token(*run.texts(row)): run.name for row in range(len(run.pairs))}
    for run in scenario.runs:
        for row in range(len(run.pairs)):
            if history.owners.get(token := first_token(*run.texts(row)), run.name) != run.name:
                del history.owners[token]  # both have that text: nobody knows for whom it is scored


def _look(world: World) -> None:
    most = world.most_events
    while True:
        world.most_events = min(world.events + _BUSY, most)
        world.sleep(1.0)
        world.history.look()


def shrink(scenario: Scenario, seconds: float = 120.0) -> Scenario:
    """A smaller scenario that fails as well: without faults, runs, workers and rows that it does not need.

    It takes `seconds` of CPU time at most.
    """
    until, smaller = time.process_time() + seconds, True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            if time.process_time() > until:
                return scenario
            if play(candidate).problems:
                scenario, smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that lack something, the most first."""
    for part, least in (("faults", 0), ("runs", 1), ("workers", 1)):
        have = getattr(scenario, part)
        for left in _pieces_left(len(have), least):
            change: dict[str, Any] = {part: tuple(have[at] for at in left)}
            if part == "workers":
                for name in ("clocks", "machines", "lame"):
                    kept = getattr(scenario, name)
                    change[name] = tuple(kept[at] for at in left if at < len(kept))
            yield replace(scenario, **change)
    for at, run in enumerate(scenario.runs):
        for left in _pieces_left(len(run.pairs), 1, most=8):
            fewer = replace(run, pairs=tuple(run.pairs[row] for row in left))
            yield replace(scenario, runs=(*scenario.runs[:at], fewer, *scenario.runs[at + 1 :]))
    simple: dict[str, Any] = {
        "stumbles": 0,
        "lame": (),
        "machines": (),
        "settings": (),
        "runners": scenario.runners[:1],
        "clocks": (0.0,) * len(scenario.workers),
    }
    for name, value in simple.items():
        if getattr(scenario, name) != value:
            yield replace(scenario, **{name: value})


def _pieces_left(length: int, least: int, most: int = 1 << 20) -> Iterator[list[int]]:
    """What is left of so many things without a half of them, a quarter, and so on down to one."""
    size = length
    while size and length // size <= most:
        for start in range(0, length, size):
            left = [*range(start), *range(min(start + size, length), length)]
            if len(left) >= least:
                yield left
        size //= 2
