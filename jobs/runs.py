"""The state of runs in Redis: all that changes it, and most of what reads it, is here.

A run is one submission, cut into chunks; each chunk is a payload under its own key and one RQ
job that names it. Workers answer through the run's result stream, which the producer reads and
trims, so that Redis holds no more than the chunks in flight.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jobs import keys
from jobs.errors import WireError
from jobs.job import Payload, job_data
from jobs.results import BadResult, ChunkResult, read_entry, to_entry
from jobs.run import Progress, RowError, Run, new_run, read_run
from jobs.spec import ScoreSpec

_UNDER_WAY = frozenset(
    status.value.encode() for status in (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED)
)

_INDEX_SECONDS = 7 * 86400
"""Expiry of the list of runs, counted from when any of them was last worked on."""


class RunStore:
    """Runs on one server. Safe to share between threads, as the client is.

    Parameters
    ----------
    client
        From `jobs.runtime.connection.connect`; responses as bytes.
    """

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types one client for sync and async use; every reply would need a cast.
        self.redis: Any = client

    def create(
        self, spec: ScoreSpec, *, queue: str, ttl: int, max_retries: int, rows: int | None = None
    ) -> Run:
        """Register a new run; `ttl` is in seconds since it was last worked on."""
        run = new_run(spec, queue=queue, ttl=ttl, max_retries=max_retries, rows=rows)
        self.restore(run)
        return run

    def restore(self, run: Run) -> None:
        """Write down the run if the server does not know it (any more)."""
        meta, results = keys.run(run.id), keys.results(run.id)
        if self.redis.exists(meta, results) == 2:
            return
        with self.redis.pipeline() as pipe:
            pipe.unlink(meta, results)
            pipe.hset(meta, mapping=run.fields())
            pipe.xadd(results, {"chunk": -1}, id="0-1")  # leaves an empty stream, so that add_result
            pipe.xdel(results, "0-1")  # need never make one, for a run that may be gone
            pipe.expire(results, run.ttl)
            pipe.set(keys.progress(run.id), Progress().model_dump_json(), ex=run.ttl)
            pipe.zremrangebyscore(keys.runs(), 0, time.time())  # those that have expired
            pipe.zadd(keys.runs(), {run.id: 0})
            self._touch(pipe, run)
            pipe.execute()

    def load(self, run_id: str) -> Run | None:
        """The run, or ``None`` when it was cancelled or has expired.

        Raises
        ------
        WireError
            The run was written by a release with another format, or is damaged.
        """
        raw = cast("Mapping[bytes, bytes]", self.redis.hgetall(keys.run(run_id)))
        return read_run(run_id, raw) if raw else None

    def settle(self, run: Run, precision: str) -> str:
        """What ``precision: auto`` means for all chunks of the run: what was first said, by anybody."""
        key = keys.precision(run.id)
        with self.redis.pipeline() as pipe:
            pipe.set(key, precision, nx=True, ex=run.ttl)
            pipe.get(key)
            return cast("bytes", pipe.execute()[1]).decode(errors="replace")

    def refuse(self, run_id: str, ttl: int, worker: str, reason: str) -> dict[str, str]:
        """Note that a worker cannot score the run; what each has said that cannot."""
        key = keys.refusals(run_id)
        with self.redis.pipeline() as pipe:
            pipe.hset(key, worker, reason)
            pipe.expire(key, ttl)
            pipe.hgetall(key)
            said = cast("Mapping[bytes, bytes]", pipe.execute()[2])
        return {name.decode(errors="replace"): why.decode(errors="replace") for name, why in said.items()}

    def take_back(self, run_id: str, worker: str) -> None:
        """Forget that a worker has refused the run: now it can."""
        self.redis.hdel(keys.refusals(run_id), worker)

    def exists(self, run_id: str) -> bool:
        """Whether the run is there: not cancelled, not finished, not expired."""
        return bool(self.redis.exists(keys.run(run_id)))

    def enqueue(self, run: Run, payloads: Mapping[int, Payload]) -> None:
        """Put chunks, by their numbers, and their jobs into Redis, in one transaction."""
        queue = self.queue(run.queue)
        with self.redis.pipeline() as pipe:
            for chunk, payload in payloads.items():
                pipe.unlink(Job.key_for(keys.job_id(run.id, chunk)))  # of a lost job, pieces may be left
                pipe.set(keys.pairs(run.id, chunk), payload.pairs, ex=run.ttl)
            self._touch(pipe, run)
            pipe.expire(keys.results(run.id), run.ttl)
            queue.enqueue_many(
                [job_data(run, chunk, payload) for chunk, payload in payloads.items()],
                pipeline=pipe,
            )
            pipe.execute()

    def payload(self, run: Run, chunk: int) -> bytes | None:
        """The pairs of a chunk, or ``None`` when the producer has its scores already."""
        return cast("bytes | None", self.redis.get(keys.pairs(run.id, chunk)))

    def add_result(self, pipe: Pipeline, run_id: str, result: ChunkResult, ttl: int) -> None:
        """Queue the writing of a result in `pipe`; nothing is written for a run that is gone."""
        stream = keys.results(run_id)
        pipe.xadd(stream, cast("dict[Any, Any]", to_entry(result)), nomkstream=True)
        pipe.expire(stream, ttl)

    def write_result(self, run: Run, result: ChunkResult) -> None:
        """Write a result by itself, where no job ends with it."""
        with self.redis.pipeline() as pipe:
            self.add_result(pipe, run.id, result, run.ttl)
            pipe.execute()

    def results(self, run: Run, *, after: str, block_ms: int) -> list[tuple[str, ChunkResult | BadResult]]:
        """Results that came since entry `after` (``"0"``: all), waiting up to `block_ms` for one.

        Each is whole and of the right types, or a `BadResult`; whether the run has such a chunk, and
        so many rows in it, is for the caller to check.
        """
        reply = self.redis.xread({keys.results(run.id): after}, block=block_ms)
        return [
            (entry.decode(), read_entry(fields))
            for _, entries in _streams(reply)
            for entry, fields in entries
        ]

    def forget(
        self,
        run: Run,
        chunks: Iterable[int],
        entries: Iterable[str],
        progress: Progress,
        row_errors: Sequence[RowError] = (),
    ) -> None:
        """Drop chunks whose result has been taken, and the stream entries that told it.

        Note how far the run has come with them, and the rows that have no score.
        """
        with self.redis.pipeline() as pipe:
            for chunk in chunks:
                pipe.unlink(keys.pairs(run.id, chunk))
            pipe.xdel(keys.results(run.id), *entries)
            # Only if it is there: the run may have been cancelled meanwhile.
            pipe.set(keys.progress(run.id), progress.model_dump_json(), ex=run.ttl, xx=True)
            if row_errors:
                pipe.rpush(keys.errors(run.id), *(error.model_dump_json() for error in row_errors))
            pipe.expire(keys.errors(run.id), run.ttl)
            self._touch(pipe, run)
            pipe.execute()

    def row_errors(self, run_id: str) -> tuple[list[RowError], int]:
        """The first rows of a live run that have no score, and how many more are damaged.

        Together they are at most `jobs.run.MAX_ROW_ERRORS`.
        """
        found: dict[int, RowError] = {}
        damaged = 0
        for raw in self.redis.lrange(keys.errors(run_id), 0, -1):
            try:
                error = RowError.read_json(raw, "a row error")
            except WireError:
                damaged += 1
            else:
                found[error.row] = error  # again, if a reply was lost
        return list(found.values()), damaged

    def find(self, prefix: str) -> list[str]:
        """Ids of the runs that begin so."""
        if not prefix.isalnum():
            return []
        found = self.redis.zscan_iter(keys.runs(), match=f"{prefix}*", count=1000)
        return sorted({run_id.decode() for run_id, _ in found if run_id.isalnum()})  # others are none of ours

    def missing(self, run: Run, chunks: Iterable[int]) -> list[int]:
        """Chunks in flight that no job will ever answer: their job failed or Redis forgot it."""
        waiting = list(chunks)
        with self.redis.pipeline(transaction=False) as pipe:
            for chunk in waiting:  # not the whole job: of one that Redis forgot, a beat may be left
                pipe.hget(Job.key_for(keys.job_id(run.id, chunk)), "status")
            statuses = pipe.execute()
        return [chunk for chunk, status in zip(waiting, statuses, strict=True) if status not in _UNDER_WAY]

    def cancel(self, run: Run) -> int:
        """Delete the run and let its producer, elsewhere, know; how many chunks were waiting."""
        return self.delete(run, self.chunks(run), tell=True)

    def was_cancelled(self, run: Run) -> bool:
        """Whether somebody has called `cancel`; without that, a run that is gone was forgotten."""
        return bool(self.redis.exists(keys.cancelled(run.id)))

    def delete(self, run: Run, chunks: Iterable[int], *, tell: bool = False) -> int:
        """Remove the run and take its waiting jobs, those of `chunks`, off the queue; how many it had.

        Jobs that a worker has claimed are left to it: it finds the run gone, or its result not wanted.
        `tell` leaves a note that the run was cancelled, for its producer.
        """
        queue = self.queue(run.queue)
        waiting = list(chunks)
        jobs = [keys.job_id(run.id, chunk) for chunk in waiting]
        with self.redis.pipeline() as pipe:
            for job in jobs:
                queue.remove(job, pipeline=pipe)
                pipe.zrem(queue.scheduled_job_registry.key, job)
            for job in jobs:
                pipe.expire(Job.key_for(job), run.ttl)  # RQ takes the expiry off a claimed job
            pipe.unlink(keys.run(run.id), keys.results(run.id), keys.progress(run.id), keys.errors(run.id))
            pipe.unlink(keys.precision(run.id), keys.refusals(run.id))
            pipe.zrem(keys.runs(), run.id)
            for chunk in waiting:
                pipe.unlink(keys.pairs(run.id, chunk))
            if tell:
                pipe.set(keys.cancelled(run.id), 1, ex=run.ttl)
            else:
                pipe.unlink(keys.cancelled(run.id))
            removed = pipe.execute()[: 2 * len(jobs)]
        unclaimed = [
            Job.key_for(job)
            for job, queued, paused in zip(jobs, removed[::2], removed[1::2], strict=True)
            if queued or paused
        ]
        if unclaimed:
            self.redis.unlink(*unclaimed)
        return len(unclaimed)

    def chunks(self, run: Run) -> list[int]:
        """Chunks of the run whose pairs are there, by a look at all of the server's keys."""
        found = self.redis.scan_iter(keys.pairs(run.id, "*"), count=1000)
        return [int(number) for key in found if (number := key.rpartition(b":")[2]).isdigit()]

    def queue(self, name: str) -> Queue:
        """RQ's queue of that name on this server, with JSON jobs."""
        return Queue(name, connection=self.redis, serializer=JSONSerializer)

    def _touch(self, pipe: Pipeline, run: Run) -> None:
        """Note in `pipe` that the run is being worked on; does nothing to one that is gone."""
        pipe.expire(keys.run(run.id), run.ttl)
        pipe.expire(keys.precision(run.id), run.ttl)
        pipe.zadd(keys.runs(), {run.id: time.time() + run.ttl}, xx=True)
        pipe.expire(keys.runs(), _INDEX_SECONDS)


def _streams(reply: Any) -> Iterable[tuple[bytes, list[tuple[bytes, Mapping[bytes, bytes]]]]]:
    """XREAD's reply as ``(stream, entries)`` pairs, in whichever protocol the server speaks."""
    return reply.items() if isinstance(reply, dict) else reply or ()
