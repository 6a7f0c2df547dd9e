"""Those who submit runs: processes that die, stand still, and are started again with the same command."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rq import Queue, Retry
from rq.exceptions import InvalidJobOperation
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer

from rankmill.jobs.contract.errors import (
    ConnectionFailed,
    InputError,
    NoWorkers,
    RankmillError,
    RunCancelled,
    RunExpired,
    RunFailed,
    WrongScores,
)
from rankmill.jobs.contract.priority import run_id_of_request
from rankmill.jobs.protocol.pairs_job import PAIRS_FUNCTION
from rankmill.jobs.system import system
from rankmill.producer.client.async_client import AsyncClient
from rankmill.producer.client.runs import ScoringRun
from rankmill.producer.client.sync_client import Client
from tests.simulation import tasks
from tests.simulation.cluster import (
    MACHINES,
    NO_MODEL,
    POISON,
    REFUSALS,
    REQUEST_ROWS,
    Cluster,
    Submitted,
    told_by,
)
from tests.simulation.history import History
from tests.simulation.world import Process, world

KILLED = 137

_ATTEMPTS = 120
"""How often a command is given again, at most."""

BY_NAME_SECONDS = 8
"""How long a job by name may wait, as its service says; how long it is scored is another matter."""

BY_NAME_AGAIN = "by name again"
"""The kind of a job whose id another job had before."""

_ENQUEUED_AGAIN = "was enqueued again with other pairs"
"""Why such a job may fail."""

_LOOK_SECONDS, _PATIENCE = 0.5, 40.0
"""Time between two looks of a service at its job, and until it gives up one that the server may have lost."""


@dataclass
class Found:
    """The scores of several requests, one after the other, as `Scores` has those of a run."""

    scores: list[float] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, row: int) -> float:
        return self.scores[row]


def wrong_scores(run: Submitted, found: Any, history: History, *, may_be_wrong: bool) -> list[str]:
    """What is wrong with a run's scores; they `may_be_wrong` if nobody has told that a device was broken."""
    if isinstance(found, RunExpired) and history.lost and run.kind == "detached":
        return []  # it says so: its pairs were in the server alone
    if run.kind == "cancelled" and isinstance(found, RunCancelled):
        return []
    if run.model == NO_MODEL and isinstance(found, RunFailed) and "no such directory" in str(found):
        return []
    if isinstance(found, RankmillError):
        return [f"{run.name} ended with {type(found).__name__}: {found}"]
    if found is None:
        return [f"{run.name} has no scores"]
    if len(found) != len(run.pairs):
        return [f"{run.name} has {len(found)} scores for {len(run.pairs)} rows"]
    findings = []
    for row, (query, passage) in enumerate(run.pairs):
        should_fail = (query is None and not run.of_texts) or passage is None or passage == POISON
        if should_fail:
            counted = passage == POISON and not history.lost
            attempts = f"after attempt {history.max_retries + 1}:" if counted else ""
            if attempts not in found.errors.get(row, ""):
                findings.append(f"{run.name}: row {row} has no error, or another: {found.errors.get(row)}")
        elif row in found.errors and history.may_be_lost(row, found.errors[row]):
            continue
        elif row in found.errors:
            findings.append(f"{run.name}: row {row} failed: {found.errors[row]}")
        elif why := wrong_score(run, row, float(found[row]), may_be_wrong=may_be_wrong):
            findings.append(why)
    size = REQUEST_ROWS if run.kind == "requests" else len(run.pairs)
    for first in range(0, len(run.pairs), size):
        rows = [row for row in range(first, min(first + size, len(run.pairs))) if row not in found.errors]
        findings += mixed(run, ((row, float(found[row])) for row in rows))
    return findings[:3]


def wrong_score(run: Submitted, row: int, score: float, *, may_be_wrong: bool) -> str | None:
    """What is wrong with the score of a row."""
    told = told_by(score, *run.texts(row))
    if told is None:
        return f"{run.name}: row {row} has a score that is not its own"
    if told.broken and not may_be_wrong:
        return f"{run.name}: row {row} has the score of a broken device, which its worker has reported"
    return None


def mixed(run: Submitted, scores: Iterable[tuple[int, float]]) -> list[str]:
    """Whether rows of one run are scored in several precisions, by several models, or with several bits."""
    told = {told_by(score, *run.texts(row)) for row, score in scores}
    machines = {MACHINES[each.place] for each in told if each}
    how = machines if run.deterministic else {(each.precision, each.content) for each in machines}
    return [f"{run.name} is scored by {' and '.join(sorted(map(str, how)))}"] if len(how) > 1 else []


def is_deserted(history: History, why: object) -> bool:
    """Whether a run has failed as no worker was there for a while that scores as its first one."""
    return history.deserted and any(each in str(why) for each in REFUSALS)


class Command:
    """A command whose process is started again, a second after each end that was none of its own.

    Attributes
    ----------
    found
        What it has found in the end: scores, or the error with which it has ended.
    problems
        What it has seen that must not be.
    ended
        When its process has ended last, in seconds.
    leaves_keys
        Whether it has ended before it could delete its run: the server took no writes of it at the end.
    """

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        self.cluster, self.run = cluster, run
        self.found: Any = None
        self.problems: list[str] = []
        self.over = self.leaves_keys = False
        self.attempts, self.ended = 0, 0.0
        self.process = self._begin(run.at)
        cluster.producers.append(self)

    @property
    def alive(self) -> bool:
        """Whether it has not come to its end yet."""
        return not self.over

    @property
    def options(self) -> dict[str, Any]:
        """How the pairs are scored."""
        return {"priority": self.run.priority, "model": self.run.model}

    def rows(self, first: int = 0, last: int | None = None) -> dict[str, Any]:
        """Some of the pairs, texts or conversations, as arguments."""
        if self.run.of_texts:
            return {"texts": [passage for _, passage in self.run.pairs[first:last]]}
        return {"pairs": list(self.run.pairs[first:last])}

    def client(self) -> Client:
        """A client with the settings of the run."""
        return self.cluster.client(self.run)

    def do(self) -> Any:
        """What the process does; what it returns is found."""
        raise NotImplementedError

    def looks_good(self) -> None:
        """What it has found is the whole answer: nothing must say that it may be wrong."""
        world().history.ends_well(self.cluster.begun[self.process])

    def is_final(self, error: RankmillError) -> bool:
        """Whether the user does not give the same command again after an error."""
        if isinstance(error, ConnectionFailed | WrongScores):  # the server was away when it began
            return False
        if isinstance(error, NoWorkers) and self.cluster.world.history.lacks_workers:
            return False
        return not self.finds_other_machines(error)

    def finds_other_machines(self, error: object) -> bool:
        """Whether no worker was there for a while that scores as the first one of the run."""
        is_its = isinstance(error, RunFailed | InputError)  # of a file without a score yet, it is the input's
        return is_its and is_deserted(self.cluster.world.history, error)

    def wrong(self) -> list[str]:
        """What is wrong with what it has found."""
        history = self.cluster.world.history
        return self.problems or wrong_scores(self.run, self.found, history, may_be_wrong=self.may_be_wrong)

    def left_over(self) -> list[str]:
        """What lies beside an output that was made."""
        return []

    @property
    def may_be_wrong(self) -> bool:
        """Whether its last run was over when it was told that a device is broken: nobody reads that then."""
        return self.cluster.world.history.may_be_wrong(self._over_at)

    @property
    def _over_at(self) -> float:
        """When its last run was deleted; if it has deleted none, when its process has ended."""
        return self.cluster.world.history.over.get(self.process, self.ended)

    @property
    def is_complete(self) -> bool:
        """Whether it has found what becomes of each row."""
        return self.found is not None and not isinstance(self.found, RankmillError | str)

    def used(self) -> tuple[int, int]:
        """How many rows it has used, at least and at most; a process that dies has told of some, or none."""
        rows = len(self.run.pairs)
        return rows if self.is_complete and not self.leaves_keys else 0, rows * self.attempts

    def _begin(self, wait: float) -> Process:
        self.attempts += 1
        process = self.cluster.world.process(self.run.name, partial(self._main, wait))
        self.process = process
        process.on_exit.append(self._ended)
        return process

    def _main(self, wait: float) -> None:
        world().sleep(wait)
        world().history.open[self.run.name] = self.process
        try:
            self.found = self.do()
            self.over = True
            self.looks_good()
        except RankmillError as error:
            world().tell(f"ends with {type(error).__name__}: {error}")
            self.found, self.over = error, self.is_final(error)

    def _ended(self) -> None:
        self.cluster.world.history.open.pop(self.run.name, None)
        self.ended = self.cluster.world.now
        self.leaves_keys = self.over and not self.cluster.world.redis.takes_writes_of(self.process)
        if self.process.status == KILLED or self.leaves_keys:
            self.cluster.abandoned |= self.cluster.begun.pop(self.process, set())
        elif self.process.status:  # it has crashed
            self.over = True
        if self.over:
            return
        if self.attempts < _ATTEMPTS:
            self.cluster.later(1.0, partial(self._begin, 0.0))
        else:
            self.problems.append(f"{self.run.name} was begun {self.attempts} times without an end")
            self.over = True


class Live(Command):
    """Scores pairs, and waits."""

    def do(self) -> Any:
        return self.client().score(**self.rows(), **self.options)


class Cancelled(Command):
    """Scores pairs, and somebody else cancels the run."""

    def do(self) -> Any:
        client = self.client()
        run = client.submit(**self.rows(), **self.options)
        cancels = system.Thread(target=self._cancel, args=(client, run.id), name="cancels")
        cancels.start()
        scores = run.scores()
        cancels.join()
        return scores

    def _cancel(self, client: Client, run_id: str) -> None:
        """As ``rankmill cancel`` does."""
        world().sleep(2.0)
        if run := client.store.load(run_id):
            client.store.cancel(run)
            world().history.cancelled[self.run.name] = world().now

    def used(self) -> tuple[int, int]:
        """What it has read is not counted if the run is cancelled just then."""
        _, most = super().used()
        return 0, most


class Asyncio(Command):
    """Scores pairs from an event loop."""

    def do(self) -> Any:
        async def main() -> Any:
            settings = self.cluster.settings_of(self.run)
            async with AsyncClient("redis://simulated", settings=settings) as client:
                return await client.score(**self.rows(), **self.options)

        return tasks.run(main())


class Requests(Command):
    """Scores some pairs after the other, each time as a request that does not wait for bulk runs."""

    def do(self) -> Any:
        client, found = self.client(), Found()
        for start in range(0, len(self.run.pairs), REQUEST_ROWS):
            options = {**self.options, "priority": "request"}
            scores = client.score(**self.rows(start, start + REQUEST_ROWS), **options)
            found.errors |= {start + row: why for row, why in scores.errors.items()}
            found.scores += map(float, scores)
        return found

    @property
    def may_be_wrong(self) -> bool:
        """Most of its runs end long before the last one."""
        return bool(self.cluster.world.history.broken)


class Detached(Command):
    """Submits pairs; another process waits for the scores, if this one dies meanwhile."""

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        self.ids: list[str] = []
        self.times = 0
        super().__init__(cluster, run)

    def do(self) -> Any:
        run = self.attached(self.client())
        return self._cancelled(run) if self.run.kind.endswith("cancelled") else run.scores()

    def attached(self, client: Client) -> ScoringRun:
        """The run, submitted if nobody has."""
        if not self.ids:
            self.times += 1
            self.ids.append(client.submit(**self.rows(), detached=True, **self.options).id)
            self.cluster.abandoned.add(self.ids[0])  # it is kept, for others
            world().sleep(1.0)
        found = client.attach(self.ids[0])
        assert isinstance(found, ScoringRun)
        return found

    def looks_good(self) -> None:
        if self.found is not None:  # whoever cancels a run has read no score of it
            super().looks_good()

    def is_final(self, error: RankmillError) -> bool:
        final = super().is_final(error)
        if isinstance(error, RunFailed) and not final:
            self.ids = []  # it is submitted anew
        return final

    def used(self) -> tuple[int, int]:
        rows = len(self.run.pairs)
        return rows if self.is_complete else 0, rows * self.times

    def _cancelled(self, run: ScoringRun) -> None:
        """Cancel the run from another process; nobody computes it for long then."""
        world().sleep(2.0)
        run.cancel()
        world().history.cancelled[self.run.name] = world().now
        self.cluster.abandoned -= {run.id}  # nothing of it may be left but what tells others of its end,
        self.cluster.abandoned |= {f"{run.id}:cancelled", f"{run.id}:counted"}  # and of what is counted

    def wrong(self) -> list[str]:
        if self.run.kind.endswith("cancelled") and (
            self.found is None or isinstance(self.found, RunExpired | RunCancelled)
        ):
            return self.problems
        return super().wrong()


class Attached(Command):
    """Reads the scores of the first detached run as well, beside the process that has submitted it."""

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        self.other = next((each for each in cluster.producers if type(each) is Detached), None)
        super().__init__(cluster, run)

    def do(self) -> Any:
        while self.other and not self.other.ids and not self.other.over:
            world().sleep(0.5)
        if not self.other or not self.other.ids:
            return None
        found = self.client().attach(self.other.ids[0])
        assert isinstance(found, ScoringRun)
        return found.scores()

    def used(self) -> tuple[int, int]:
        """What it reads is the other one's."""
        return 0, 0

    def wrong(self) -> list[str]:
        if not self.other or not self.other.ids:
            return self.problems
        history = self.cluster.world.history
        return self.problems or wrong_scores(
            self.other.run, self.found, history, may_be_wrong=self.may_be_wrong
        )


class ByName(Command):
    """A service without rankmill: it enqueues a job that brings its pairs, as whoever has RQ can, and waits.

    It asks again when no worker has begun the job in time, and when the server has lost something of it. The
    kind "by name again" has deleted another job with the first one's id before, which may still be scored.
    """

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        self.times = 0
        super().__init__(cluster, run)

    def do(self) -> Any:
        pairs = [[*pair] for pair in self.run.pairs]
        if self.run.kind == BY_NAME_AGAIN and not self.times:
            before = self._enqueue(pairs[::-1], 1)
            world().history.reused.add(before.id)
            world().sleep(world().random.choice([0.0, 0.5, 2.0]))
            with suppress(ValueError, KeyError):  # RQ cannot delete a job whose execution is lost
                before.delete()
            self.times = 0
        while self.times < _ATTEMPTS:
            try:
                if found := self._waited(self._enqueue(pairs, self.times + 1)):
                    return found
            except RunFailed as error:
                if _ENQUEUED_AGAIN not in str(error) or self.times > 1:
                    raise
        return None

    def _enqueue(self, pairs: list[Any], number: int) -> Job:
        client, settings = self.cluster.world.redis.client(), self.cluster.settings
        queue = Queue(settings.queue, connection=client, serializer=JSONSerializer)
        self.times = number
        name = f"{self.run.name}-{number}"
        self.cluster.abandoned.add(run_id_of_request(name))  # what workers note of it stays for an hour
        options = {"model": self.run.model, "ttl": BY_NAME_SECONDS, "retry": Retry(max=3)}
        return queue.enqueue(PAIRS_FUNCTION, pairs, job_id=name, **options)

    def _waited(self, job: Job) -> Found | None:
        """The scores of a job; ``None``: it is gone, as nobody has begun it in its time, or it was lost."""
        asked = seen = world().now
        status, history = None, world().history
        while not (found := job.latest_result()):
            try:
                status = job.get_status()
            except InvalidJobOperation:
                has_looked = world().now - seen < BY_NAME_SECONDS / 2 and not world().redis.host.clock
                if status is JobStatus.STARTED and has_looked and not history.lost:
                    raise RunFailed(f"job {job.id} was begun, and is gone") from None
                return None
            seen = world().now
            if history.lost and seen - asked > _PATIENCE:
                with suppress(ValueError, KeyError):  # RQ cannot delete a job whose execution is lost
                    job.delete()
                return None
            world().sleep(_LOOK_SECONDS)
        if found.type is not Result.Type.SUCCESSFUL:
            raise RunFailed(str(found.exc_string))
        value: Any = found.return_value
        scores = [math.nan if each is None else each for each in value["scores"]]
        return Found(scores, {each["row"]: each["error"] for each in value["errors"]})

    @property
    def may_be_wrong(self) -> bool:
        """Nobody reads a note: the worker names the job in its log."""
        return bool(self.cluster.world.history.broken)

    def used(self) -> tuple[int, int]:
        rows = len(self.run.pairs)
        return rows if self.is_complete else 0, rows * (self.times + (self.run.kind == BY_NAME_AGAIN))


CANCELLED = ("cancelled", "detached cancelled")
"""Runs of which nothing may be scored for long after they were cancelled."""

KINDS: dict[str, type[Command]] = {
    "live": Live,
    "asyncio": Asyncio,
    "requests": Requests,
    "detached": Detached,
    "attached": Attached,
    "cancelled": Cancelled,
    "by": ByName,
}
