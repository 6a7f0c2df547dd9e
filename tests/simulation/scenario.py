"""One simulated cluster from its beginning to its end: who is there, what goes wrong, what must be true."""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import rankmill.workers.engine.engine as engine_module
import rankmill.workers.worker as worker_module
from rankmill.jobs.contract.priority import NOBODY, Priority, Tenant, group_of
from tests.simulation import files, host_faults, operators, producers, runners, tasks
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
from tests.simulation.promises import PROMISES, NothingIsLeft
from tests.simulation.server import Server
from tests.simulation.world import Deadlock, TooLong, World, living_in

KINDS = {**SERVER_KINDS, **host_faults.KINDS, **operators.KINDS}

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

_REPORTS = "rankmill:worker:"
"""How the keys of workers' reports begin."""

_BY_NAME = 0.1
"""Share of the seeds with a job by name."""

_BY_HAND = 0.1
"""Share of the seeds in which somebody uses RQ's own commands."""

_TURNS = 15
"""Of so many seeds in a row each theme has one; the others have none."""

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

    runs: tuple[Submitted, ...]
    faults: tuple[Fault, ...] = ()
    seed: int = 1
    workers: tuple[float, ...] = (0.05,)
    """Seconds that each takes for a row."""
    clocks: tuple[float, ...] = ()
    """How far ahead the clocks of the workers' hosts are; those that are not named are right."""
    chunk_size: int = 16
    lame: tuple[float, ...] = ()
    """Until when, in seconds, each worker can load no model; those that are not named can."""
    settings: tuple[tuple[str, Any], ...] = ()
    stumbles: int = 0
    runners: tuple[float, ...] = ()
    """Clocks of the runners' hosts."""
    machines: tuple[int, ...] = ()
    """Indexes of the workers' machines in `MACHINES`; workers without one have the first."""

    @classmethod
    def drawn(cls, seed: int, number: int | None = None, *, themed: bool = True) -> Scenario:
        """The scenario of a seed, perhaps with another `number` of workers than it draws.

        Most have a theme, if they may: what chance alone seldom brings together.
        """
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
        found = cls(
            runs,
            tuple(sorted(faults, key=lambda each: each.at)),
            seed,
            workers,
            clocks,
            dice.choice([4, 16]),
            lame=(lame,) if lame else (),
            settings=tuple(settings.items()),
            stumbles=dice.choice([0, 0, 0, 1]),
            machines=tuple(dice.choice(may_be) for _ in workers),
            runners=tuple(dice.choice([0.0, 0.0, 3600.0, -3600.0]) for _ in range(hosts)),
        )
        theme = [*THEMES.values()][seed % _TURNS : seed % _TURNS + 1] if themed and number is None else []
        found = theme[0](found, random.Random(f"theme {seed}")) if theme else found
        return replace(found, faults=(*found.faults, *_by_hand(seed)))

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
            for at, (speed, clock) in enumerate(zip_longest(self.workers, self.clocks, fillvalue=0.0))
        )
        faults = "".join(f"\n  {fault}" for fault in self.faults) or " none"
        others = ", ".join(f"{name} {value}" for name, value in self.settings) or "settings as they come"
        others += f"; {self.stumbles} loads fail" * bool(self.stumbles)
        others += f"; workers are lame until {self.lame}" if self.lame else ""
        return (
            f"seed {self.seed}; {others}\nworkers: {workers}\nruns: {runs}; chunks of {self.chunk_size}\n"
            f"faults:{faults}"
        )

    def has(self, *features: str) -> bool:
        """Whether it has all of some features: kinds of faults and of runs, and those of `FEATURES`."""
        kinds = {fault.kind for fault in self.faults} | {run.kind for run in self.runs}
        return all(each in kinds or (each in FEATURES and FEATURES[each](self)) for each in features)


def _quiet(
    it: Scenario,
    dice: random.Random,
    speeds: Sequence[float],
    *runs: Submitted,
    ahead: int = 16,
    budget: int = 2048,
    **others: Any,
) -> Scenario:
    """The scenario with other runs, in small chunks and without faults."""
    runs = tuple(replace(run, name=f"run-{number}") for number, run in enumerate(runs))
    plain: dict[str, Any] = {
        "faults": (),
        "stumbles": 0,
        "lame": (),
        "machines": (),
        "runners": (),
        "chunk_size": 4,
    }
    settings = (("window", dice.choice(["auto", 8])), ("claim_ahead", ahead), ("token_budget", budget))
    clocks = it.clocks[: len(speeds)]
    plain |= {"workers": tuple(speeds), "clocks": clocks, "runs": runs, "settings": settings}
    return replace(it, **{**plain, **others})


def _long(
    dice: random.Random, kind: str, priority: Priority | None = None, rows: int = 200, **how: Any
) -> Submitted:
    """A run with so many rows, of others than those of other runs, that begins early."""
    run = dice.randrange(1 << 30)
    pairs = tuple((dice.choice(_QUERIES), f"{dice.choice(_PASSAGES)} {run} {row}") for row in range(rows))
    return Submitted("run", pairs, dice.uniform(0.5, 3.0), kind, priority, **how)


def _order(it: Scenario, dice: random.Random, **how: Any) -> Scenario:
    """Requests that go on and on, a bulk run that begins beside them, and other requests later."""
    runs = (
        replace(_long(dice, dice.choice(["live", "asyncio"])), at=6.0),
        replace(_long(dice, dice.choice(["live", "detached"]), "bulk"), at=dice.uniform(7.0, 8.5)),
        replace(_long(dice, dice.choice(["live", "requests"]), rows=40), at=dice.uniform(9.5, 14.5)),
    )
    speeds = dice.choices([0.05, 0.1], k=1 if how else dice.randint(1, 2))
    return _quiet(it, dice, speeds, *runs, **{"ahead": 8, "budget": 128, **how})


def _backlog(it: Scenario, dice: random.Random) -> Scenario:
    """All of these wait for a worker that was drained."""
    return _order(it, dice, ahead=64, faults=(Fault(0.1, "drain", 14.0),))


def _shares(it: Scenario, dice: random.Random) -> Scenario:
    """Long runs of tenants with several weights, and of one tenant."""
    tenants = dice.choices(
        [NOBODY, Tenant("small"), Tenant("large", 3.0), Tenant("half", 0.5)], k=dice.randint(2, 4)
    )
    priority: Priority | None = dice.choice(["bulk", "bulk", None])
    kinds = ["live", "asyncio", "detached"]
    runs = (_long(dice, dice.choice(kinds), priority, tenant=each) for each in tenants)
    return _quiet(
        it, dice, dice.choices([0.02, 0.05], k=dice.randint(1, 3)), *runs, ahead=dice.choice([8, 16])
    )


def _refusals(it: Scenario, dice: random.Random) -> Scenario:
    """Workers that refuse at different times, beside one that does not."""
    run = _long(dice, dice.choice(["live", "detached", "asyncio"]), "bulk")
    return _quiet(it, dice, [0.05, 0.05, 0.3], run, lame=dice.choice([(8.0,), (8.0, 20.0), (20.0, 6.0)]))


def _lost_often(it: Scenario, dice: random.Random) -> Scenario:
    """Chunks that the server loses three times, of four attempts: their jobs, or how they wait."""
    what = dice.choice(["rq:job:", "queue:q:waiting:", "queue:q:turns:"])
    kind = dice.choice(["live", "asyncio", "file parquet"]) if what == "rq:job:" else "detached"
    faults = tuple(Fault(4.0 + 25 * number, "evict_any", target=what) for number in range(3))
    runs = [_long(dice, kind, None if kind.startswith(FILES) else "bulk")]
    if kind == "detached":  # a second process collects it
        runs.append(Submitted("run", (), dice.uniform(1.0, 6.0), "attached", "bulk"))
    return _quiet(it, dice, [0.3], *runs, faults=faults, budget=128)


def _kept(it: Scenario, dice: random.Random) -> Scenario:
    """A submitted run whose runner goes on when the server has lost its data."""
    run = _long(dice, f"submitted {dice.choice(['parquet', 'parts'])} kept")
    fault = Fault(dice.uniform(4.0, 9.0), "flush", dice.choice([0.1, 5.0]))
    return _quiet(it, dice, [0.05, 0.1], run, faults=(fault,), runners=(0.0, 0.0))


def _dead_runner(it: Scenario, dice: random.Random) -> Scenario:
    """A submitted run whose runner dies."""
    run = _long(dice, f"submitted {dice.choice(['parquet', 'parts'])}")
    fault = Fault(0.5, "kill_at_write", 0.0, dice.randrange(10, 60))
    return _quiet(it, dice, [0.05, 0.1], run, faults=(fault,), runners=(0.0, 0.0))


def _replaced(it: Scenario, dice: random.Random) -> Scenario:
    """Files with an output that was there before; whoever writes them may die."""
    kinds = [f"file {form} replaced" for form in ("parquet", "jsonl", "parts")]
    runs = (_long(dice, dice.choice(kinds), rows=dice.choice([3, 40, 200])) for _ in range(2))
    faults = tuple(
        Fault(dice.uniform(1.0, 6.0), dice.choice(["kill_at_write", "lose_power"]), 0.0, dice.randrange(64))
        for _ in range(dice.randint(0, 3))
    )
    return _quiet(it, dice, [0.02], *runs, faults=faults)


def _told(it: Scenario, dice: random.Random) -> Scenario:
    """A run is cancelled beside another, and workers are drained and ended."""
    cancelled = _long(dice, dice.choice(["cancelled", "detached cancelled"]), "bulk")
    run = _long(dice, dice.choice(["live", "detached"]), "bulk", rows=400)
    faults = (
        Fault(dice.uniform(5.0, 9.0), "drain", 25.0, dice.randrange(64)),
        Fault(dice.uniform(20.0, 30.0), "term", 0.0, dice.randrange(64)),
    )
    return _quiet(it, dice, [0.1, 0.2], run, cancelled, faults=faults, ahead=128, budget=128)


def _miscomputed(it: Scenario, dice: random.Random) -> Scenario:
    """A worker whose device computes wrong scores while a run goes on."""
    kind = dice.choice(["live", "detached", "file parquet"])
    run = _long(dice, kind, None if kind.startswith(FILES) else "bulk", rows=400)
    fault = Fault(dice.uniform(3.0, 9.0), "miscompute", 0.0, dice.randrange(64))
    return _quiet(it, dice, [0.1, 0.2], run, faults=(fault,))


def _killing(it: Scenario, dice: random.Random, kills: int = 1, chunk: int = 4) -> Scenario:
    """Rows among others that kill their worker, and replies that are lost when a worker takes a job."""
    run = _long(dice, dice.choice(["live", "file parquet", "detached"]), rows=40)
    rows = dice.sample(range(40), kills)
    pairs = (("query", POISON) if row in rows else pair for row, pair in enumerate(run.pairs))
    run = replace(run, pairs=tuple(pairs))
    takes = "rq:queue:q:intermediate rq:workers:q"
    faults = tuple(Fault(run.at + 0.2, "breaks", 0.0, number, takes) for number in range(3))
    return _quiet(it, dice, [0.05, 0.05], run, faults=faults, chunk_size=chunk)


def suspects(it: Scenario, dice: random.Random) -> Scenario:
    """Several such rows in chunks that cannot be split: deaths by others may not count as theirs."""
    return _killing(it, dice, kills=4, chunk=1)


def _calls(it: Scenario, dice: random.Random) -> Scenario:
    """Callers that send one request after the other to workers that are full of bulk work."""
    calls = (
        replace(_long(dice, "requests", rows=40), at=dice.uniform(5.0, 9.0))
        for _ in range(dice.randint(2, 4))
    )
    speeds = dice.choices([0.05, 0.1, 0.3], k=dice.randint(2, 3))
    bulk = replace(_long(dice, "detached", "bulk"), at=1.0)
    return _quiet(it, dice, speeds, bulk, *calls, ahead=dice.choice([4, 8]), budget=128)


def outage(it: Scenario, dice: random.Random) -> Scenario:
    """A server that is away, or takes no writes, for longer than a lease, or whose clock jumps, in a run."""
    kind = dice.choice(["restart", "load", "no_replicas", "full", "server_clock"])
    run = _long(dice, dice.choice(["live", "detached", "file parquet"]))
    fault = Fault(dice.uniform(4.0, 9.0), kind, dice.choice([20.0, 45.0]), dice.randrange(64))
    return _quiet(it, dice, [0.2] * 3, run, faults=(fault,))


def _one_can(it: Scenario, dice: random.Random) -> Scenario:
    """A run for one of three workers, which dies or is forgotten for a while; and one that none can score."""
    run = _long(dice, dice.choice(["live", "detached", "file parquet"]))
    nobodys = replace(_long(dice, "live", rows=8), at=dice.uniform(0.5, 12.0), model=NO_MODEL)
    kind, amount, target = dice.choice(
        [("evict_any", 0.0, _REPORTS), ("kill", 0.0, ""), ("term", 0.0, ""), ("stop", 20.0, "")]
    )
    faults = tuple(
        Fault(at, kind, amount, dice.randrange(64), target) for at in (dice.uniform(2.0, 9.0), 30.0)
    )
    return _quiet(it, dice, [0.1, 0.1, 0.1], run, nobodys, faults=faults, machines=(0, 1, 3))


def _enqueued_again(it: Scenario, dice: random.Random) -> Scenario:
    """Jobs by name whose ids other jobs had a moment ago, beside workers that end, or fail at them."""
    runs = (_long(dice, producers.BY_NAME_AGAIN, rows=dice.choice([3, 40])) for _ in range(3))
    kinds = dice.sample(["term", "kill", "stop", "cut_off", "drain", "breaks"], k=dice.randint(0, 3))
    faults = tuple(
        Fault(dice.uniform(1.0, 6.0), kind, dice.choice([0.1, 2.0, 20.0]), dice.randrange(64))
        for kind in kinds
    )
    speeds = dice.choices([0.01, 0.05, 0.3], k=2)
    return _quiet(it, dice, speeds, *runs, faults=faults, stumbles=dice.choice([0, 0, 1]))


THEMES: dict[str, Callable[[Scenario, random.Random], Scenario]] = {
    each.__name__[1:]: each
    for each in (
        *(
            _order,
            _backlog,
            _shares,
            _refusals,
            _lost_often,
            _kept,
            _dead_runner,
            _replaced,
            _told,
            _miscomputed,
        ),
        _killing,
        _calls,
        _one_can,
        _enqueued_again,
    )
}
"""What a scenario may be about, by name."""


_QUERIES = [f"query {number}" for number in range(5)]
_PASSAGES = ["passage " + " ".join("w" * words) for words in range(1, 10)]
"""Texts to draw from, all of them made before: who looks for rare scenarios draws many."""


def _is_request(run: Submitted) -> bool:
    """Whether a run comes before bulk work; those of files do not."""
    return run.priority is None and not run.kind.startswith(FILES)


FEATURES: dict[str, Callable[[Scenario], bool]] = {
    "by name": lambda it: any(run.kind.startswith("by name") for run in it.runs),
    "calm": lambda it: not it.faults,
    "only drained": lambda it: (
        {fault.kind for fault in it.faults} == {"drain"} and max(fault.amount for fault in it.faults) >= 20
    ),
    "kills": lambda it: any(run.kills for run in it.runs),
    "kills in chunks": lambda it: any(run.kills and len(run.pairs) > 30 for run in it.runs),
    "null": lambda it: any(query is None for run in it.runs for query, _ in run.pairs),
    "lame": lambda it: bool(it.lame),
    "several lame": lambda it: len(it.lame) > 1,
    "weights": lambda it: len({run.tenant.weight for run in it.runs}) > 1,
    "lost three times": lambda it: sum(fault.kind == "evict_any" for fault in it.faults) >= 3,
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


def _by_hand(seed: int) -> tuple[Fault, ...]:
    """Perhaps a command of RQ's; its dice decide nothing else that a seed does."""
    dice = random.Random(f"RQ {seed}")
    if dice.random() >= _BY_HAND:
        return ()
    kind = dice.choice(sorted(operators.KINDS))
    return (Fault(dice.uniform(0.5, 15.0), kind, dice.choice([0.1, 5.0, 20.0, 45.0])),)


def _by_name(seed: int, number: int) -> tuple[Submitted, ...]:
    """Perhaps a job that a service enqueues by name; its dice decide nothing else that a seed does."""
    dice = random.Random(f"by name {seed}")
    if dice.random() >= _BY_NAME:
        return ()
    pairs = tuple(
        (dice.choice(_QUERIES), f"{dice.choice(_PASSAGES)} {number} {row}")
        for row in range(dice.choice([1, 3, 40]))
    )
    at, kind = dice.uniform(0.0, 10.0), dice.choice(["by name", producers.BY_NAME_AGAIN])
    return (Submitted(f"run-{number}", pairs, at, kind),)


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
    """How near it came to the bounds of promises."""
    loaded: set[str] = field(default_factory=set)
    """Promises whose break could have been seen."""
    writes: int = 0
    """Changes of files, and their syncs."""
    missed: list[str] = field(default_factory=list)
    """Faults whose target nobody has sent or written."""
    late: list[str] = field(default_factory=list)
    """Faults that strike when all runs are over."""


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
            world.patch(worker_module, "check_mode", lambda client: None)
            world.patch(gc, "collect", lambda: 0)
            world.patch(engine_module, "PROVE_SECONDS", _PROVE_SECONDS)
            cluster = Cluster(world, chunk_size=scenario.chunk_size, **dict(scenario.settings))
            _promise(world.history, scenario)
            world.history.watch(PROMISES)
            world.stumbles = scenario.stumbles
            tasks.prepare(world)
            if any(run.kind.startswith(FILES) for run in scenario.runs):
                cluster.disk = Disk(world, Path(folder))
                files.prepare(cluster)
                runners.prepare(cluster)
            for speed, clock, lame, machine in zip_longest(
                scenario.workers, scenario.clocks, scenario.lame, scenario.machines, fillvalue=0
            ):
                cluster.keep(row_seconds=speed, clock=clock, lame=lame, machine=machine)
            world.process("checker", lambda: _look(world))
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
                outcome.late = [str(each) for each in scenario.faults if each.at >= world.now]
                lasts = max((fault.at + fault.amount for fault in scenario.faults), default=0.0)
                quiet, most = max(world.now, lasts) + _QUIET_SECONDS, world.now + SETTLING_SECONDS
                while not found and world.now < most:
                    if any(each.stopped for each in world.processes if each.alive):
                        quiet = max(quiet, world.now + _QUIET_SECONDS)  # it has something to finish, perhaps
                        most = max(most, quiet)
                    if world.now >= quiet and not any(
                        each.left() for each in world.history.promises if isinstance(each, NothingIsLeft)
                    ):
                        break
                    until = world.now + 1.0
                    world.run(lambda until=until: bool(found) or world.now >= until, seconds=2.0)  # type: ignore[misc]
            except (Deadlock, TooLong) as error:
                outcome.problems.append(f"{type(error).__name__}: {error}")
            promises = world.history.promises
            outcome.problems = world.history.found or outcome.problems + [
                f"{type(promise).__name__}: {why}" for promise in promises for why in promise.at_end(commands)
            ]
            outcome.worst = {type(each).__name__: each.worst for each in promises if each.bound}
            outcome.loaded = {type(each).__name__ for each in promises if each.loaded}
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


_APART = frozenset({"stop", "cut_off", "breaks", "half_open", "freeze", "two_masters"})
"""Faults by which a worker may lose its leases though it is alive."""

_UNNOTICED = frozenset({"rq_info", "rq_requeue"})
"""What nobody may notice where nothing goes wrong."""

_PLAIN = _UNNOTICED | {"term", "drain", "miscompute", "kill_producer", "kill_at_write", "rq_suspend"}
"""Faults beside which all promises are kept, in time: somebody is asked for something, a worker sees that its
device is broken, or a producer dies.
"""


def _happens(cluster: Cluster, fault: Fault) -> Any:
    def happens() -> None:
        cluster.world.tell(f"FAULT {fault}")
        if fault.kind not in _PLAIN:
            cluster.world.history.disturb(max(fault.amount, 10.0) + LEASE)
        KINDS[fault.kind](cluster, fault)

    return happens


def _promise(history: History, scenario: Scenario) -> None:
    """What of the scenario the history must know to judge."""
    settings = dict(scenario.settings)
    ahead = settings.get("claim_ahead", "auto")
    history.chunk_pairs = scenario.chunk_size
    history.max_retries = settings.get("max_retries", history.max_retries)
    history.claim_ahead_jobs = (1024 if ahead == "auto" else ahead) // scenario.chunk_size
    window = settings.get("window", "auto")
    history.window = None if window == "auto" else window
    history.evicts = any(fault.kind.startswith("evict") for fault in scenario.faults)
    history.in_reach = not _APART & {fault.kind for fault in scenario.faults}
    history.size = len(scenario.workers)
    again = scenario.has(producers.BY_NAME_AGAIN)  # such a job's pairs may be scored for the one before, too
    goes_wrong = scenario.stumbles or any(fault.kind not in _UNNOTICED for fault in scenario.faults)
    history.undisturbed = not (goes_wrong or again)
    history.alike = len(set(scenario.machines)) < 2
    history.willing = history.alike and all(run.model == MODEL for run in scenario.runs)
    # A job by name is no chunk: it may have more pairs, or fewer.
    history.fair = history.willing and not any(scenario.lame) and not FEATURES["by name"](scenario)
    history.one_engine = len({run.deterministic for run in scenario.runs}) < 2
    history.weights = {group_of(run.tenant.name): run.tenant.weight for run in scenario.runs}
    poisoned = any(passage == POISON for run in scenario.runs for _, passage in run.pairs)
    history.calm = history.fair and not (goes_wrong or poisoned)
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
        "clocks": (),
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
