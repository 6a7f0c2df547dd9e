"""RQ's queue with requests before bulk work: one list of job ids, the requests first.

RQ takes jobs from the front of the list, so requests come first. Ids are placed by a script, as other
processes take and place jobs meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.protocol.rq import RQQueue, workers_of
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.runtime.patience import each_reply

IDLE_SECONDS = 5
"""How long the list of idle workers has a worker that says nothing more."""

_BELL_SECONDS = 60
_BELL_RINGS = 64
"""Expiry of the bell, and the rings that it keeps, at most, for workers that listen later."""

LOOK_AT = 128
"""Next bulk jobs among which a worker chooses a run, and last jobs among which it looks for requests that RQ
alone has put there."""

_PROBES = 4
"""Jobs by which lost lists are detected: a producer waits for its first ones."""

_PUT_BACK_AT_ONCE = 1000
"""Jobs that one script looks for. It walks through the lists once: 100,000 jobs take tens of milliseconds."""

_REMOVE_AT_ONCE = 512
_FEW = 8
"""Waiting jobs among which one script looks for those of a run, for 3 ms at most; and how many jobs are
removed one by one: the server walks through the whole list for each."""

_SORT = 10_000
"""Waiting jobs, from the first, among which misplaced requests are looked for."""

_COMMON = Script("jobs/protocol/lua/queue.lua")
_PLACE = Script("jobs/protocol/lua/place.lua", _COMMON)
_RESCUE = Script("jobs/protocol/lua/rescue.lua", _COMMON)
_SORT_REQUESTS = Script("jobs/protocol/lua/sort.lua", _COMMON)
_TAKE = Script("jobs/protocol/lua/take.lua", _COMMON)
_PUT_BACK = Script("jobs/protocol/lua/put_back.lua", _COMMON)
_REMOVE_PIECE = Script("jobs/protocol/lua/remove_piece.lua")
_CLAIM_IDLE = Script("jobs/protocol/lua/claim_idle.lua")

_BULK = re.compile(rb"[0-9A-Fa-f]+-[0-9]+")


class Taken(NamedTuple):
    """What an attempt to take a job found: its id, if any, and how the queue is now.

    ``waiting`` counts jobs, ``workers`` the workers that are registered, ``idle`` those of them without work.
    """

    job_id: bytes
    waiting: int
    workers: int
    idle: int


class OrderedQueue(RQQueue):
    """RQ's queue, in which every way to put a job keeps requests before bulk work."""

    def place(self, client: Any, job_id: str | bytes, *, at_front: bool) -> None:
        """Put a job's id behind those of its priority, or before them."""
        numbers = [_BELL_RINGS, _BELL_SECONDS]
        if not at_front and is_bulk_job(job_id):
            client.rpush(self.key, job_id)
        else:
            _PLACE.run(client, [self.key, keys.bell(self.name)], *numbers, job_id, int(at_front))

    def rescue(self, job_id: bytes, seen: bytes, now: float, seconds: float) -> None:
        """Put a job back that was taken `seconds` ago and is not begun; the key `seen` says since when.

        One that is on its way again soon may be put back too early: who begins it takes it out of the queue.
        """
        places = [self.key, keys.bell(self.name), self.intermediate_queue_key, seen]
        _RESCUE.run(self.connection, places, _BELL_RINGS, _BELL_SECONDS, job_id, now, seconds)

    def sort(self) -> int:
        """Put requests that RQ alone has put behind bulk work before it; return how many."""
        numbers = [_BELL_RINGS, _BELL_SECONDS, _SORT]
        return int(_SORT_REQUESTS.run(self.connection, [self.key, keys.bell(self.name)], *numbers))

    def put_back(self, job_ids: Sequence[str]) -> int:
        """Put jobs back that wait, pause or run by their hashes, and are in no list; return how many.

        A list was lost, so no worker would ever find them. All of them are looked for only if one of the
        first few is not found. A job never gets into the queue twice by this; if a worker has it though its
        lease was lost, it may be scored twice.
        """
        if self._has(job_ids[:_PROBES]):
            return 0
        client: Any = self.connection
        places = [self.key, self.intermediate_queue_key, self.scheduled_job_registry.key]
        places += [self.started_job_registry.key, keys.bell(self.name)]
        with client.pipeline(transaction=False) as pipe:
            for first in range(0, len(job_ids), _PUT_BACK_AT_ONCE):
                ids = job_ids[first : first + _PUT_BACK_AT_ONCE]
                jobs = [Job.key_for(job_id) for job_id in ids]
                numbers = [_BELL_RINGS, _BELL_SECONDS]
                _PUT_BACK.run(pipe, [*places, *jobs], *numbers, *ids)
            return sum(pipe.execute())

    def _has(self, job_ids: Sequence[str]) -> bool:
        """Whether each of a few jobs is in one of the lists; a job that moves meanwhile may be missed."""
        commands: list[tuple[Any, ...]] = [("zrange", self.started_job_registry.key, 0, -1)]
        for job_id in job_ids:
            commands.append(("lpos", self.key, job_id))
            commands.append(("lpos", self.intermediate_queue_key, job_id))
            commands.append(("zscore", self.scheduled_job_registry.key, job_id))
        leases, *found = each_reply(self.connection, commands)
        if isinstance(leases, Exception):  # or a list of another type, which a person must repair first
            return True
        leased = {entry.rpartition(b":")[0].decode(errors="replace") for entry in leases}
        return all(
            job_id in leased or any(place is not None for place in found[3 * at : 3 * at + 3])
            for at, job_id in enumerate(job_ids)
        )

    def remove_run(self, run_id: str, chunks: Sequence[int]) -> int:
        """Remove the jobs of a run's chunks, with their hashes and payloads; return how many waited.

        Other commands of the server wait for milliseconds only, however many jobs there are.
        """
        client: Any = self.connection
        if len(chunks) <= _FEW:
            waiting = [chunk for chunk in chunks if client.lrem(self.key, 1, keys.job_id(run_id, chunk))]
            for chunk in waiting:
                client.unlink(Job.key_for(keys.job_id(run_id, chunk)), keys.pairs(run_id, chunk))
            return len(waiting)
        names = [keys.job_id(run_id, ""), Job.key_for(""), keys.pairs(run_id, "")]
        removed, found = 0, -1
        while found and removed < len(chunks):  # again, as workers move jobs meanwhile
            found = left = 0
            while left >= 0:
                how = [names[0], left, _REMOVE_AT_ONCE, *names[1:]]
                count, left = _REMOVE_PIECE.run(client, [self.key], *how)
                found += count
            removed += found
        return removed

    def take(
        self,
        kinds: Sequence[Priority],
        order: Sequence[str] = (),
        *,
        worker: str = "",
        idle: bool = False,
        bring: bool = True,
        further: tuple[int, int] = (0, 0),
    ) -> Taken:
        """Move the next job of one of `kinds`, the preferred first, to the intermediate queue, if one waits.

        Parameters
        ----------
        kinds
            Which jobs to take.
        order
            Tenants, by the groups in ids, and ids of bulk runs: who has had the least is named first. Next is
            a job of a tenant that is not named, then of the first one; of a tenant's runs likewise. A run
            with ``!`` before its id comes after all others, and one with ``-`` is left alone.
        worker, idle
            Name of the worker, and whether it will be idle without a job.
        bring
            Whether to bring requests from the end of the queue before bulk work: those that RQ alone has put
            there, but also those that a worker has refused.
        further
            Where to look for bulk runs that have few of the next `LOOK_AT` bulk jobs, and some of whose jobs
            come before them then: after how many bulk jobs, and at how many.
        """
        places = [self.key, self.intermediate_queue_key, keys.bell(self.name), keys.idle(self.name)]
        places.append(workers_of(self.name))
        how = [" ".join(kinds), worker, int(idle), IDLE_SECONDS, LOOK_AT, int(bring), *further]
        return Taken(*_TAKE.run(self.connection, places, *how, *order))

    def claim_idle(self, most: int) -> int:
        """Forget up to `most` idle workers and return how many; 0 while jobs wait, which they will take."""
        return int(_CLAIM_IDLE.run(self.connection, [self.key, keys.idle(self.name)], most))


def is_bulk_job(job_id: str | bytes) -> bool:
    """Whether a job is a chunk of a bulk run, as its id says; the scripts above ask the same."""
    text = job_id if isinstance(job_id, bytes) else job_id.encode(errors="replace")
    return _BULK.fullmatch(text) is not None
