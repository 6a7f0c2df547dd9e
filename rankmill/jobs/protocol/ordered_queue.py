"""RQ's queue with a waiting list for each run, and turns of tenants and runs by the pairs that they have had.

RQ's own list holds jobs by name, and a chunk for each worker that waits there. All other chunks wait in a
list of their run, or requests in one of their tenant. `waiting.lua` tells which keys its scripts have; what
taking a job costs does not depend on how many wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.priority import Priority, priority_of
from rankmill.jobs.protocol.rq import RQQueue, workers_of
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.runtime.patience import each_reply

IDLE_SECONDS = 5
"""How long a worker counts as idle, or as waiting at RQ's list, that says nothing more."""

_PROBES = 4
"""Jobs by which lost lists are detected: a producer waits for its first ones."""

_PUT_BACK_AT_ONCE = 1000
"""Jobs that one script looks for. It walks through the lists once: 100,000 jobs take tens of milliseconds."""

_REMOVE_AT_ONCE = 100
"""Jobs that one script removes, with their hashes and payloads: about a millisecond of the server."""

_WAITING = Script("jobs/protocol/lua/waiting.lua")
_TURNS = Script("jobs/protocol/lua/turns.lua", _WAITING)
_PUSHING = Script("jobs/protocol/lua/pushing.lua", _TURNS)
_TAKING = Script("jobs/protocol/lua/taking.lua", _PUSHING)
_PUT = Script("jobs/protocol/lua/put.lua", _PUSHING)
_TAKE = Script("jobs/protocol/lua/take.lua", _TAKING)
_RESCUE = Script("jobs/protocol/lua/rescue.lua", _PUSHING)
_PUT_BACK = Script("jobs/protocol/lua/put_back.lua", _PUSHING)
_MEND = Script("jobs/protocol/lua/mend.lua", _PUSHING)
_REMOVE = Script("jobs/protocol/lua/remove.lua", _WAITING)
_COUNT = Script("jobs/protocol/lua/count_waiting.lua", _WAITING)
_CLAIM_IDLE = Script("jobs/protocol/lua/claim_idle.lua", _WAITING)

"""Ids of jobs that are chunks of runs; `waiting.lua` has the same."""


class Taken(NamedTuple):
    """What an attempt to take a job found: its id, if any, and how the queue is now.

    ``waiting`` counts jobs, ``workers`` the workers that are registered, ``idle`` those of them without work.
    """

    job_id: bytes
    waiting: int
    workers: int
    idle: int


class OrderedQueue(RQQueue):
    """RQ's queue, in which every way to put a job lets it wait where it belongs."""

    @property
    def _places(self) -> list[str]:
        """The first keys of all scripts."""
        return [keys.of_queue(self.name), self.key, Job.key_for("")]

    @property
    def count(self) -> int:
        """The number of jobs that wait."""
        connection: Any = self.connection
        with connection.pipeline(transaction=False) as pipe:
            pipe.get(keys.waits(self.name))
            pipe.llen(self.key)
            return sum(int(each or 0) for each in pipe.execute())

    def waiting_list(self, job_id: str) -> str:
        """The key of the list in which a job waits, unless it is in RQ's."""
        run_id = _run_of(job_id)
        return self.key if run_id is None else keys.waiting(self.name, run_id)

    def place(self, client: Any, job_id: str | bytes, *, at_front: bool) -> None:
        """Put a chunk's id before the others of its run, as it has waited before; others where RQ wants them.

        `at_front` is said of a job that a worker hands back; it gives its turn back.
        """
        front = at_front or _run_of(job_id) is not None
        _PUT.run(client, self._places, int(front), int(at_front), job_id)

    def add(self, pipe: Any, job_ids: Iterable[str]) -> None:
        """Put new jobs of a run behind the run's others."""
        _PUT.run(pipe, self._places, 0, 0, *job_ids)

    def rescue(self, job_id: bytes, seen: bytes, now: float, seconds: float) -> None:
        """Put a job back that was taken `seconds` ago and is not begun; the key `seen` says since when.

        One that is on its way again soon may be put back too early: who begins it takes it out of the queue.
        """
        places = [*self._places, self.intermediate_queue_key, seen]
        _RESCUE.run(self.connection, places, job_id, now, seconds)

    def count_waiting(self) -> tuple[int, set[str]]:
        """Count anew what waits; return how many requests, and the tenants whose bulk work waits."""
        requests, tenants = _COUNT.run(self.connection, self._places)
        return requests, {tenant.decode(errors="replace") for tenant in tenants}

    def put_back(self, job_ids: Sequence[str]) -> int:
        """Put jobs of a run back that wait, pause or run by their hashes, and are in no list.

        A list was lost, so no worker would ever find them. All of them are looked for only if one of the
        first few is not found. A job never gets into the queue twice by this; if a worker has it though its
        lease was lost, it may be scored twice. A list whose turn was lost gets it back. Returns how many.
        """
        if not job_ids:
            return 0
        _MEND.run(self.connection, self._places, job_ids[0])
        if self._has(job_ids[:_PROBES]):
            return 0
        client: Any = self.connection
        places = [*self._places, self.intermediate_queue_key, self.scheduled_job_registry.key]
        places.append(self.started_job_registry.key)
        with client.pipeline(transaction=False) as pipe:
            for first in range(0, len(job_ids), _PUT_BACK_AT_ONCE):
                _PUT_BACK.run(pipe, places, *job_ids[first : first + _PUT_BACK_AT_ONCE])
            return sum(pipe.execute())

    def _has(self, job_ids: Sequence[str]) -> bool:
        """Whether each of a few jobs is in one of the lists; a job that moves meanwhile may be missed."""
        commands: list[tuple[Any, ...]] = [("zrange", self.started_job_registry.key, 0, -1)]
        for job_id in job_ids:
            for key in (self.waiting_list(job_id), self.key, self.intermediate_queue_key):
                commands.append(("lpos", key, job_id))
            commands.append(("zscore", self.scheduled_job_registry.key, job_id))
        leases, *found = each_reply(self.connection, commands)
        if isinstance(leases, Exception):  # or a list of another type, which a person must repair first
            return True
        leased = {entry.rpartition(b":")[0].decode(errors="replace") for entry in leases}
        return all(
            job_id in leased or any(place is not None for place in found[4 * at : 4 * at + 4])
            for at, job_id in enumerate(job_ids)
        )

    def remove_run(self, run_id: str, chunks: Sequence[ChunkId]) -> int:
        """Remove the waiting jobs of a run's chunks, with their hashes and payloads; return how many.

        Other commands of the server wait for a millisecond only, however many jobs there are.
        """
        places = [*self._places, keys.pairs(run_id, "")]
        jobs, removed = [keys.job_id(run_id, chunk) for chunk in chunks], 0
        for first in range(0, len(jobs), _REMOVE_AT_ONCE):
            some = jobs[first : first + _REMOVE_AT_ONCE]
            if priority_of(run_id) == "bulk":
                some = some[:1]
            found = int(_REMOVE.run(self.connection, places, _REMOVE_AT_ONCE, *some))
            removed += found
            if priority_of(run_id) == "bulk" and not found:
                break
        return removed

    def take(
        self,
        kinds: Sequence[Priority],
        *,
        worker: str = "",
        waits: bool = False,
        idle: bool = False,
        alone: Iterable[str] = (),
    ) -> Taken:
        """Move the next job of one of `kinds`, the preferred first, to the intermediate queue, if one waits.

        Parameters
        ----------
        kinds
            Which jobs to take.
        worker, waits, idle
            Name of the worker; without a job, whether it will wait for one at RQ's list, and whether it will
            be idle.
        alone
            Ids of runs that it leaves alone.
        """
        places = [*self._places, self.intermediate_queue_key, workers_of(self.name)]
        how = [" ".join(kinds), worker, int(waits), int(idle), IDLE_SECONDS]
        return Taken(*_TAKE.run(self.connection, places, *how, *alone))

    def claim_idle(self, most: int) -> int:
        """Forget up to `most` idle workers and return how many; 0 while jobs wait, which they will take."""
        return int(_CLAIM_IDLE.run(self.connection, self._places, most))


def is_bulk_job(job_id: str | bytes) -> bool:
    """Whether a job is a chunk of a bulk run, as its id says."""
    run_id = _run_of(job_id)
    return run_id is not None and priority_of(run_id) == "bulk"


def _run_of(job_id: str | bytes) -> str | None:
    """The run of a job that is a chunk, as its id says."""
    found = keys.parse_job_id(job_id if isinstance(job_id, str) else job_id.decode(errors="replace"))
    return found and found[0]
