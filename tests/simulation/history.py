"""What happens to jobs and runs in a world, as the server's commands say it, told to the promises as events.

The server tells of each command that it has carried out, those of scripts and transactions among them; a
device tells of its forwards. Once a virtual second `History.look` lets the promises look themselves.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.leases import RQ_DELAY, UNRENEWED_SECONDS
from rankmill.jobs.protocol.ordered_queue import is_bulk_job

if TYPE_CHECKING:
    from tests.simulation.promises import Promise
    from tests.simulation.world import Process, World

BEAT, LEASE = 5.0, 15.0
"""Seconds: `heartbeat_seconds` and `lease_seconds`, which all promises are made of."""

NO_WORKERS = 60
"""A run ends with `NoWorkers` after no shorter time without a worker, by default."""

_LOOKS = 3
"""Seconds within which a worker looks again who refuses a run, and the world again whether all are there."""

LAG = 12
"""A server that loses acknowledged writes loses none that are older."""


@dataclass
class Job:
    """How far a job has come, how often it was sent, and for how long (s) somebody should have moved it."""

    state: str = "new"
    holder: Process | None = None
    holders: set[Process] = field(default_factory=set)
    attempts: int = 0
    sent: int = 0
    late: float = 0.0
    since: float = 0.0


@dataclass(frozen=True)
class Result:
    """A result of a chunk in a run's stream; ``attempts`` after which it was given up, if it was."""

    run: str
    chunk: str
    attempts: int | None
    fatal: bool
    died: bool

    @property
    def job(self) -> str:
        """The name of the chunk's job."""
        return f"{self.run}-{self.chunk}"


def is_piece(name: str) -> bool:
    """Whether a name of a job or a chunk is that of some rows of a chunk that was split."""
    return "_" in name


def _is_run(key: bytes) -> bool:
    return key.startswith(b"rankmill:run:") and key.endswith(b":meta")


class History:
    """What has happened in a world so far.

    Attributes
    ----------
    found
        Broken promises, as sentences.
    open
        Runs whose producer waits, and its process.
    queue
        Name of the queue.
    max_retries, claim_ahead_jobs, chunk_pairs, window
        What the cluster's settings promise; no `window` in chunks if it follows the workers.
    alike, willing, fair, calm
        Whether all workers are the same machine; none refuses anything for ever; nothing at all, so that
        all should be served alike; nothing goes wrong either.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: list[str] = []
        self.promises: list[Promise] = []
        self._listeners: dict[str, list[Callable[..., None]]] = {}
        self.open: dict[str, Process] = {}
        self.queue = "q"
        self.max_retries = 3
        self.claim_ahead_jobs = 64
        self.chunk_pairs = 16
        self.window: int | None = None
        self.detached: set[str] = set()
        """Runs whose pairs are sent as a whole, without a window; the cluster adds to it."""
        self.alike = self.willing = self.fair = True
        self.calm = False
        self.one_engine = True
        """Whether one engine scores all runs; else workers put jobs aside, and count them when they begin."""
        self.undisturbed = False
        """Whether nothing goes wrong at all."""
        self.in_reach = False
        """Whether every worker that is alive could renew its leases since the server was last away."""
        self.size = 1
        """How many workers there are when all are there."""
        self.deserted = False
        """Whether a run has ended by refusals when perhaps no worker that could score it had been seen for a
        lease, or when the server had lost that one has begun it.
        """
        self.evicts = False
        """Whether the server evicts keys: a chunk may be lost in each of its attempts."""
        self.weights: dict[str, float] = {}
        """Weights of tenants, by what stands for them in the ids of runs."""
        self.owners: dict[int, str] = {}
        """Runs that are cancelled at some time, by the first tokens of their pairs."""
        self.losses: list[float] = []
        """When the server has lost data, and with them the count of attempts."""
        self.jobs: defaultdict[str, Job] = defaultdict(Job)
        self.held: set[str] = set()
        """Jobs that were taken, and not moved on since."""
        self.sent_again: set[str] = set()
        """Jobs that their producers have sent more than once: they may be in the queue twice."""
        self.reused: set[str] = set()
        """Jobs that have the id of another job, which may still be scored."""
        self.computing: dict[Process, float] = {}
        """Workers in a forward, since when."""
        self.busy: dict[Process, float] = {}
        """When each worker was last in a forward, or had none to do."""
        self.cancelled: dict[str, float] = {}
        """When a run was cancelled, by its name."""
        self.ending: dict[Process, float] = {}
        """Workers that got SIGTERM, and when."""
        self.drained: dict[Process, float] = {}
        """Workers that are to take no job, and since when, until they have resumed."""
        self.resuming: set[Process] = set()
        """The workers of these that were told to resume."""
        self.broken: dict[Process, float] = {}
        """Workers with a broken device, and since when."""
        self.noticed: set[Process] = set()
        """The workers of these that have seen it; they end when they have told so."""
        self._reported: dict[Process, float] = {}
        self.notes: set[str] = set()
        """Notes that a run has wrong scores: they stay, as the run may be over, or its file may go on."""
        self.noted: dict[str, float] = {}
        """Runs that were there when a worker left a note with them, and when that was."""
        self.over: dict[Process | str, float] = {}
        """When a process has deleted its last run; by their ids also when runners did, of submitted runs."""
        self.orphans: set[str] = set()
        """Runs whose producer has died, and whose successor deletes them."""
        self.abandoned: set[str] = set()
        """Runs whose producer has died; the cluster adds to it."""
        self.let_go: dict[str, float] = {}
        """When a runner has last let go of a submitted run, by its id."""
        self.runs_held: dict[str, tuple[bytes, Process]] = {}
        """Submitted runs by id: the lease of the runner that has one, and its process."""
        self.kept: dict[str, Process] = {}
        """The runs of these, and their runners, when the server last lost data."""
        self.left: dict[str, float] = {}
        """The runs of these whose runner has ended, and since when one could have taken them."""
        self.results = 0
        self._entries: dict[tuple[str, bytes], Result] = {}
        """Results by the run, and the entry of its stream."""
        self._lists: set[bytes] = set()
        """Keys under which jobs have waited."""
        self._popped = b""
        """The job that was taken from one of these last, and is in no other yet."""
        self.set_back_until = self.disturbed_until = 0.0
        self._looked = 0.0
        self._apart = self._met = 0.0
        """When no worker was last in reach of the server, and until when one could say that it is there."""
        self._short = self._complete = 0.0
        """When a worker was last missing, and until when all could say that they are there."""

    def watch(self, promises: Iterable[type[Promise]]) -> None:
        """Tell promises from now on what happens."""
        self.promises = [promise(self) for promise in promises]
        for event in ("begun", "ended", "ends_well", "forgotten", "forward", "forwarded", "loads", "look",
                      "moves", "over", "put", "result", "second", "standstill", "taken", "tenants_turn",
                      "turn"):  # fmt: skip
            told = (getattr(each, event, None) for each in self.promises)
            self._listeners[event] = [each for each in told if each]

    def _say(self, event: str, *about: Any) -> None:
        for each in self._listeners.get(event, ()):
            each(*about)

    def tell(self, found: str) -> None:
        """A promise is broken."""
        if not self.found:  # what follows from it is no news
            self.world.tell(f"BROKEN PROMISE: {found}")
            self.found.append(found)

    # What is told

    def disturb(self, seconds: float) -> None:
        """Something goes wrong, and for so many seconds promises of undisturbed times are none."""
        self.disturbed_until = max(self.disturbed_until, self.world.now + seconds)

    def lose(self) -> None:
        """The server has lost data."""
        self.losses.append(self.world.now)
        self.held.clear()
        self.kept |= {run: runner for run, (_, runner) in self.runs_held.items()}
        self.runs_held.clear()
        self.left.clear()
        for job in self.jobs.values():
            job.state, job.holder, job.late = "new", None, 0.0
            job.holders.clear()

    def set_back(self) -> None:
        """The server's clock has jumped back: what a dead worker holds stays with it for longer."""
        self.set_back_until = self.world.now + UNRENEWED_SECONDS
        for name in self.held:
            self.jobs[name].late = -UNRENEWED_SECONDS

    def forward(self, firsts: Sequence[int]) -> None:
        """A worker begins a forward of pairs with these first tokens."""
        assert self.world.current
        self.computing[self.world.current.process] = self.world.now
        self._say("forward", firsts)

    def forwarded(self) -> None:
        """The forward of a worker has ended."""
        assert self.world.current
        self.computing.pop(self.world.current.process, None)
        self.busy[self.world.current.process] = self.world.now
        self._say("forwarded")

    def loads(self) -> None:
        """A worker has loaded a model."""
        assert self.world.current
        self._say("loads", self.world.current.process)

    def ends_well(self, runs: set[str]) -> None:
        """Runs of a producer are over, and it has no reason to doubt their scores."""
        self._say("ends_well", runs)

    def ended(self, process: Process) -> None:
        """A process has ended."""
        self.computing.pop(process, None)
        self.left |= {run: self.world.now for run, (_, runner) in self.runs_held.items() if runner is process}
        if process in self.noticed and process.status == 1:
            self._reported[process] = self.world.now
        self._say("ended", process)

    # What promises and commands ask

    @property
    def lost(self) -> bool:
        """Whether the server has lost data."""
        return bool(self.losses)

    @property
    def is_disturbed(self) -> bool:
        """Whether something goes wrong, or did a moment ago."""
        return self.world.now <= self.disturbed_until

    @property
    def is_in_time(self) -> bool:
        """Whether the server's clock has not jumped back lately."""
        return self.world.now > self.set_back_until

    @property
    def lacks_workers(self) -> bool:
        """Whether none could tell a server that takes writes, for a minute, that it is there."""
        return self.world.now - self._met > NO_WORKERS

    @property
    def times_counted(self) -> int:
        """How often a row of a file may count: one that a broken device has scored is begun again."""
        return 8 if self.broken else 1

    def may_be_wrong(self, since: float) -> bool:
        """Whether nobody had told by `since`, when a run was over, of a broken device, or that was lost."""
        told = [self._reported.get(each, math.inf) for each in self.broken]
        return any(at >= since or any(0 <= loss - at <= LAG for loss in self.losses) for at in told)

    def may_be_lost(self, row: int, error: str | None) -> bool:
        """Whether a good row may have this error: its chunk has had all attempts, and keys are evicted.

        Each loss is an attempt, also of a chunk that waits and is then sent again.
        """
        attempts = self.max_retries + 1
        if not self.evicts or error != f"given up after attempt {attempts}: it was lost":
            return False
        unlucky = [
            int(name.rpartition("-")[2])
            for name, job in self.jobs.items()
            if job.attempts + job.sent > attempts and not is_piece(name)
        ]
        return any(first <= row < first + self.chunk_pairs for first in unlucky)

    @property
    def is_up(self) -> bool:
        """Whether the server answers everybody, as it should."""
        return self.world.redis.serves

    def is_there(self, process: Process) -> bool:
        """Whether a process runs, and is in reach of the server."""
        return not process.stopped and self.world.redis.reaches(process)

    @property
    def runners(self) -> list[Process]:
        """The runners that are alive."""
        return [each for each in self.world.processes if each.name.startswith("runner-") and each.alive]

    @property
    def data(self) -> Any:
        """The server's data by key."""
        return self.world.redis.fake.dbs[0]._dict

    @property
    def waiting(self) -> list[str]:
        """The jobs that wait, wherever."""
        found = (self.data.get(key) for key in sorted(self._lists))
        return [each.decode() for item in found if item for each in item.value]

    @property
    def given(self) -> list[str]:
        """The jobs that were given to a worker, and not begun; one that stands still has not heard of it."""
        found = self.data.get(f"rq:queue:{self.queue}:intermediate".encode())
        return [each.decode() for each in found.value] if found else []

    @property
    def counted(self) -> int:
        """How many jobs wait, as the queue says it."""
        count, jobs = (
            self.data.get(key.encode()) for key in (keys.waits(self.queue), f"rq:queue:{self.queue}")
        )
        return (int(count.value) if count else 0) + (len(jobs.value) if jobs else 0)

    def held_by(self, worker: Process) -> list[str]:
        """The jobs of a worker."""
        return [each for each in self.held if self.jobs[each].holder is worker]

    def requests(self, worker: Process) -> int:
        """How many chunks of requests a worker has."""
        return sum(not is_bulk_job(each) for each in self.held_by(worker))

    def leases(self, name: str) -> list[bytes]:
        """Who has a job, by leases that have not lapsed."""
        item = self.data.get(f"rq:wip:{self.queue}".encode())
        # The server tells the time in microseconds, and a lease that ends in this one has lapsed by that.
        entries, now = item.value._bylex.items() if item else (), self.world.redis.time() + RQ_DELAY + 1e-6
        return [entry for entry, until in entries if until > now and entry.startswith(f"{name}:".encode())]

    def has_run(self, run: str) -> bool:
        """Whether the server has a run."""
        return f"rankmill:run:{run}:meta".encode() in self.data

    def rows(self, run: str) -> int:
        """How many rows a run has, if it says so."""
        item = self.data.get(f"rankmill:run:{run}:meta".encode())
        return int(item.value.get(b"rows") or 0) if item else 0

    def pairs(self, name: str) -> int:
        """How many pairs a chunk has."""
        run, _, first = name.rpartition("-")
        left = self.rows(run) - int(first) if self.rows(run) else self.chunk_pairs
        return max(min(self.chunk_pairs, left), 0)

    def waits_for_runner(self, run: str) -> bool:
        """Whether the server knows of a submitted run that has not ended."""
        item = self.data.get(f"rankmill:file-run:{run}".encode())
        return item is not None and json.loads(item.value)["state"] in {"waiting", "running"}

    # What the server has carried out

    def _hset(self, args: list[bytes], reply: Any) -> None:
        if _is_run(args[0]):  # it is begun, or stored again
            for name in self._deleters():
                self.over.pop(name, None)
        if not args[0].startswith(b"rq:job:") or b"status" not in args[1::2]:
            return
        name, status = args[0][7:].decode(), args[args.index(b"status", 1) + 1]
        if status == b"started":
            if b"worker_name" in args[1::2]:
                self._begin(name)
        elif status in {b"scheduled", b"failed", b"finished"}:  # the last is a job's that brought its pairs
            if self._here:
                self.jobs[name].holders.discard(self._here)
            self._move(name, status.decode())

    def _push(self, args: list[bytes], reply: Any) -> None:
        if self._is_waiting_list(args[0]):
            self._lists.add(args[0])
            for name in args[1:]:
                if name == self._popped:  # it has moved to another list, or back
                    self._popped = b""
                else:
                    self._wait(name.decode())
        elif args[0].endswith(b":intermediate"):
            self._popped = b""
            self._take(args[1].decode())

    def _pop(self, args: list[bytes], reply: Any) -> None:
        if self._is_waiting_list(args[0]) and isinstance(reply, bytes):
            self._popped = reply

    def _is_waiting_list(self, key: bytes) -> bool:
        """Whether jobs wait under a key: RQ's list, or that of a run or of a tenant's requests."""
        queue = self.queue.encode()
        return key == b"rq:queue:" + queue or key.startswith(b"rankmill:queue:%s:waiting:" % queue)

    def _transfer(self, args: list[bytes], reply: Any) -> None:
        if reply is not None and args[1].endswith(b":intermediate"):
            self._take(reply.decode(), is_idle=True)

    def _remove(self, args: list[bytes], reply: Any) -> None:
        name = args[2].decode()
        if args[0].endswith(b":intermediate") and self.jobs[name].state == "taken":
            self._move(name, "gone")

    def _unlink(self, args: list[bytes], reply: Any) -> None:
        for key in args:
            if key.startswith(b"rq:job:") and key.count(b":") == 2:
                self._end(key[7:].decode())
            elif _is_run(key):
                self.over |= dict.fromkeys(self._deleters(), self.world.now)

    def _deleters(self) -> list[Process | str]:
        """For whom the current process begins or deletes a run: itself, and the submitted run that it has."""
        held = [run for run, (_, runner) in self.runs_held.items() if runner is self._here]
        return [self._here, *held] if self._here else []

    def _zadd(self, args: list[bytes], reply: Any) -> None:
        """A runner has claimed a submitted run, unless the lease is known: it is renewed, also by others."""
        if not self._here or not self._is_of_runners(args[0]):
            return
        run, known = args[-1].decode().partition(":")[0], [lease for lease, _ in self.runs_held.values()]
        if args[-1] not in known:
            self.runs_held[run] = args[-1], self._here
            self.left.pop(run, None)

    def _set(self, args: list[bytes], reply: Any) -> None:
        """A worker has left a note that a run has wrong scores."""
        if args[0].startswith(b"rankmill:run:") and args[0].endswith(b":wrong"):
            self.notes.add(args[0].decode())
            run = args[0].decode().split(":")[2]
            self.noted |= {run: self.world.now} if self.has_run(run) else {}

    def _zrem(self, args: list[bytes], reply: Any) -> None:
        """A runner gives up a submitted run, or ends it."""
        for entry in args[1:] if self._is_of_runners(args[0]) else ():
            run = entry.decode().partition(":")[0]
            if run in self.runs_held and self.runs_held[run] == (entry, self._here):
                del self.runs_held[run]
                self.let_go[run] = self.world.now

    def _is_of_runners(self, key: bytes) -> bool:
        return key.startswith(b"rq:wip:") and key != b"rq:wip:" + self.queue.encode()

    def _xadd(self, args: list[bytes], reply: Any) -> None:
        """A result was written, unless its run was gone."""
        if reply is None or not args[0].endswith(b":results") or b"chunk" not in args:
            return
        first = args.index(b"chunk")
        fields = dict(zip(args[first::2], args[first + 1 :: 2], strict=True))
        if (chunk := fields[b"chunk"].decode()).startswith("-"):
            return
        run, attempts = args[0].decode().split(":")[2], fields.get(b"attempts")
        found = Result(
            run,
            chunk,
            int(attempts) if attempts and b"died" in fields else None,
            fields.get(b"fatal") == b"1",
            fields.get(b"died") == b"1",
        )
        self._entries[run, reply] = found
        if found.fatal:
            has_begun = keys.settled(run).encode() in self.data
            self.deserted |= self.world.now - self._complete > LEASE - _LOOKS or not has_begun
        self.results += 1
        self._say("result", found)
        self._move(found.job, "done")

    def _xdel(self, args: list[bytes], reply: Any) -> None:
        """Whoever collects a run deletes results of it."""
        run = args[0].decode().split(":")[2] if args[0].endswith(b":results") else ""
        if found := [self._entries.pop((run, each)) for each in args[1:] if (run, each) in self._entries]:
            self._say("forgotten", found, self._here)

    SEEN: ClassVar[dict[str, Callable[[History, list[bytes], Any], None]]] = {
        "hset": _hset, "rpush": _push, "lpush": _push, "lpop": _pop, "lmove": _transfer,
        "blmove": _transfer, "lrem": _remove, "unlink": _unlink, "del": _unlink, "xadd": _xadd, "set": _set,
        "zadd": _zadd, "zrem": _zrem, "xdel": _xdel,
    }  # fmt: skip
    """What is done with a command and its reply, by the command's name."""

    # How a job moves

    def _begin(self, name: str) -> None:
        job, process = self.jobs[name], self._here
        if process is None or (job.state == "begun" and process in job.holders):
            return  # the same command again, as its reply was lost
        job.holders.add(process)
        job.state, job.holder, job.late = "begun", process, 0.0
        job.attempts += 1
        self.held.add(name)
        self._say("begun", name, process)

    def _wait(self, name: str) -> None:
        job = self.jobs[name]
        worker = self._here if self._here and self._here.name.startswith("worker-") else None
        if not worker:
            job.sent += 1
            self.sent_again |= {name} if job.state != "new" else set()
        self._say("put", name, worker)
        takes_over = job.holder is not None and not job.holder.alive
        if self._here in job.holders and not takes_over:  # it hands it back; another may have it, too
            job.holders.discard(self._here)
            job.attempts -= 1
        self._move(name, "waiting")

    def _end(self, name: str) -> None:
        """A job is deleted; who sends it deletes first what a lost one may have left."""
        if self.jobs[name].state != "new":
            if self.jobs[name].state == "done" and self._here and self._here.name.startswith("worker-"):
                self._say("over", name)
            self._move(name, "gone")

    def _move(self, name: str, state: str) -> None:
        self._say("moves", name)
        job = self.jobs[name]
        job.state, job.holder, job.late, job.since = state, None, 0.0, self.world.now
        self.held.discard(name)

    def _take(self, name: str, is_idle: bool = False) -> None:
        """A worker takes a job off the queue; of which runs others wait says whether it was its turn.

        The job of a worker that was idle is no turn of its tenant.
        """
        worker = self._here
        if worker is None:
            return
        job = self.jobs[name]
        job.state, job.holder, job.late = "taken", worker, 0.0
        self.held.add(name)
        self._say("taken", name, worker)
        run = name.rpartition("-")[0]
        if not self.fair or self.lost or is_piece(name):
            return
        if not self.has_run(run) or f"rq:job:{name}".encode() not in self.data or self.leases(name):
            return  # it is dropped, and costs nothing: its run is gone, it is over, or a worker has it
        if worker not in job.holders:  # else likewise: it lost its lease while it was cut off
            others = {run for run in {each.rpartition("-")[0] for each in self.waiting} if self.has_run(run)}
            self._say("turn", name, worker, others)
            if not is_idle:
                self._say("tenants_turn", name, worker, others)

    def look(self) -> None:
        """Look at what is late; to be called once a virtual second."""
        now = self.world.now
        passed, self._looked = now - self._looked, now
        workers = [each for each in self.world.processes if each.name.startswith("worker-") and each.alive]
        there = [each for each in workers if self.is_there(each)]
        if not there:
            self._apart = now
        if not self.world.redis.takes_writes or now - self._apart > BEAT:
            self._met = now
        if not self.is_up and now - passed < self.set_back_until:  # no heartbeat can bound leases now
            self.set_back_until += passed
        able = [each for each in there if each not in self.drained]
        if len(able) < self.size or not self.world.redis.takes_writes:
            self._short = now
        elif now - self._short > BEAT:
            self._complete = now
        self.computing = {each: since for each, since in self.computing.items() if each.alive}
        self.busy |= dict.fromkeys((each for each in workers if each not in able), now)
        self._say("look")
        if self.is_up and able:
            self._say("second", passed, able)
            return
        if not (self.is_up and there):
            self.disturb(0.0)
        for name in self.held:  # after an outage, leases are renewed before others' have lapsed
            self.jobs[name].late = min(self.jobs[name].late, -LEASE)
        self.busy = dict.fromkeys(able, now)
        self._say("standstill")

    @property
    def _here(self) -> Process | None:
        return self.world.current.process if self.world.current else None
