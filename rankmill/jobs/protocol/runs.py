"""The state of runs in Redis, and most of the code that writes and reads it.

A run is one submission, cut into chunks. Each chunk is a payload under its own key, and an RQ job that names
it. Workers write results to the run's stream. The producer reads the results and deletes them, so Redis holds
only the chunks in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import redis
from pydantic import Field
from redis.client import Pipeline
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.suspension import WORKERS_SUSPENDED

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.job import Payload, job_data
from rankmill.jobs.contract.keys import ChunkId, read_chunk_id
from rankmill.jobs.contract.priority import group_of
from rankmill.jobs.contract.results import BadResult, ChunkResult, Usage, read_entry, to_entry
from rankmill.jobs.contract.run import Progress, RowError, Run, Settled, read_run
from rankmill.jobs.contract.schema import Count, WireModel
from rankmill.jobs.protocol.accounts import Accountant
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.queues import QueueCapacity, read_capacity, use_queues
from rankmill.jobs.protocol.rq import save_jobs
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.protocol.worker_report import QueueWorkers, queue_workers
from rankmill.jobs.runtime.connection import refuses_writes
from rankmill.jobs.runtime.durability import Durability, read_durability
from rankmill.jobs.runtime.patience import blocking, sending
from rankmill.jobs.system import system

_UNDER_WAY = frozenset(
    status.value.encode() for status in (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED)
)

_AT_ONCE = 500
"""The keys of at most this many jobs are read or deleted at once, which takes about a millisecond."""

_COUNT_ATTEMPTS = Script("jobs/protocol/lua/count_attempts.lua")
_SETTLE = Script("jobs/protocol/lua/settle.lua")
_CANCEL = Script("jobs/protocol/lua/cancel.lua")

NOTHING_USED: Mapping[str, Usage] = {}

T = TypeVar("T")

_INDEX_SECONDS = 7 * 86400
"""Expiry in seconds of the list of runs, from the latest change to any run."""


class DetachedChunks(WireModel):
    """The chunks of a detached run in order. Each is given by its first row and its number of rows.

    Any process may collect the results of a detached run.
    """

    chunks: tuple[tuple[Count, Annotated[int, Field(ge=1)]], ...]


class Deleted(NamedTuple):
    """The result of deleting a run.

    Attributes
    ----------
    waiting
        Number of the run's jobs that waited or paused.
    wrong
        Why some of the run's scores are wrong; ``None`` if no worker has reported that.
    """

    waiting: int
    wrong: str | None


class RunStore:
    """Reads and writes the runs on one Redis server. Threads may share the store.

    Parameters
    ----------
    client
        A client from `rankmill.jobs.runtime.connection.connect`, whose responses are bytes.
    """

    server_kind = "redis"
    """The kind of server that keeps the runs. Extensions that store data on the server have code for each
    kind.
    """

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types one client for sync and async use, so every reply would need a cast.
        self.redis: Any = client
        self.accountant = Accountant()

    @property
    def patrol_seconds(self) -> float:
        """A producer checks its run and the workers of the queue. Two checks are at least this many seconds
        apart.
        """
        return 0.2

    def compute(self, do: Callable[[], T], rows: int) -> T:
        """Call `do`, which computes something for `rows` rows, and return its result.

        A subclass may call `do` in a thread if there are many rows.
        """
        return do()

    def later(self, do: Callable[[], None]) -> None:
        """Call `do` in a thread, without waiting for its end. `do` may use this store."""
        system.Thread(target=do, name="later", daemon=True).start()

    def close(self) -> None:
        self.redis.close()

    def durability(self) -> Durability | None:
        return read_durability(self.redis)

    def workers(self, queue: str) -> QueueWorkers:
        return queue_workers(self.redis, queue)

    def refusal(self) -> str | None:
        return refuses_writes(self.redis)

    def suspended(self) -> bool:
        """Return whether ``rq suspend`` keeps all workers from taking chunks."""
        return bool(self.redis.exists(WORKERS_SUSPENDED))

    def restore(self, run: Run) -> None:
        """Write the run to the server if the server lacks the run or the stream of its results.

        Otherwise, renew the run's expiry. A run expires `Run.ttl` seconds after its latest change or the
        latest call of this method.
        """
        with self.redis.pipeline() as pipe:
            pipe.exists(keys.run(run.id))
            pipe.exists(keys.results(run.id))
            for key in (keys.results(run.id), keys.progress(run.id)):
                pipe.expire(key, run.ttl)
            self._touch(pipe, run)
            exists, has_results, *_ = pipe.execute()
        if exists and has_results:
            return
        with self.redis.pipeline() as pipe:
            self._write(pipe, run, has_results=bool(has_results))
            pipe.execute()

    def _write(self, pipe: Pipeline, run: Run, *, has_results: bool = False) -> None:
        """Write a run that Redis lacks. With `has_results`, Redis still has the run's stream of results."""
        meta, results = keys.run(run.id), keys.results(run.id)
        pipe.unlink(meta)
        pipe.hset(meta, mapping=cast("dict[Any, Any]", run.fields()))
        if not has_results:
            pipe.unlink(results)
            pipe.xadd(results, {"chunk": -1}, id="0-1")  # adding and deleting an entry makes an empty stream,
            pipe.xdel(results, "0-1")  # because `add_result` writes only to a stream that exists
        pipe.set(keys.progress(run.id), Progress().written(), ex=run.ttl)
        pipe.zremrangebyscore(keys.runs(), 0, system.now())
        pipe.zadd(keys.runs(), {run.id: 0})
        use_queues(pipe, [run.queue])
        pipe.expire(results, run.ttl)
        self._touch(pipe, run)

    def load(self, run_id: str) -> Run | None:
        """Read a run, or return ``None`` if it has ended or expired.

        Raises
        ------
        WireError
            The run has another format, or is damaged.
        """
        raw = cast("Mapping[bytes, bytes]", self.redis.hgetall(keys.run(run_id)))
        return read_run(run_id, raw) if raw else None

    def load_with(self, run_id: str, chunk: ChunkId) -> tuple[Run | None, bytes | None]:
        """Read a run and the encoded rows of a chunk in one round trip. Either is ``None`` if it is gone.

        Raises
        ------
        WireError
            The run has another format, or is damaged.
        """
        with self.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.run(run_id))
            pipe.get(keys.pairs(run_id, chunk))
            raw, payload = pipe.execute()
        return read_run(run_id, raw) if raw else None, payload

    def settle(self, run: Run, mine: Settled, *, over: bool = False) -> Settled:
        """Settle facts, such as the precision, for all chunks of a run. Returns the settled facts.

        The first value that any caller proposes for a fact counts. If the run is gone, `mine` is returned.

        Parameters
        ----------
        run
            The run.
        mine
            The facts that the caller proposes.
        over
            Whether to replace the facts in Redis. A producer that already has results does so: the server may
            have lost the facts of these results, and a worker may have settled other facts after that.
        """
        facts = [word for name, fact in mine._asdict().items() for word in (name, fact or "")]
        places = keys.run(run.id), keys.settled(run.id)
        settled = _SETTLE.run(self.redis, places, run.ttl, int(over), *facts)
        return (
            mine if settled is None else Settled(*(fact.decode(errors="replace") or None for fact in settled))
        )

    def exists(self, run_id: str) -> bool:
        return bool(self.redis.exists(keys.run(run_id)))

    def enqueue(self, run: Run, payloads: Mapping[ChunkId, Payload], *, new: bool = False) -> None:
        """Put chunks and their jobs into Redis in one transaction. A `new` run is written too.

        Also count the earlier failed attempts at these chunks (`Payload.failed`), unless Redis has counted
        them already.

        Raises
        ------
        ValueRefused
            The server refuses a payload because of its size.
        """
        queue = self.queue(run.queue)
        with self.redis.pipeline() as pipe:
            if new:
                self._write(pipe, run)
            jobs = [keys.job_id(run.id, chunk) for chunk in payloads]
            pipe.unlink(*map(Job.key_for, jobs))  # parts of lost jobs may be left under these keys
            for chunk, payload in payloads.items():
                pipe.set(keys.pairs(run.id, chunk), payload.pairs, ex=run.ttl)
            if not new:
                self._touch(pipe, run)
                pipe.expire(keys.results(run.id), run.ttl)
            save_jobs(queue, [job_data(run, chunk, payload) for chunk, payload in payloads.items()], pipe)
            # a job's turn costs its tenant this many pairs, divided by the weight
            for job, payload in zip(jobs, payloads.values(), strict=True):
                pipe.hset(Job.key_for(job), mapping={"pairs": payload.rows, "weight": run.weight})
            queue.add(pipe, jobs)
            # If this transaction is repeated after a lost reply, an attempt may have failed in between, so
            # that the job pauses now.
            pipe.zrem(queue.scheduled_job_registry.key, *jobs)
            again = {name: each.failed for name, each in payloads.items() if each.failed or each.suspect}
            if again:  # in this transaction, so that no other process sees the count without the jobs
                self.count_attempts(run, again, pipe)
            with sending(self.redis, pipe):
                pipe.execute()

    def payload(self, run: Run, chunk: ChunkId) -> bytes | None:
        """Return the encoded rows of a chunk. They are gone (``None``) if the scores are collected or the run
        has ended.
        """
        return cast("bytes | None", self.redis.get(keys.pairs(run.id, chunk)))

    def add_result(self, pipe: Pipeline, run_id: str, result: ChunkResult, ttl: int) -> None:
        """Add to `pipe` the commands that write a result. They write nothing if the run is gone."""
        stream = keys.results(run_id)
        pipe.xadd(stream, cast("dict[Any, Any]", to_entry(run_id, result)), nomkstream=True)
        pipe.expire(stream, ttl)

    def write_chunks(self, run: Run, chunks: DetachedChunks) -> None:
        """Write which chunks a detached run has, so that any process can collect the run's results.

        The list of chunks expires `Run.ttl` seconds from now.
        """
        self.redis.set(keys.detached(run.id), chunks.written(), ex=run.ttl)

    def detached_chunks(self, run_id: str) -> DetachedChunks | None:
        """Read which chunks a detached run has, or return ``None`` if the run has expired or is not detached.

        Raises
        ------
        WireError
            The chunks are damaged, or have another format.
        """
        raw = cast("bytes | None", self.redis.get(keys.detached(run_id)))
        return None if raw is None else DetachedChunks.read_json(raw, f"the chunks of run {run_id}")

    def failed_attempts(self, run: Run) -> Mapping[ChunkId, int]:
        """Read how many attempts at each chunk of the run have failed. Damaged entries are left out."""
        failed: dict[ChunkId, int] = defaultdict(int)
        for entry in self.redis.smembers(keys.failed_attempts(run.id)):
            name, _, number = entry.partition(b":")
            if (chunk := read_chunk_id(name)) is not None and number.isdigit() and len(number) < 19:
                failed[chunk] = max(failed[chunk], int(number))
        return failed

    def count_attempts(self, run: Run, failed: Mapping[ChunkId, int], pipe: Pipeline | None = None) -> None:
        """Count failed attempts at chunks of a run, unless the run is gone.

        Parameters
        ----------
        run
            The run.
        failed
            For each chunk, the number of the attempt that failed. The number 0 does not count an attempt, but
            records that a piece (rows of a chunk) was sent as a job of its own.
        pipe
            The pipeline to which the command is added; by default, it is sent alone.
        """
        attempts = [f"{chunk}:{number}" for chunk, number in failed.items()]
        places = keys.run(run.id), keys.failed_attempts(run.id)
        _COUNT_ATTEMPTS.run(self.redis if pipe is None else pipe, places, run.ttl, *attempts)

    def write_result(self, run: Run, result: ChunkResult) -> None:
        """Write a result by itself, outside of the transaction that ends a job."""
        with self.redis.pipeline() as pipe:
            self.add_result(pipe, run.id, result, run.ttl)
            pipe.execute()

    def leave_notes(self, runs: Mapping[str, int], why: str) -> None:
        """For each of these runs, write a note that says why some of the run's scores are wrong.

        A run that is gone gets a note, too:

        - If the server has lost the run, the run's producer may still be at work.
        - If the run has ended, a later run may continue its output.

        Parameters
        ----------
        runs
            Expiry of each run's note (s), by the run's id.
        why
            Why the scores are wrong.
        """
        for batch in _batches(list(runs)):
            with self.redis.pipeline(transaction=False) as pipe:
                for run in batch:
                    pipe.set(keys.wrong(run), why.encode(errors="replace"), ex=runs[run])
                pipe.execute()

    def wrong(self, run_ids: Iterable[str]) -> str | None:
        """Return why scores of one of these runs are wrong, or ``None`` if no worker has reported that."""
        notes = self.redis.mget([keys.wrong(run) for run in run_ids])
        return next((_text(note) for note in notes if note is not None), None)

    def results(
        self, run: Run, *, after: str = "0", block_ms: int
    ) -> list[tuple[str, ChunkResult | BadResult]]:
        """Read the results after entry `after` (``"0"`` for all), waiting up to `block_ms` for the first.

        Each result is complete and of the right types, or is a `BadResult`. The caller checks that the chunk
        belongs to the run, and that the number of rows is right.
        """
        read = partial(self.redis.xread, {keys.results(run.id): after}, block=block_ms or None)
        reply = blocking(read) if block_ms else read()
        # the two versions of Redis's protocol have different replies
        streams = reply.items() if isinstance(reply, dict) else reply or ()
        return [
            (entry.decode(), read_entry(run.id, fields))
            for _, entries in streams
            for entry, fields in entries
        ]

    def forget(
        self,
        run: Run,
        chunks: Iterable[ChunkId],
        entries: Iterable[str],
        progress: Progress,
        row_errors: Sequence[RowError] = (),
        used: Mapping[str, Usage] = NOTHING_USED,
    ) -> None:
        """Delete from Redis the chunks whose results the producer has, and the stream `entries` of these
        results.

        Also write the run's new progress and its new `row_errors`, and add what these results have `used` to
        the accounts of the run's tenant.
        """
        with self.redis.pipeline() as pipe:
            self.accountant.count(pipe, run, used)
            if done := list(chunks):
                pipe.unlink(*(keys.pairs(run.id, chunk) for chunk in done))
            pipe.xdel(keys.results(run.id), *entries)
            self._note(pipe, run, progress)
            if row_errors:
                pipe.rpush(keys.errors(run.id), *(error.written() for error in row_errors))
            pipe.expire(keys.errors(run.id), run.ttl)
            self._touch(pipe, run)
            pipe.execute()

    def note(self, run: Run, progress: Progress, used: Mapping[str, Usage] = NOTHING_USED) -> None:
        """Write the run's new progress, and leave its results in Redis.

        Also add what the new results have `used` to the accounts of the run's tenant.
        """
        with self.redis.pipeline() as pipe:
            self.accountant.count(pipe, run, used, stays=True)
            self._note(pipe, run, progress)
            pipe.execute()

    def count_request(self, run: Run, which: object, usage: Usage) -> None:
        """Add to the accounts what a job of pairs has used. The pairs are in the job itself, and belong to no
        chunk. A second call for the same execution of a job adds nothing.

        Parameters
        ----------
        run
            The run that the job's id stands for.
        which
            Tells this execution from others that have the same job id. There may be others, because a caller
            may give a later job the same id, and RQ may repeat a job.
        usage
            What the job has used.
        """
        with self.redis.pipeline(transaction=False) as pipe:
            self.accountant.count(pipe, run, {str(which): usage}, group=group_of(""), stays=True)
            pipe.execute()

    def _note(self, pipe: Pipeline, run: Run, progress: Progress) -> None:
        # `xx` writes only over an existing key: the run may have been cancelled meanwhile
        pipe.set(keys.progress(run.id), progress.written(), ex=run.ttl, xx=True)

    def row_errors(self, run_id: str) -> tuple[list[RowError], int]:
        """Return the first rows without a score that a run's producer has listed.

        Also return the number of damaged entries in the list.
        """
        errors: dict[int, RowError] = {}
        damaged = 0
        for raw in self.redis.lrange(keys.errors(run_id), 0, -1):
            try:
                error = RowError.read_json(raw, "a row error")
            except WireError:
                damaged += 1
            else:
                errors[error.row] = error  # a row may be listed twice, after a lost reply
        return list(errors.values()), damaged

    def find(self, prefix: str) -> list[str]:
        """Return the ids that begin with `prefix`, of all runs with a producer."""
        if not prefix.isalnum():
            return []
        entries = self.redis.zscan_iter(keys.runs(), match=f"{prefix}*", count=1000)
        return sorted({run_id.decode() for run_id, _ in entries if run_id.isalnum()})  # no damaged entries

    def unlist(self, run: Run) -> None:
        """Remove a run from the list of runs with a producer."""
        self.redis.zrem(keys.runs(), run.id)

    def missing(self, run: Run, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Return those `chunks` of a run whose job has ended or is lost, so that the job writes no further
        result.

        Also renew the expiry of the jobs and their pairs, which may wait longer than `Run.ttl`.
        """
        waiting = list(chunks)
        with self.redis.pipeline(transaction=False) as pipe:
            # A job without a status is lost: a late heartbeat may have written other fields of its hash.
            for chunk in waiting:
                job = Job.key_for(keys.job_id(run.id, chunk))
                pipe.hget(job, "status")
                pipe.expire(job, run.ttl)
                pipe.expire(keys.pairs(run.id, chunk), run.ttl)
            statuses = pipe.execute()[::3]
        return [chunk for chunk, status in zip(waiting, statuses, strict=True) if status not in _UNDER_WAY]

    def put_back(self, run: Run, chunks: Iterable[ChunkId]) -> int:
        return self.queue(run.queue).put_back([keys.job_id(run.id, chunk) for chunk in chunks])

    def cancel(self, run: Run) -> int:
        """Delete the run and inform its producer. Returns how many chunks waited or paused."""
        return self.delete(run, self.chunks(run), tell=True).waiting

    def was_cancelled(self, run: Run) -> bool:
        """Return whether someone has cancelled the run.

        If a run is gone and was not cancelled, the server has lost it.
        """
        return bool(self.redis.exists(keys.cancelled(run.id)))

    def delete(
        self,
        run: Run,
        chunks: Iterable[ChunkId],
        *,
        answered: Iterable[ChunkId] = (),
        tell: bool = False,
        used: Mapping[str, Usage] = NOTHING_USED,
    ) -> Deleted:
        """Delete the run and the waiting or paused jobs of `chunks`, but keep a note that scores are wrong.

        The deletion takes many short commands, so that other clients are served in between. If a command
        fails, call this method again. Claimed jobs stay with their workers, which find that the run is gone
        and write no result.

        Parameters
        ----------
        run
            The run.
        chunks
            Chunks that may have a job.
        answered
            Chunks whose result has come. They have no job, and only their pairs are deleted.
        tell
            Whether to tell the producer, by a note, that the run was cancelled.
        used
            Usage of results, which is counted first.
        """
        pending, done = list(chunks), list(answered)
        pairs = [[keys.pairs(run.id, chunk) for chunk in batch] for batch in _batches([*pending, *done])]
        # Delete the first batch of pairs together with the run, because nobody would delete these pairs if
        # this process died in between. Most runs have only one batch.
        mine = [*keys.of_run(run.id), *(pairs[0] if pairs else ())]
        mine.append(keys.cancelled(run.id))
        # Do not use a transaction: a full server refuses it, and deleting runs makes room. Delete the run
        # itself first, so that no worker scores more of it.
        with self.redis.pipeline(transaction=False) as pipe:
            self.accountant.count(pipe, run, used)
            if tell:
                _CANCEL.run(pipe, [keys.cancelled(run.id), *mine[:-1]], run.ttl)
            else:
                pipe.unlink(*mine)
            pipe.zrem(keys.runs(), run.id)
            pipe.get(keys.wrong(run.id))
            *_, note = pipe.execute()
        for names in pairs[1:]:  # a full server accepts this, but refuses the script below
            self.redis.unlink(*names)
        # Remove the jobs in lists first, and the paused jobs later: `remove_run` also ends the run's turns,
        # so that workers take no more of the run's jobs.
        queue = self.queue(run.queue)
        removed = queue.remove_run(run.id, pending)
        for batch in _batches([keys.job_id(run.id, chunk) for chunk in pending]):
            with self.redis.pipeline(transaction=False) as pipe:
                for job in batch:
                    pipe.zrem(queue.scheduled_job_registry.key, job)
                    pipe.expire(Job.key_for(job), run.ttl)  # RQ removes the expiry of some jobs
                was_paused = pipe.execute()[::2]
            paused = [Job.key_for(job) for job, was in zip(batch, was_paused, strict=True) if was]
            removed += self.redis.unlink(*paused) if paused else 0
        return Deleted(removed, _text(note))

    def chunks(self, run: Run) -> list[ChunkId]:
        """Return the chunks of the run whose pairs are in Redis. This scans all keys of the server."""
        names = self.redis.scan_iter(keys.pairs(run.id, "*"), count=1000)
        chunks = (read_chunk_id(key.rpartition(b":")[2]) for key in names)
        return [chunk for chunk in chunks if chunk is not None]

    def capacity(self, queue: str) -> QueueCapacity:
        return read_capacity(self.redis, queue)

    def queue(self, name: str) -> OrderedQueue:
        return OrderedQueue(name, connection=self.redis, serializer=JSONSerializer)

    def _touch(self, pipe: Pipeline, run: Run) -> None:
        """Renew the run's expiry in `pipe`, unless the run is gone."""
        pipe.expire(keys.run(run.id), run.ttl)
        pipe.expire(keys.settled(run.id), run.ttl)
        pipe.zadd(keys.runs(), {run.id: system.now() + run.ttl}, xx=True)
        pipe.expire(keys.runs(), _INDEX_SECONDS)


def _batches(items: list[T]) -> Iterable[list[T]]:
    return (items[first : first + _AT_ONCE] for first in range(0, len(items), _AT_ONCE))


def _text(note: bytes | None) -> str | None:
    return None if note is None else note.decode(errors="replace")
