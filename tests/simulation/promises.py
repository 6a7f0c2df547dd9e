"""What rankmill promises, one class for each promise, in the order of a chunk's life.

A class says its promise in a sentence, how far off a cluster may be (``bound``), what it ``looks_at``. Its
methods are named for the events that `History` tells, and ``at_end`` looks at what commands have found.
`mutants.py` lists the breaks of the product, by the promise that must find them. A promise is ``loaded`` in a
scenario in which its break could be seen: ``python -m tests.simulation.promises`` plays scenarios, and prints
what loads which promise.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import click

from rankmill.jobs.contract.priority import GROUP, group_of, priority_of
from rankmill.jobs.protocol.ordered_queue import is_bulk_job
from tests.simulation.cluster import LOAD, POISON, PROOF, first_token
from tests.simulation.history import BEAT, LEASE, Result, is_piece

if TYPE_CHECKING:
    from tests.simulation.history import History
    from tests.simulation.producers import Command
    from tests.simulation.world import Process


class Promise:
    """What must be true of a cluster; its docstring says it.

    Attributes
    ----------
    bound
        How far off it may be, in seconds if nothing else is said.
    looks_at
        By what it is judged.
    loaded
        How often its break could have been seen.
    worst
        How near it came to its bound.
    """

    bound: ClassVar[float] = 0.0
    looks_at: ClassVar[str] = ""

    def __init__(self, history: History) -> None:
        self.history, self.world = history, history.world
        self.loaded, self.worst = 0, 0.0

    def measure(self, much: float, why: str) -> None:
        """Note how far off it is."""
        self.worst = max(self.worst, much)
        if much > self.bound:
            self.broken(f"{why} ({much:.1f}, at most {self.bound:g}, at {self.world.now:.1f} s)")

    def broken(self, why: str) -> None:
        """It is broken."""
        self.history.tell(f"{type(self).__name__}: {why}")

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        """What is wrong when all commands have come to their end."""
        return iter(())


# What every row gets


class EveryRowOnce(Promise):
    """Each row is in the result once, in order, with its own score or a stated error."""

    looks_at = "the scores, outputs and answers that commands have found"

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        for each in commands:
            self.loaded += each.is_complete
            yield from each.wrong()


class ResultIsInJournal(Promise):
    """A result of a file's run is in the journal, synced, before Redis forgets it."""

    looks_at = "commands that delete a result, beside what a loss of power would leave of the journal"

    def forgotten(self, results: Sequence[Result], process: Process | None) -> None:
        if process is None or process.disk is None or not self.history.alike:  # a result may be refused
            return
        for each in results:
            if not is_piece(each.chunk) and not (each.fatal or each.died or self.history.lost):
                self.loaded += 1
                if not process.disk.has_in_journal(process, int(each.chunk)):
                    self.broken(f"the result of {each.run}-{each.chunk} is deleted, and in no journal")


class NothingCrashes(Promise):
    """No process ends by an error that nobody has foreseen."""

    looks_at = "exceptions that end a thread"

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        self.loaded += 1
        for _, thread, error in self.world.crashes:
            at = error.__traceback__
            while at and at.tb_next:
                at = at.tb_next
            where = f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at else "?"
            yield f"{thread} ended with {type(error).__name__}: {error} ({where})"


class NothingIsComputedTwice(Promise):
    """Where nothing goes wrong, each pair is computed once."""

    looks_at = "forwards"

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        pairs = [(*pair, each.run.of_texts) for each in commands for pair in each.run.pairs]
        if not self.history.undisturbed or any(passage == POISON for _, passage, _ in pairs):
            return
        self.loaded += 1
        asked = Counter(
            first_token("" if alone else query or "", passage)
            for query, passage, alone in pairs
            if passage and (query or alone)
        )
        if again := self.world.computed - asked:
            yield f"{again.total()} pairs were computed again, and nothing went wrong"


class UsageIsCounted(Promise):
    """What a tenant has used is counted once; of a process that died, none or all that it has told."""

    looks_at = "the accounts, beside the rows of the commands"

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        if self.history.evicts:
            return
        counted, least, most = Counter[str](), Counter[str](), Counter[str]()
        for key, item in self.history.data.items():
            for name, amounts in item.value.items() if key.startswith(b"rankmill:usage:") else ():
                if b"|" in name and not name.startswith(b"name|"):
                    rows = [int(each) for each in amounts.split()]
                    counted[name.decode().partition("|")[0]] += rows[0] + rows[3] + rows[4]
        for each in commands:
            tenant, (fewest, highest) = group_of(each.run.tenant.name), each.used()
            least[tenant] += 0 if self.history.lost else fewest
            most[tenant] += highest
        self.loaded += bool(least.total())
        for tenant in sorted({*counted, *most}):
            if not least[tenant] <= counted[tenant] <= most[tenant]:
                yield (
                    f"{counted[tenant]} rows of {tenant} are counted, "
                    f"{least[tenant]} to {most[tenant]} were used"
                )


class WrongScoresAreTold(Promise):
    """No run ends well, or goes on for long, after a worker has said that scores of it are wrong."""

    bound = 3
    looks_at = "notes with runs, how their producers end, and once a second whether they have"

    def ends_well(self, runs: set[str]) -> None:
        """Runs of a producer are over, and it has no reason to doubt their scores."""
        self.loaded += bool(self.history.noticed)
        for run in self.history.noted.keys() & runs:
            if not self.history.lost and not self.history.has_run(run):  # else it is removed later
                self.broken(f"{run} ends well, and before its end a worker said that it has wrong scores")

    def second(self, passed: float, able: Sequence[Process]) -> None:
        history = self.history
        others = history.detached | history.abandoned | history.orphans  # these stay, or nobody is there
        for run in [run for run in history.noted.keys() - others if history.has_run(run)]:
            late = self.world.now - max(history.noted[run], history.disturbed_until)
            self.measure(late, f"{run} goes on, and a worker has said that it has wrong scores")


# Where a chunk is


class OneWorkerHasAChunk(Promise):
    """A chunk waits once or is with one worker, which is alone with it when it begins it or ends it."""

    looks_at = "commands that begin, put and delete jobs, beside lists and leases"

    def begun(self, name: str, worker: Process) -> None:
        self.loaded += 1
        if self.history.lost or name in self.history.reused:
            return
        if len(self.history.leases(name)) > 1 and self.history.is_in_time:
            self.broken(f"{worker.name} begins {name}, and another worker has it")

    def put(self, name: str, worker: Process | None) -> None:
        if worker is None or name in self.history.sent_again or self.history.lost:
            return
        if self.history.waiting.count(name) > 1:
            self.broken(f"{worker.name} puts {name} into the queue, and it is there already")
        holder = self.history.jobs[name].holder  # the lease of a dead one lapses just now
        may_renew = self.history.in_reach and holder is not worker
        if holder and holder.alive and (may_renew or self.history.leases(name)) and self.history.is_in_time:
            self.broken(f"{worker.name} puts {name} into the queue, and a worker has it")

    def second(self, passed: float, able: Sequence[Process]) -> None:
        jobs = () if self.history.lost else self.history.jobs.items()
        lists = {*self.history.waiting, *self.history.given}
        for name in {name for name, job in jobs if job.state == "waiting"} - lists:
            if self.history.has_run(name.rpartition("-")[0]):
                self.broken(f"{name} waits, and is in no list")

    def over(self, name: str) -> None:
        """A worker deletes a job with its result; others have its lease if the job was sent twice."""
        alone = name not in self.history.sent_again and not self.history.lost
        if alone and not self.history.is_disturbed and self.history.leases(name):
            self.broken(f"{name} has ended, and a worker has it still")


class AttemptsAreCounted(Promise):
    """A chunk has as many attempts as are allowed, whatever ends them, and a failure says how many.

    Except where it was sent again because the reply was lost: that gives it all of them again.
    """

    looks_at = "jobs that begin, and failures in the stream of results"

    def begun(self, name: str, worker: Process) -> None:
        made, allowed = self.history.jobs[name].attempts, self.history.max_retries + 1
        self.loaded += made == allowed
        if made > allowed and not self.history.lost and name not in self.history.sent_again:
            self.broken(f"{name} is tried {made} times, and {allowed} are allowed")

    def result(self, found: Result) -> None:
        if found.attempts is None or self.history.lost or found.fatal:
            return
        # A piece with several rows has one, as it is split.
        allowed = {self.history.max_retries + 1, *([1] if is_piece(found.chunk) else [])}
        made = self.history.jobs[found.job].attempts
        if found.attempts not in allowed or made < found.attempts:
            self.broken(f"{found.job} is given up after {made} attempts, it says {found.attempts}")


class DeadWorkersChunkIsTaken(Promise):
    """A dead worker's chunk is taken from it when its lease has ended, by the heartbeat of another.

    That takes a moment, and a second lies between two looks.
    """

    bound = LEASE + BEAT + 2
    looks_at = "jobs whose worker has died, once a second"

    def second(self, passed: float, able: Sequence[Process]) -> None:
        for name in list(self.history.held):
            job = self.history.jobs[name]
            if job.state != "taken" and job.holder and not job.holder.alive:
                job.late += passed
                if not self.history.has_run(name.rpartition("-")[0]):
                    self.history.held.discard(name)
                    continue
                self.loaded += job.late > LEASE / 2
                self.measure(job.late, f"{name} stays with a dead worker")


class LostReplyLosesNoChunk(Promise):
    """A job that has left the queue and reached no worker is put back.

    A cleaning sees it, and one that comes a lease later does it.
    """

    bound = 2 * LEASE + 2 * BEAT
    looks_at = "jobs that were taken and not begun, once a second"

    def second(self, passed: float, able: Sequence[Process]) -> None:
        for name in self.history.held:
            job = self.history.jobs[name]
            if job.state == "taken":
                job.late += passed
                self.loaded += job.late > LEASE
                self.measure(job.late, f"{name} left the queue and is nowhere")


class WaitingIsCounted(Promise):
    """How many jobs wait is known at any time; what the server has lost of that, a cleaning corrects.

    A list whose turn was lost counts when its producer has looked for it.
    """

    bound = LEASE + 2 * BEAT + 2
    looks_at = "the queue's count, beside its lists, once a second"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._right = 0.0

    def second(self, passed: float, able: Sequence[Process]) -> None:
        history, waiting = self.history, len(self.history.waiting)
        if history.counted == waiting:
            self._right = self.world.now
        elif not history.lost:
            self.broken(f"{history.counted} jobs wait by the count, and {waiting} do")
        self.loaded += bool(waiting)
        late = self.world.now - max(self._right, history.disturbed_until, history.set_back_until)
        self.measure(late, f"{history.counted} jobs wait by the count, and {waiting} do")


class DeadRunnersRunIsTaken(Promise):
    """A submitted run whose runner has died is taken by one that has none."""

    bound = LEASE + BEAT + 2
    looks_at = "leases of runners, once a second"

    def second(self, passed: float, able: Sequence[Process]) -> None:
        history, now = self.history, self.world.now
        there = [each for each in history.runners if history.is_there(each)]
        if not history.is_in_time and not there:  # nor does a heartbeat bound its lease
            history.set_back_until += passed
        idle = {*there} - {process for _, process in history.runs_held.values()}
        for run in list(history.left):
            if not history.waits_for_runner(run):
                del history.left[run]
                continue
            if not idle:
                history.left[run] = now
            late = now - max(history.left[run], history.disturbed_until, history.set_back_until)
            self.loaded += late > LEASE / 2
            self.measure(late, f"{run} stays with a dead runner")


class HalvesAreSent(Promise):
    """A chunk that kills its workers is sent again in two halves."""

    bound = 5
    looks_at = "failures that say that the worker died, and the next pieces of their run"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._splits: dict[str, float] = {}

    def result(self, found: Result) -> None:
        splits = found.died and not is_piece(found.chunk) and not self.history.lost
        if splits and self.history.pairs(found.job) > 1:
            self._splits[found.run] = self.world.now

    def put(self, name: str, worker: Process | None) -> None:
        if is_piece(name):
            self.loaded += self._splits.pop(name.rpartition("-")[0], None) is not None

    def second(self, passed: float, able: Sequence[Process]) -> None:
        for run, died in list(self._splits.items()):  # nobody sends halves of a run that is gone, say
            if run in self.history.abandoned | self.history.orphans or not self.history.has_run(run):
                del self._splits[run]
                continue
            late = self.world.now - max(died, self.history.disturbed_until)
            self.measure(late, f"the halves of a chunk of {run} are not sent")


# Whose turn it is


def is_bulk(run: str) -> bool:
    """Whether a run is bulk work, by its id."""
    return priority_of(run) == "bulk"


class RequestsAreHeard(Promise):
    """A worker that has room for requests takes one at once, whatever else it does.

    Its thread that claims also loads a model and lets it be proven, and waits for nothing else; commands take
    no time in a world. While it changes its model it has no room: it ends what it has claimed for the one
    before, and loads the other.
    """

    bound = LOAD + PROOF + 0.01
    looks_at = "requests that are taken where nothing goes wrong, beside what their worker has"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._full: dict[Process, float] = {}
        self._loaded: set[Process] = set()

    def loads(self, worker: Process) -> None:
        """A worker has loaded a model, in the place of the one before if it had one."""
        if worker in self._loaded:
            self._full[worker] = self.world.now
        self._loaded.add(worker)

    def moves(self, name: str) -> None:
        """A job is about to leave its worker."""
        if (holder := self.history.jobs[name].holder) and not is_bulk_job(name):
            self._look(holder, self.history.requests(holder))

    def taken(self, name: str, worker: Process) -> None:
        if not self.history.calm or worker not in self.history.busy or is_bulk_job(name):
            return
        self._look(worker, self.history.requests(worker) - 1)  # scored a moment ago, and not yet answered
        late = self.world.now - max(self.history.jobs[name].since, self._full.get(worker, 0.0))
        self.loaded += any(map(is_bulk_job, self.history.held_by(worker)))
        self.measure(late, f"{name} waits, and {worker.name} has room")

    def _look(self, worker: Process, requests: int) -> None:
        if requests >= self.history.claim_ahead_jobs:
            self._full[worker] = self.world.now


class RequestsComeFirst(Promise):
    """A worker that has room for the next job, a request, takes bulk work for one turn.

    That is a job at its turn, and one more of a shorter chunk.
    """

    bound = 2
    looks_at = "bulk jobs in a row that a worker with room takes while a request waits"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._before: Counter[Process] = Counter()

    def turn(self, name: str, worker: Process, others: set[str]) -> None:
        if not self.history.one_engine:
            return
        is_next = not all(map(is_bulk, others))
        full = self.history.requests(worker) >= self.history.claim_ahead_jobs
        self.loaded += not is_bulk_job(name) and any(map(is_bulk, others))
        if not is_bulk_job(name) or not is_next or full:
            del self._before[worker]
            return
        self._before[worker] += 1
        self.measure(self._before[worker], f"{worker.name} has room for a request, and takes bulk work")


class BulkIsNotStarved(Promise):
    """Beside endless requests bulk work has a quarter: a worker without any takes three chunks of requests.

    One job more, and again one: the worker may have looked when no bulk work waited.
    """

    bound = 5
    looks_at = "pairs of requests, in chunks, that a worker without bulk work takes while some waits"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._passed_over: Counter[Process] = Counter()

    def turn(self, name: str, worker: Process, others: set[str]) -> None:
        history = self.history
        is_new = history.jobs[name].attempts == 0 and not history.owners  # else the worker may drop it
        has_bulk = any(map(is_bulk_job, history.held_by(worker)))
        if has_bulk or not (history.is_up and is_new) or not any(map(is_bulk, others)):
            del self._passed_over[worker]
            return
        self.loaded += 1
        self._passed_over[worker] += history.pairs(name)
        chunks = self._passed_over[worker] / history.chunk_pairs
        self.measure(chunks, f"{worker.name} has no bulk work, and takes requests")


class TenantsGetTheirShare(Promise):
    """Tenants that wait get pairs by weight, a tenant's runs equal parts: none is far ahead of another.

    What goes to an idle worker costs no turn, and is not counted.
    """

    bound = 3
    looks_at = "chunks taken while the same tenants, or runs, waited, by all workers together; by weight"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._shares: defaultdict[str, tuple[set[str], Counter[str]]] = defaultdict(
            lambda: (set(), Counter())
        )

    def tenants_turn(self, name: str, worker: Process, others: set[str]) -> None:
        run = name.partition("-")[0]
        kind = priority_of(run)
        runs = {run, *(each for each in others if priority_of(each) == kind)}
        weights, mine = self.history.weights, run[-GROUP:]
        self._look(kind, name, {each[-GROUP:] for each in runs}, mine, weights)
        if kind == "bulk":
            self._look(mine, name, {each for each in runs if each.endswith(mine)}, run, {})

    def _look(self, scope: str, name: str, waiting: set[str], mine: str, weights: dict[str, float]) -> None:
        """How many chunks, by its weight, who takes is ahead of another that waits as well."""
        same, had = self._shares.get(scope, (set(), Counter()))
        if same != waiting:
            same, had = self._shares[scope] = waiting, Counter()
        had[mine] += self.history.pairs(name) / self.history.chunk_pairs  # type: ignore[assignment]
        if len(waiting) < 2:
            return
        self.loaded += had.total() >= 2 * self.bound
        turns = {each: had[each] / weights.get(each, 1.0) for each in waiting}
        ahead = (turns[mine] - min(turns.values())) * min(weights.get(each, 1.0) for each in waiting)
        self.measure(ahead, f"{mine} has too many chunks beside {len(waiting) - 1} others")


class WindowIsKept(Promise):
    """A run that is sent through a window has no more payloads in Redis."""

    looks_at = "keys, once a second"

    def look(self) -> None:
        window = self.history.window
        if window is None or self.history.lost:
            return
        pairs: Counter[str] = Counter()
        for key in self.history.data:
            run, _, chunk = (
                key[13:].partition(b":pairs:") if key.startswith(b"rankmill:run:") else (b"", b"", b"")
            )
            pairs[run.decode()] += bool(chunk) and not is_piece(chunk.decode())
        for run, count in pairs.items():
            if run not in self.history.detached:
                self.loaded += count == window
                self.measure(count - window, f"{run} has {count} payloads in Redis, and a window of {window}")


# Whether it goes on


class WorkGoesOn(Promise):
    """While there are work, a worker and a server, a forward is in progress, or ends, every so often.

    A lost chunk is sent again, and a pause between attempts ends. That begins anew with the death of a runner
    that has a run, as four of them may die of it in a row, each of which a lease and a heartbeat follow.
    """

    bound = 60
    looks_at = "forwards and results, once a second"

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._advanced = 0.0

    def forwarded(self) -> None:
        self._advanced = self.world.now

    def result(self, found: Result) -> None:
        self._advanced = self.world.now

    def ended(self, process: Process) -> None:
        if any(runner is process for _, runner in self.history.runs_held.values()):
            self._advanced = self.world.now

    def standstill(self) -> None:
        """No worker is in reach of a server that is well."""
        self._advanced = self.world.now

    def second(self, passed: float, able: Sequence[Process]) -> None:
        history = self.history
        if (  # a runner that stands still, or is cut off, perhaps has the output
            self._waits_for_producers()
            or not all(map(history.is_there, history.runners))
            or any(each in history.computing for each in able)
        ):
            self._advanced = self.world.now
        late = self.world.now - max(self._advanced, history.set_back_until)
        self.loaded += late > LEASE / 2 and bool(history.open)
        self.measure(late, "nothing goes on")

    def _waits_for_producers(self) -> bool:
        """Whether nothing is to do for workers until some producer can send it."""
        is_sent = any(map(self.history.is_there, self.history.open.values()))
        return not (is_sent or self.history.held or self.history.waiting)


class NoWorkerIsIdle(Promise):
    """A worker scores something every so often while jobs wait."""

    bound = 40
    looks_at = "workers and lists, once a second"

    def second(self, passed: float, able: Sequence[Process]) -> None:
        waits = bool(self.history.waiting)
        for worker in able if self.history.willing else ():
            if not waits or worker in self.history.computing:
                self.history.busy[worker] = self.world.now
            idle = self.world.now - self.history.busy.setdefault(worker, self.world.now)
            self.loaded += idle > 0.5
            self.measure(idle, f"{worker.name} scores nothing, and jobs wait")


class CancelledIsNotScored(Promise):
    """No forward with rows of a cancelled run begins long after."""

    bound = BEAT + 2
    looks_at = "rows of forwards"

    def forward(self, firsts: Sequence[int]) -> None:
        cancelled = self.history.cancelled
        if cancelled and self.history.disturbed_until < min(cancelled.values()):
            self.loaded += 1
            for name in {self.history.owners.get(first, "") for first in firsts} & cancelled.keys():
                self.measure(self.world.now - cancelled[name], f"{name} is scored")


class DrainedTakesNothing(Promise):
    """A worker that was told to drain begins no job after two heartbeats."""

    bound = 2 * BEAT
    looks_at = "orders, and jobs that begin"

    def begun(self, name: str, worker: Process) -> None:
        since = self.history.drained.get(worker)
        if since is not None and worker not in self.history.resuming and since > self.history.disturbed_until:
            self.measure(self.world.now - since, f"a drained worker takes {name}")

    def second(self, passed: float, able: Sequence[Process]) -> None:
        if self.history.waiting:
            self.loaded += any(self.world.now - at > self.bound for at in self.history.drained.values())


class WorkersEndAsTold(Promise):
    """A worker ends soon after SIGTERM, its forward and a server that answers; without being told, none does.

    It keeps nothing.
    """

    bound = 15
    looks_at = "ends of workers, and what they have then"

    def look(self) -> None:
        history, now = self.history, self.world.now
        for worker, since in list(history.ending.items()):
            waits = worker in history.computing or not history.is_up or not history.is_there(worker)
            if not worker.alive or waits:
                history.ending[worker] = now
            self.measure(now - since if worker.alive else 0, f"{worker.name} does not end")

    def ended(self, process: Process) -> None:
        history = self.history
        told = process in history.ending or process in history.noticed
        if process.name.startswith("worker-") and process.status in {0, 1} and not told:
            self.broken(f"{process.name} ended, and nobody has told it to")
        stopped = process.status == 0 or (process.status == 1 and process in history.noticed)
        held = history.held_by(process)
        self.loaded += process in history.ending
        if stopped and held and history.is_up and not history.is_disturbed:
            self.broken(f"{process.name} ended and kept {', '.join(held)}")


# What is left


def _is_job_of_run(key: str) -> bool:
    """Whether a key is the hash of a run's job, and not of one that a service enqueues by name."""
    return key.startswith("rq:job:") and key.count(":") == 2 and not key.startswith("rq:job:run-")


class NothingIsLeft(Promise):
    """Each key of ours expires, and of a run whose producer has all scores none is there soon after."""

    looks_at = "keys, once a second and at the end"

    def look(self) -> None:
        for key, item in self.history.data.items():
            if key.startswith((b"rankmill:", b"rq:job:", b"rq:execution")) and item.expireat is None:
                self.broken(f"{key.decode(errors='replace')} does not expire")

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        self.loaded += bool(commands)
        yield from self.left()

    def left(self) -> list[str]:
        """Keys that are left; a server that goes back in time has those of runs that have ended."""
        history, found = self.history, []
        for key, item in history.data.items():
            name = key.decode(errors="replace")
            if item.expireat is not None and item.expireat < self.world.redis.time():
                continue  # it has expired
            if name.endswith(":cancelled") or name in history.notes:
                continue  # it tells a producer something that has ended meanwhile
            kinds = ("rankmill:run:", f"rankmill:queue:{history.queue}:waiting:")
            mine = name.startswith(kinds) or (
                _is_job_of_run(name) and item.value.get(b"status") == b"queued"
            )  # RQ keeps a job that has failed for a while
            mine = mine and not any(run in name for run in history.abandoned)
            if mine and not history.lost:
                found.append(f"{name} is left")
        return found[:5]


class NothingIsLeftBeside(Promise):
    """Beside a complete output nothing lies that a process has begun, or one that died."""

    looks_at = "folders of outputs at the end"

    def at_end(self, commands: Sequence[Command]) -> Iterator[str]:
        for each in commands:
            self.loaded += any(died.disk and not died.alive and died.status for died in self.world.processes)
            yield from each.left_over()


PROMISES: tuple[type[Promise], ...] = tuple(Promise.__subclasses__())
"""All promises, in the order above."""


@click.command()
@click.option("--first", default=1, show_default=True, metavar="SEED", help="First seed.")
@click.option("--seeds", default=100, show_default=True, metavar="N", help="How many seeds.")
def main(first: int, seeds: int) -> None:
    """Play scenarios, and print each promise with what loads it: the things of scenarios that do so most."""
    from tests.simulation.mutants import BREAKS
    from tests.simulation.scenario import FEATURES, KINDS, RUN_KINDS, Scenario, play  # which knows promises

    scenarios = [Scenario.drawn(seed) for seed in range(first, first + seeds)]
    loaded = [play(each).loaded for each in scenarios]
    print("| promise | bound | it looks at | breaks | loaded in | most by |")
    print("| --- | --- | --- | --- | --- | --- |")
    for promise in PROMISES:
        name, said = promise.__name__, " ".join((promise.__doc__ or "").partition("\n")[0].split())
        shares = dict[str, float]()
        for feature in (*KINDS, *RUN_KINDS, *FEATURES):
            its = [name in at for each, at in zip(scenarios, loaded, strict=True) if each.has(feature)]
            shares[feature] = sum(its) / len(its) if len(its) > 2 else 0.0
        most = ", ".join(
            f"{each} {shares[each]:.0%}" for each in sorted(shares, key=lambda it: -shares[it])[:4]
        )
        share = sum(name in each for each in loaded) / len(loaded)
        breaks = sum(len(found) for each, found in BREAKS.items() if each.__name__ == name)
        print(
            f"| {name}: {said} | {promise.bound:g} | {promise.looks_at} | {breaks} | {share:.0%} | {most} |"
        )


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.promises", *sys.argv[1:]])
    main()
