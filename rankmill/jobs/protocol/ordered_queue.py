"""RQ's queue, extended so that tenants share the workers and each run has a waiting list of its own.

The next job is for the tenant with the lowest count: the pairs that workers have taken from the tenant,
divided by the tenant's weight. A tenant's runs are chosen in the same way.

The chunks of a bulk run wait in the run's own list, and all requests of a tenant in one list. RQ's own list
contains only jobs that callers enqueue by name, and one chunk for each worker that waits at this list.
`waiting.lua` describes the keys of the queue's scripts. The cost of taking a job does not depend on how many
jobs wait.
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

IDLE_SECONDS = 5
"""A worker counts as idle, or as waiting at RQ's list, for this many seconds after it last said so."""

_PUT_BACK_FIRST, _PUT_BACK_AT_ONCE = 4, 1000
"""The first call of the script `_PUT_BACK` looks for at most `_PUT_BACK_FIRST` jobs, and each further call
for at most `_PUT_BACK_AT_ONCE`. If a job is lost, the script reads whole lists, which takes tens of
milliseconds for 100,000 jobs.
"""

_REMOVE_AT_ONCE = 100
"""One call of the script `_REMOVE` removes at most this many jobs, with their hashes and payloads, which
takes about a millisecond.
"""

_WAITING = Script("jobs/protocol/lua/waiting.lua")
_PUT = Script("jobs/protocol/lua/put.lua", _WAITING)
_TAKE = Script("jobs/protocol/lua/take.lua", _WAITING)
_RESCUE = Script("jobs/protocol/lua/rescue.lua", _WAITING)
_PUT_BACK = Script("jobs/protocol/lua/put_back.lua", _WAITING)
_REMOVE = Script("jobs/protocol/lua/remove.lua", _WAITING)
_COUNT = Script("jobs/protocol/lua/count_waiting.lua", _WAITING)
_CLAIM_IDLE = Script("jobs/protocol/lua/claim_idle.lua", _WAITING)


class Taken(NamedTuple):
    """The result of an attempt to take a job.

    Attributes
    ----------
    job_id
        The job's id; empty if none was taken.
    waiting
        Number of jobs that wait in the queue.
    workers, idle
        Number of registered workers, and of workers without work.
    """

    job_id: bytes
    waiting: int
    workers: int
    idle: int


class OrderedQueue(RQQueue):
    """RQ's queue, in which each chunk waits in the list of its run or tenant."""

    @property
    def _places(self) -> list[str]:
        """The keys that every Lua script of this queue gets first."""
        return [keys.of_queue(self.name), self.key, Job.key_for("")]

    @property
    def count(self) -> int:
        connection: Any = self.connection
        with connection.pipeline(transaction=False) as pipe:
            pipe.get(keys.waits(self.name))
            pipe.llen(self.key)
            return sum(int(length or 0) for length in pipe.execute())

    def waiting_list(self, job_id: str) -> str:
        """Return the key of the list in which a job waits.

        A chunk may be in RQ's own list instead, if it was moved there for a worker that waits at that list.
        """
        run_id = _run_of(job_id)
        return self.key if run_id is None else keys.waiting(self.name, run_id)

    def place(self, client: Any, job_id: str | bytes, *, at_front: bool) -> None:
        """Put a job into the list in which it waits; RQ calls this for each job that it enqueues.

        A chunk always goes to the front, because RQ enqueues only chunks that come back, for example after a
        failed attempt. `add` puts new chunks into the list.

        Parameters
        ----------
        client, job_id
            The server or a pipeline, and the job.
        at_front
            Whether a worker hands the job back unscored. If so, the job's pairs no longer count for its
            tenant and run.
        """
        front = at_front or _run_of(job_id) is not None
        _PUT.run(client, self._places, int(front), int(at_front), job_id)

    def add(self, pipe: Any, job_ids: Iterable[str]) -> None:
        """Put new jobs of a run at the end of the list in which the run's jobs wait."""
        _PUT.run(pipe, self._places, 0, 0, *job_ids)

    def rescue(self, job_id: bytes, seen: bytes, now: float, seconds: float) -> None:
        """Put back a job that a worker has taken but not begun for `seconds`.

        The first call for a job only writes the time `now` to the key `seen`. A call more than `seconds`
        later puts the job back. If the worker was only slow and begins the job after all, the worker removes
        the job from the queue again.
        """
        places = [*self._places, self.intermediate_queue_key, seen]
        _RESCUE.run(self.connection, places, job_id, now, seconds)

    def count_waiting(self) -> tuple[int, set[str]]:
        """Count the waiting jobs, and correct the stored count. Also note whether plain RQ workers listen.

        Returns the number of requests' jobs, and the tenants whose bulk work waits.
        """
        requests, tenants = _COUNT.run(self.connection, [*self._places, workers_of(self.name)])
        return requests, {tenant.decode(errors="replace") for tenant in tenants}

    def put_back(self, job_ids: Sequence[str]) -> int:
        """Put back lost jobs of a run, and return how many were put back.

        A job is lost if its hash says that it waits, pauses or runs, but no list has it. A job is never put
        into the queue twice. But if Redis has lost only the lease of a job, and a worker is still scoring the
        job, it is put back and may be scored twice.

        The first few of `job_ids` are looked up first, because the producer needs them first. If none of
        these is lost, the other jobs are not looked up. If Redis has lost the run's entry in the sorted set
        that decides which run is next, the entry is added again.
        """
        if not job_ids:
            return 0
        places = [*self._places, self.intermediate_queue_key, self.scheduled_job_registry.key]
        places.append(self.started_job_registry.key)
        count, missing = _PUT_BACK.run(self.connection, places, *job_ids[:_PUT_BACK_FIRST])
        if missing:
            for first in range(_PUT_BACK_FIRST, len(job_ids), _PUT_BACK_AT_ONCE):
                some = job_ids[first : first + _PUT_BACK_AT_ONCE]
                count += _PUT_BACK.run(self.connection, places, *some)[0]
        return int(count)

    def remove_run(self, run_id: str, chunks: Sequence[ChunkId]) -> int:
        """Remove the waiting jobs of a run's chunks, with their hashes and payloads, and return their number.

        The jobs are removed by many short scripts, each of which blocks the server for about a millisecond.
        """
        places = [*self._places, keys.pairs(run_id, "")]
        jobs, removed = [keys.job_id(run_id, chunk) for chunk in chunks], 0
        is_bulk = priority_of(run_id) == "bulk"
        for first in range(0, len(jobs), _REMOVE_AT_ONCE):
            some = jobs[first : first + (1 if is_bulk else _REMOVE_AT_ONCE)]
            count = int(_REMOVE.run(self.connection, places, _REMOVE_AT_ONCE, *some))
            removed += count
            if is_bulk and not count:
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
        """Take the next job that waits in the queue, if there is one, and move it to RQ's intermediate queue.

        Parameters
        ----------
        kinds
            The kinds of jobs to take, in order of preference.
        worker
            Name of the worker.
        waits
            Whether the worker will wait for a job at RQ's list if there is none now.
        idle
            Whether the worker has nothing else to do if there is no job. A worker that still scores is not
            idle.
        alone
            Ids of runs whose jobs the worker does not take.
        """
        places = [*self._places, self.intermediate_queue_key, workers_of(self.name)]
        arguments = [" ".join(kinds), worker, int(waits), int(idle), IDLE_SECONDS]
        return Taken(*_TAKE.run(self.connection, places, *arguments, *alone))

    def claim_idle(self, most: int) -> int:
        """Remove up to `most` workers from the list of idle workers, and return how many were removed.

        While jobs wait, no worker is removed, because idle workers will take these jobs.
        """
        return int(_CLAIM_IDLE.run(self.connection, self._places, most))


def is_bulk_job(job_id: str | bytes) -> bool:
    """Return whether the job with this id scores a chunk of a bulk run."""
    run_id = _run_of(job_id)
    return run_id is not None and priority_of(run_id) == "bulk"


def _run_of(job_id: str | bytes) -> str | None:
    parsed = keys.parse_job_id(job_id if isinstance(job_id, str) else job_id.decode(errors="replace"))
    return parsed and parsed[0]
