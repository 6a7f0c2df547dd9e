"""What happens to jobs and runs in a world, as the server's commands say it, and what of it breaks a promise.

The server tells of each command that it has carried out, those of scripts and transactions among them; a
device tells of its forwards. Once a virtual second `History.look` finds out what should have happened.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rankmill.jobs.contract.priority import GROUP
from rankmill.jobs.protocol.leases import UNRENEWED_SECONDS
from rankmill.jobs.protocol.ordered_queue import is_bulk_job

if TYPE_CHECKING:
    from tests.simulation.world import Process, World

BEAT, LEASE = 5.0, 15.0
"""Seconds: `heartbeat_seconds` and `lease_seconds`, which all promises are made of."""

TAKEN_OVER = LEASE + BEAT + 2
"""A dead worker's chunk is taken from it so soon: its lease ends, and a heartbeat of another worker comes;
that takes a moment, and a second lies between two looks. So is a dead runner's run by an idle one."""

RESCUED = 2 * LEASE + 2 * BEAT
"""A job that has left the queue and reached no worker is put back so soon: a cleaning sees it, and one that
comes a lease later does it."""

PROGRESS = 60
"""A forward is in progress, or ends, at least so often, while there is work, a worker and a server: a lost
chunk is sent again, and a pause between attempts ends. That begins anew with the death of a runner that has a
run, as four of them may die of it in a row; each of these is `TAKEN_OVER` from."""

NO_WORKERS = 60
"""A run ends with `NoWorkers` after no shorter time without a worker, by default."""

IDLE = 40
"""A worker scores something at least so often while jobs wait."""

CANCELLED = BEAT + 2
"""No forward with rows of a cancelled run begins later than that."""

SPLIT = 5
"""A chunk that kills its workers is sent again in two halves so soon."""

LOAD, PROOF = 0.5, 0.1
"""Seconds that a simulated model takes to load, and to score the probes."""

HEARD = LOAD + PROOF + 0.01
"""A worker that has room for requests takes one so soon, whatever else it does: its thread that claims also
loads a model and lets it be proven, and waits for nothing else. Commands take no time in a world. While it
changes its model it has no room: it ends what it has claimed for the one before, and loads the other."""

ENDED = 15
"""A worker that got SIGTERM ends so soon after its forward."""

SLACK = 6
"""Jobs that a kind or a run may be ahead of its part at one worker, beside what it may claim ahead."""

BULK_IN_A_ROW = 2
"""Bulk jobs that a worker takes before a request, at most: one at its turn, and one of a shorter chunk."""

REQUESTS_FOR_BULK = 3
"""Beside endless requests, bulk work keeps a quarter of the pairs."""

LAG = 12
"""A server that loses acknowledged writes loses none that are older."""


@dataclass
class Job:
    """How far a job has come, and for how many seconds somebody should have moved it."""

    state: str = "new"
    holder: Process | None = None
    holders: set[Process] = field(default_factory=set)
    attempts: int = 0
    late: float = 0.0
    since: float = 0.0


@dataclass
class Share:
    """How many jobs of each kind, tenant or run were taken while the same ones waited."""

    waiting: frozenset[str] = frozenset()
    taken: Counter[str] = field(default_factory=Counter)


def _is_piece(name: str | bytes) -> bool:
    """Whether the name of a job or of a chunk is that of some rows of a chunk, as of one that was split."""
    return "_" in (name.decode() if isinstance(name, bytes) else name)


def _is_run(key: bytes) -> bool:
    return key.startswith(b"rankmill:run:") and key.endswith(b":meta")


class History:
    """What has happened in a world so far.

    Attributes
    ----------
    found
        Broken promises, as sentences.
    worst
        The longest that anything took, in seconds, beside its bound.
    open
        Runs whose producer waits, and its process.
    queue
        Name of the queue.
    max_retries, claim_ahead_jobs, chunk_pairs, window
        What the cluster's settings promise; no `window` in chunks if it follows the workers.
    willing, fair, calm
        Whether no worker refuses anything for ever; nothing at all, so that all should be served alike;
        whether nothing goes wrong.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: list[str] = []
        self.worst: defaultdict[str, float] = defaultdict(float)
        self.open: dict[str, Process] = {}
        self.queue = "q"
        self.max_retries = 3
        self.claim_ahead_jobs = 64
        self.chunk_pairs = 16
        self.window: int | None = None
        self.detached: set[str] = set()
        """Runs whose pairs are sent as a whole, without a window; the cluster adds to it."""
        self.willing = self.fair = True
        self.calm = False
        self.one_engine = True
        """Whether one engine scores all runs; else workers put jobs aside, and count them when they begin."""
        self.undisturbed = False
        """Whether nothing goes wrong at all."""
        self.evicts = False
        """Whether the server evicts keys: a chunk may be lost in each of its attempts."""
        self.lost = False
        """Whether the server has lost data, and with them the count of attempts."""
        self.jobs: defaultdict[str, Job] = defaultdict(Job)
        self.computing: dict[Process, float] = {}
        """Workers in a forward, since when."""
        self.cancelled: dict[str, float] = {}
        """When a run was cancelled, by its name."""
        self.owners: dict[int, str] = {}
        """Runs that are cancelled at some time, by the first tokens of their pairs."""
        self.ending: dict[Process, float] = {}
        """Workers that got SIGTERM, and when."""
        self.drained: dict[Process, float] = {}
        """Workers that are to take no job, and since when, until they have resumed."""
        self.resuming: set[Process] = set()
        """The workers of these that were told to resume."""
        self.broken: dict[Process, float] = {}
        """Workers with a broken device, and since when."""
        self._reported: dict[Process, float] = {}
        """The workers of these that have detected and reported it, and when."""
        self._losses: list[float] = []
        self._noticed: set[Process] = set()
        self.notes: set[str] = set()
        """Notes that a run has wrong scores: they stay, as the run may be over, or its file may go on."""
        self.over: dict[Process | str, float] = {}
        """When a process has deleted its last run; by their ids also when runners did, of submitted runs."""
        self.wrong: set[str] = set()
        """Runs that were there when a worker left a note that they have wrong scores."""
        self.orphans: set[str] = set()
        """Runs whose producer has died, and whose successor deletes them."""
        self.abandoned: set[str] = set()
        """Runs whose producer has died; the cluster adds to it."""
        self.let_go: dict[str, float] = {}
        """When a runner has last let go of a submitted run, by its id."""
        self._runs_held: dict[str, tuple[bytes, Process]] = {}
        """Submitted runs by id: the lease of the runner that has one, and its process."""
        self._left: dict[str, float] = {}
        """The runs of these whose runner has ended, and since when one could have taken them."""
        self.results = 0
        self._held: set[str] = set()
        self._sent_again: set[str] = set()
        """Jobs that their producers have sent more than once: they may be in the queue twice."""
        self._kinds: defaultdict[Process, Share] = defaultdict(Share)
        self._runs: defaultdict[str, Share] = defaultdict(Share)
        self._tenants: defaultdict[str, Share] = defaultdict(Share)
        self._lists: set[bytes] = set()
        """Keys under which jobs have waited."""
        self._popped = b""
        """The job that was taken from one of these last, and is in no other yet."""
        self.weights: dict[str, float] = {}
        """Weights of tenants, by what stands for them in the ids of runs."""
        self._passed_over: Counter[Process] = Counter()
        """Pairs of requests that a worker without bulk work has taken while some waited."""
        self._before_requests: Counter[Process] = Counter()
        """Bulk jobs that a worker with room for requests has taken while one was next."""
        self._largest_batch = 0
        """Pairs of the largest forward so far."""
        self._busy: dict[Process, float] = {}
        self._full: dict[Process, float] = {}
        """When a worker last had all requests that it may claim, or another model."""
        self._loaded: set[Process] = set()
        self._splits: dict[str, float] = {}
        """Runs whose halves are not sent yet, since when."""
        self._advanced = self._set_back_until = 0.0
        self._disturbed_until = 0.0
        self._looked = 0.0
        self._apart = self._met = 0.0
        """When no worker was last in reach of the server, and until when one could say that it is there."""

    # What is told

    def disturb(self, seconds: float) -> None:
        """Something goes wrong, and for so many seconds promises of undisturbed times are none."""
        self._disturbed_until = max(self._disturbed_until, self.world.now + seconds)

    def lose(self) -> None:
        """The server has lost data."""
        self.lost = True
        self._losses.append(self.world.now)
        self._held.clear()
        self._runs_held.clear()
        self._left.clear()
        for job in self.jobs.values():
            job.state, job.holder, job.late = "new", None, 0.0
            job.holders.clear()

    @property
    def lacks_workers(self) -> bool:
        """Whether none could tell a server that takes writes, for a minute, that it is there."""
        return self.world.now - self._met > NO_WORKERS

    def set_back(self) -> None:
        """The server's clock has jumped back: what a dead worker holds stays with it for longer."""
        self._set_back_until = self.world.now + UNRENEWED_SECONDS
        for name in self._held:
            self.jobs[name].late = -UNRENEWED_SECONDS

    def forward(self, firsts: Sequence[int]) -> None:
        """A worker begins a forward of pairs with these first tokens."""
        assert self.world.current
        self._largest_batch = max(self._largest_batch, len(firsts))
        self.computing[self.world.current.process] = self.world.now
        if self.cancelled and self._disturbed_until < min(self.cancelled.values()):
            for name in {self.owners.get(first, "") for first in firsts} & self.cancelled.keys():
                self._took("cancelled", self.world.now - self.cancelled[name], CANCELLED, f"{name} is scored")

    def forwarded(self) -> None:
        """The forward of a worker has ended."""
        assert self.world.current
        self.computing.pop(self.world.current.process, None)
        self._advanced = self._busy[self.world.current.process] = self.world.now

    def loaded(self) -> None:
        """A worker has loaded a model, in the place of the one before if it had one."""
        assert self.world.current
        process = self.world.current.process
        if process in self._loaded:
            self._full[process] = self.world.now
        self._loaded.add(process)

    def noticed(self, process: Process) -> None:
        """A worker has seen that its device computes wrong scores; it ends when it has told so."""
        self._noticed.add(process)

    def may_be_wrong(self, since: float) -> bool:
        """Whether nobody had told by `since`, when a run was over, of a broken device, or that was lost."""
        told = [self._reported.get(each, math.inf) for each in self.broken]
        return any(at >= since or any(0 <= loss - at <= LAG for loss in self._losses) for at in told)

    def may_be_lost(self, row: int, error: str | None) -> bool:
        """Whether a good row may have this error: its chunk has had all attempts, and keys are evicted.

        Each loss is an attempt then.
        """
        attempts = self.max_retries + 1
        if not self.evicts or error != f"given up after attempt {attempts}: it was lost":
            return False
        unlucky = [
            int(name.rpartition("-")[2])
            for name, job in self.jobs.items()
            if job.attempts >= attempts and not _is_piece(name)
        ]
        return any(first <= row < first + self.chunk_pairs for first in unlucky)

    @property
    def times_counted(self) -> int:
        """How often a row of a file may count: one that a broken device has scored is begun again."""
        return 8 if self.broken else 1

    def ended(self, process: Process) -> None:
        """A process has ended."""
        self.computing.pop(process, None)
        if left := [run for run, (_, runner) in self._runs_held.items() if runner is process]:
            self._left |= dict.fromkeys(left, self.world.now)
            self._advanced = self.world.now
        if process in self._noticed and process.status == 1:
            self._reported[process] = self.world.now
        told = process in self.ending or process in self._noticed
        if process.name.startswith("worker-") and process.status in {0, 1} and not told:
            self._tell(f"{process.name} ended, and nobody has told it to")
        held = [name for name in self._held if self.jobs[name].holder is process]
        stopped = process.status == 0 or (process.status == 1 and process in self._noticed)
        if stopped and held and self._is_up and self.world.now > self._disturbed_until:
            self._tell(f"{process.name} ended and kept {', '.join(held)}")

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

    @property
    def _waiting(self) -> list[str]:
        """The jobs that wait, wherever."""
        return [each.decode() for key in sorted(self._lists) for each in self._list(key.decode())]

    def _transfer(self, args: list[bytes], reply: Any) -> None:
        if reply is not None and args[1].endswith(b":intermediate"):
            self._take(reply.decode())

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
        held = [run for run, (_, runner) in self._runs_held.items() if runner is self._here]
        return [self._here, *held] if self._here else []

    def _zadd(self, args: list[bytes], reply: Any) -> None:
        """A runner has claimed a submitted run, unless the lease is known: it is renewed, also by others."""
        if not self._here or not self._is_of_runners(args[0]):
            return
        run, known = args[-1].decode().partition(":")[0], [lease for lease, _ in self._runs_held.values()]
        if args[-1] not in known:
            self._runs_held[run] = args[-1], self._here
            self._left.pop(run, None)

    def _set(self, args: list[bytes], reply: Any) -> None:
        """A worker has left a note that a run has wrong scores."""
        if args[0].startswith(b"rankmill:run:") and args[0].endswith(b":wrong"):
            self.notes.add(args[0].decode())
            run = args[0].decode().split(":")[2]
            self.wrong |= {run} if self._exists(f"rankmill:run:{run}:meta") else set()

    def _zrem(self, args: list[bytes], reply: Any) -> None:
        """A runner gives up a submitted run, or ends it."""
        for entry in args[1:] if self._is_of_runners(args[0]) else ():
            run = entry.decode().partition(":")[0]
            if run in self._runs_held and self._runs_held[run] == (entry, self._here):
                del self._runs_held[run]
                self.let_go[run] = self.world.now

    def _is_of_runners(self, key: bytes) -> bool:
        return key.startswith(b"rq:wip:") and key != b"rq:wip:" + self.queue.encode()

    def _xadd(self, args: list[bytes], reply: Any) -> None:
        """A result was written, unless its run was gone."""
        if reply is None or not args[0].endswith(b":results") or b"chunk" not in args:
            return
        first = args.index(b"chunk")
        fields = dict(zip(args[first::2], args[first + 1 :: 2], strict=True))
        run = args[0].decode().split(":")[2]
        if fields[b"chunk"].startswith(b"-"):
            return
        name = f"{run}-{fields[b'chunk'].decode()}"
        self.results += 1
        self._advanced = self.world.now
        if b"died" in fields and not self.lost:
            self._gave_up(name, fields)
        splits = fields.get(b"died") == b"1" and not _is_piece(name) and not self.lost
        if splits and int(fields[b"chunk"]) + 1 < self._rows(run):
            self._splits[run] = self.world.now
        self._move(name, "done")

    SEEN: ClassVar[dict[str, Callable[[History, list[bytes], Any], None]]] = {
        "hset": _hset, "rpush": _push, "lpush": _push, "lpop": _pop, "lmove": _transfer,
        "blmove": _transfer, "lrem": _remove, "unlink": _unlink, "del": _unlink, "xadd": _xadd, "set": _set,
        "zadd": _zadd, "zrem": _zrem,
    }  # fmt: skip
    """What is done with a command and its reply, by the command's name."""

    # How a job moves

    def _begin(self, name: str) -> None:
        job, process = self.jobs[name], self._here
        if process is None or (job.state == "begun" and process in job.holders):
            return  # the same command again, as its reply was lost
        if len(self._leases(name)) > 1 and not self.lost and self.world.now > self._set_back_until:
            self._tell(f"{process.name} begins {name}, and another worker has it")
        job.holders.add(process)
        job.state, job.holder, job.late = "begun", process, 0.0
        job.attempts += 1
        self._held.add(name)
        if job.attempts > self.max_retries + 1 and not self.lost:
            self._tell(f"{name} is tried {job.attempts} times, and {self.max_retries + 1} are allowed")
        since = self.drained.get(process)
        if since is not None and process not in self.resuming and since > self._disturbed_until:
            self._took("drained", self.world.now - since, 2 * BEAT, f"a drained worker takes {name}")

    def _wait(self, name: str) -> None:
        job = self.jobs[name]
        if not (self._here and self._here.name.startswith("worker-")):
            self._sent_again |= {name} if job.state != "new" else set()
        elif name not in self._sent_again and not self.lost:
            self._look_at_places(name, self._here)
        if _is_piece(name):
            self._splits.pop(name.rpartition("-")[0], None)
        takes_over = job.holder is not None and not job.holder.alive
        if self._here in job.holders and not takes_over:  # it hands it back; another may have it, too
            job.holders.discard(self._here)
            job.attempts -= 1
        self._move(name, "waiting")

    def _end(self, name: str) -> None:
        """A job is deleted; a worker that does so with a result has no lease of it any more."""
        if self.jobs[name].state == "new":
            return  # who sends it deletes first what a lost one may have left
        ends = self.jobs[name].state == "done" and self._here and self._here.name.startswith("worker-")
        alone = name not in self._sent_again and not self.lost and self.world.now > self._disturbed_until
        if ends and alone and self._leases(name):
            self._tell(f"{name} has ended, and a worker has it still")
        self._move(name, "gone")

    def _look_at_places(self, name: str, worker: Process) -> None:
        """A worker puts a job into the queue that nobody has, once."""
        if self._waiting.count(name) > 1:
            self._tell(f"{worker.name} puts {name} into the queue, and it is there already")
        holder = self.jobs[name].holder  # the lease of a dead one lapses just now
        if holder and holder.alive and self._leases(name) and self.world.now > self._set_back_until:
            self._tell(f"{worker.name} puts {name} into the queue, and a worker has it")

    def _move(self, name: str, state: str) -> None:
        job = self.jobs[name]
        if job.holder and not is_bulk_job(name) and self._requests(job.holder) >= self.claim_ahead_jobs:
            self._full[job.holder] = self.world.now
        job.state, job.holder, job.late, job.since = state, None, 0.0, self.world.now
        self._held.discard(name)

    def _gave_up(self, name: str, fields: dict[bytes, bytes]) -> None:
        """A failure says after how many attempts; a piece with several rows has one, as it is split."""
        said, made = int(fields[b"attempts"]), self.jobs[name].attempts
        allowed = {self.max_retries + 1, *([1] if _is_piece(fields[b"chunk"]) else [])}
        if fields[b"fatal"] == b"0" and (said not in allowed or made < said):
            self._tell(f"{name} is given up after {made} attempts, it says {said}")

    def _take(self, name: str) -> None:
        """A worker takes a job off the queue; which others wait says whether it was its turn."""
        worker = self._here
        if worker is None:
            return
        job = self.jobs[name]
        if self.calm and worker in self._busy and not is_bulk_job(name):  # it has scored before
            if self._requests(worker) >= self.claim_ahead_jobs:  # scored a moment ago, and not yet answered
                self._full[worker] = self.world.now
            since = max(job.since, self._full.get(worker, 0.0))
            self._took("unheard", self.world.now - since, HEARD, f"{name} waits, and {worker.name} has room")
        job.state, job.holder, job.late = "taken", worker, 0.0
        self._held.add(name)
        if not self.fair or self.lost or _is_piece(name):
            return
        if not self._has_run(name) or not self._exists(f"rq:job:{name}") or self._leases(name):
            return  # it is dropped, and costs nothing: its run is gone, it is over, or a worker has it
        if worker in job.holders:
            return  # likewise: this worker scores it still, and lost its lease while it was cut off
        others = [each for each in self._waiting if self._has_run(each)]
        kinds = {"bulk" if is_bulk_job(each) else "request" for each in others}
        kind = "bulk" if is_bulk_job(name) else "request"
        ahead = self._ahead(self._kinds[worker], kinds | {kind}, kind, {"request": 3.0, "bulk": 1.0})
        claimed = self.claim_ahead_jobs
        if claimed * self.chunk_pairs >= 2 * self._largest_batch:  # else it claims so much bulk work only
            self._took("ahead of its part", ahead, self._slack + 2 * claimed, f"{kind} jobs come first")
        self._look_at_turn(name, worker, bulk_waits="bulk" in kinds)
        if self.one_engine:
            self._look_at_requests(name, worker, is_next="request" in kinds)
        alike = {each.partition("-")[0] for each in others if is_bulk_job(each) == is_bulk_job(name)}
        run = name.partition("-")[0]
        tenants, mine = {each[-GROUP:] for each in alike}, run[-GROUP:]
        ahead = self._ahead(self._tenants[kind], tenants | {mine}, mine, self.weights)
        much = self._slack * max(self.weights.values(), default=1.0)
        self._took("ahead of other tenants", ahead, much, f"a tenant has {ahead:.0f} {kind} jobs too many")
        if kind == "bulk":
            own = {each for each in alike if each.endswith(mine)}
            ahead = self._ahead(self._runs[mine], own | {run}, run, {})
            self._took(
                "ahead of other runs", ahead, self._slack, f"a run has {ahead:.0f} jobs more than another"
            )

    def _look_at_turn(self, name: str, worker: Process, *, bulk_waits: bool) -> None:
        """A worker that has no bulk work takes some at its turn: after a turn of requests, and one job more.

        One job more again: the worker may have looked when no bulk work waited.
        """
        has_bulk = any(self.jobs[each].holder is worker and is_bulk_job(each) for each in [*self._held])
        counts = self._is_up and not self.owners and self.jobs[name].attempts == 0  # else it may drop the job
        if has_bulk or not bulk_waits or not counts:
            del self._passed_over[worker]
            return
        run, _, first = name.rpartition("-")
        if not _is_piece(name):
            self._passed_over[worker] += max(min(self.chunk_pairs, self._rows(run) - int(first)), 0)
        self._took(
            "pairs before bulk", self._passed_over[worker], (REQUESTS_FOR_BULK + 2) * self.chunk_pairs,
            f"{worker.name} has no bulk work, and takes requests",
        )  # fmt: skip

    def _look_at_requests(self, name: str, worker: Process, *, is_next: bool) -> None:
        """A worker that has room for the next job, a request, takes bulk work for one turn."""
        if not is_bulk_job(name) or not is_next or self._requests(worker) >= self.claim_ahead_jobs:
            del self._before_requests[worker]
            return
        self._before_requests[worker] += 1
        self._took(
            "bulk jobs before requests", self._before_requests[worker], BULK_IN_A_ROW,
            f"{worker.name} has room for a request, and takes bulk work",
        )  # fmt: skip

    @property
    def _slack(self) -> int:
        """As `SLACK`; a worker counts what it puts aside for an engine only when it has loaded that."""
        return SLACK + (0 if self.one_engine else self.claim_ahead_jobs)

    def _requests(self, worker: Process) -> int:
        return sum(self.jobs[each].holder is worker and not is_bulk_job(each) for each in [*self._held])

    def _ahead(self, share: Share, waiting: set[str], mine: str, weights: dict[str, float]) -> float:
        """By how many jobs, weighed by its part, the one that takes is ahead of those that wait as well."""
        if share.waiting != waiting:
            share.waiting, share.taken = frozenset(waiting), Counter()
        share.taken[mine] += 1
        if len(waiting) < 2:
            return 0.0
        had = {each: share.taken[each] / weights.get(each, 1.0) for each in waiting}
        return (had[mine] - min(had.values())) * weights.get(mine, 1.0)

    # What should have happened by now

    def look(self) -> None:
        """Look at what is late; to be called once a virtual second."""
        now = self.world.now
        passed, self._looked = now - self._looked, now
        workers = [each for each in self.world.processes if each.name.startswith("worker-") and each.alive]
        there = [each for each in workers if not each.stopped and self.world.redis.reaches(each)]
        if not there:
            self._apart = now
        if not self.world.redis.takes_writes or now - self._apart > BEAT:
            self._met = now
        if not self._is_up and now - passed < self._set_back_until:  # no heartbeat can bound leases now
            self._set_back_until += passed
        able = [each for each in there if each not in self.drained]
        self.computing = {each: since for each, since in self.computing.items() if each.alive}
        serves = self._is_up and bool(able)
        self._busy |= dict.fromkeys((each for each in workers if each not in able), now)
        if not serves:
            if not (self._is_up and there):
                self.disturb(0.0)
            self._advanced = max(self._advanced, now)
            for name in self._held:  # after an outage, leases are renewed before others' have lapsed
                self.jobs[name].late = min(self.jobs[name].late, -LEASE)
            self._busy = dict.fromkeys(able, now)
        else:
            self._look_at_jobs(passed)
            if self.willing:
                self._look_at_workers(able)
            for run in list(self._splits):  # nobody sends halves of a run that is gone, or whose producer is
                if run in self.abandoned | self.orphans or not self._exists(f"rankmill:run:{run}:meta"):
                    del self._splits[run]
            for run, died in self._splits.items():
                since = max(died, self._disturbed_until)
                self._took(
                    "split", self.world.now - since, SPLIT, f"the halves of a chunk of {run} are not sent"
                )
            runners = [
                each for each in self.world.processes if each.name.startswith("runner-") and each.alive
            ]
            self._look_at_runs(runners, passed)
            if (  # a runner that stands still, or is cut off, perhaps has the output
                self._waits_for_producers()
                or any(each.stopped or not self.world.redis.reaches(each) for each in runners)
                or any(each in self.computing for each in able)
            ):
                self._advanced = max(self._advanced, now)
            since = max(self._advanced, self._set_back_until)
            self._took("without progress", now - since, PROGRESS, "nothing goes on")
        for worker, since in list(self.ending.items()):
            waits = worker in self.computing or not self._is_up or not self.world.redis.reaches(worker)
            if not worker.alive or worker.stopped or waits:
                self.ending[worker] = now
            self._took("ending", now - since if worker.alive else 0, ENDED, f"{worker.name} does not end")
        self._look_at_keys()

    def _waits_for_producers(self) -> bool:
        """Whether nothing is to do for workers until some producer can send it."""
        if any(not each.stopped and self.world.redis.reaches(each) for each in self.open.values()):
            return False
        return not self._held and not self._waiting

    def _look_at_jobs(self, passed: float) -> None:
        """Jobs that nobody has any more are put back."""
        for name in list(self._held):
            job = self.jobs[name]
            if job.state == "taken":
                job.late += passed
                self._took("rescued", job.late, RESCUED, f"{name} left the queue and is nowhere")
            elif job.holder and not job.holder.alive:
                job.late += passed
                if not self._has_run(name):
                    self._held.discard(name)
                else:
                    self._took("taken over", job.late, TAKEN_OVER, f"{name} stays with a dead worker")

    def _look_at_runs(self, runners: list[Process], passed: float) -> None:
        """A submitted run whose runner has died is taken by one that has none."""
        there = [each for each in runners if not each.stopped and self.world.redis.reaches(each)]
        busy = [process for _, process in self._runs_held.values()]
        idle = [each for each in there if each not in busy]
        if self.world.now < self._set_back_until and not there:  # nor does a heartbeat bound its lease
            self._set_back_until += passed
        for run in list(self._left):
            if not self._waits_for_runner(run):
                del self._left[run]
                continue
            if not idle:
                self._left[run] = self.world.now
            since = max(self._left[run], self._disturbed_until, self._set_back_until)
            late = self.world.now - since
            self._took("run taken over", late, TAKEN_OVER, f"{run} stays with a dead runner")

    def _waits_for_runner(self, run: str) -> bool:
        """Whether the server knows of a submitted run that has not ended."""
        item = self._data.get(f"rankmill:file-run:{run}".encode())
        return item is not None and json.loads(item.value)["state"] in {"waiting", "running"}

    def _look_at_workers(self, able: list[Process]) -> None:
        """A worker that has nothing else to do scores what waits."""
        waits = bool(self._waiting)
        for worker in able:
            if not waits or worker in self.computing:
                self._busy[worker] = self.world.now
            idle = self.world.now - self._busy.setdefault(worker, self.world.now)
            self._took("idle", idle, IDLE, f"{worker.name} scores nothing, and jobs wait")

    def _look_at_keys(self) -> None:
        """Every key of ours expires; a run's payloads are no more than its window."""
        pairs: Counter[str] = Counter()
        for key, item in self._data.items():
            if key.startswith((b"rankmill:", b"rq:job:", b"rq:execution")) and item.expireat is None:
                self._tell(f"{key.decode(errors='replace')} does not expire")
            if key.startswith(b"rankmill:run:"):
                run, _, rest = key[13:].partition(b":")
                pairs[run.decode()] += rest.startswith(b"pairs:") and not _is_piece(rest)
        if self.window is not None and not self.lost:
            for run, count in pairs.items():
                if run not in self.detached:
                    self._took("payloads over the window", count - self.window, 0, "the window is exceeded")

    # The world

    @property
    def _here(self) -> Process | None:
        return self.world.current.process if self.world.current else None

    @property
    def _data(self) -> Any:
        return self.world.redis.fake.dbs[0]._dict

    @property
    def _is_up(self) -> bool:
        return self.world.redis.serves

    def ends_well(self, runs: Iterable[str]) -> None:
        """Runs of a producer are over, and it has no reason to doubt their scores."""
        for run in self.wrong.intersection(runs):
            if not self.lost and not self._exists(f"rankmill:run:{run}:meta"):  # else it is removed later
                self._tell(f"{run} ends well, and before its end a worker said that it has wrong scores")

    def _rows(self, run: str) -> int:
        item = self._data.get(f"rankmill:run:{run}:meta".encode())
        return int(item.value.get(b"rows") or 0) if item else 0

    def _has_run(self, job: str) -> bool:
        return self._exists(f"rankmill:run:{job.rpartition('-')[0]}:meta")

    def _exists(self, key: str) -> bool:
        return key.encode() in self._data

    def _leases(self, name: str) -> list[bytes]:
        """Who has a job, by leases that have not lapsed."""
        item = self._data.get(f"rq:wip:{self.queue}".encode())
        # The server tells the time in microseconds, and a lease that ends in this one has lapsed by that.
        entries, now = item.value._bylex.items() if item else (), self.world.redis.time() + 1e-6
        return [entry for entry, until in entries if until > now and entry.startswith(f"{name}:".encode())]

    def _list(self, key: str) -> list[bytes]:
        item = self._data.get(key.encode())
        return item.value if item else []

    def _took(self, what: str, much: float, bound: float, why: str) -> None:
        """Note how much something was, in seconds or jobs, and whether that is over the bound."""
        self.worst[what] = max(self.worst[what], much)
        if much > bound:
            self._tell(f"{why} ({what}: {much:.1f}, at most {bound:g}, at {self.world.now:.1f} s)")

    def _tell(self, found: str) -> None:
        if not self.found:  # what follows from it is no news
            self.world.tell(f"BROKEN PROMISE: {found}")
            self.found.append(found)
