"""Recovery of jobs whose attempt failed or whose worker died. Such a job runs again, or a failure is written
to its run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import redis
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import AbandonedJobError
from rq.job import Job, JobStatus

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RedisUnavailable, WireError
from rankmill.jobs.contract.job import LONGEST_PAUSE, attempt, suspect
from rankmill.jobs.contract.results import ChunkFailure
from rankmill.jobs.protocol.leases import OURS, RQ_DELAY, bound_leases, move
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.pairs_job import survives
from rankmill.jobs.protocol.rq import ALL_WORKERS, enqueue, executions_of, record_failure, workers_of
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob, read_job, set_aside
from rankmill.jobs.protocol.worker_report import bound_reports
from rankmill.jobs.runtime.logs import about, about_job
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.jobs.system import system

FailureHandler = Callable[[Job, type[BaseException], BaseException, TracebackType | None], None]

logger = logging.getLogger(__name__)


def failure_handler(store: RunStore) -> FailureHandler:
    """Make an RQ exception handler for failed attempts at chunks.

    If the chunk has attempts left, the handler counts the failed attempt. If not, it writes a failure to the
    run's results. If the worker has died, the handler also marks the job as one that may kill workers.
    """

    def handle(
        job: Job, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        died = kind is AbandonedJobError
        if died:
            suspect(job)
        with about_job(job.id), about(worker=job.worker_name or "unknown"):
            logger.warning(
                "the worker died, or cannot reach Redis; the chunk %s"
                if died
                else "an attempt at the chunk failed; it %s",
                "runs again" if job.should_retry else "is given up",
            )
        parsed = keys.parse_job_id(job.id)  # the job's arguments may be damaged
        if parsed is None:
            return
        run_id, chunk = parsed
        try:
            run = store.load(run_id)
        except WireError:
            return
        if run is None:
            return
        attempts = attempt(run, job)
        if job.should_retry:
            store.count_attempts(run, {chunk: attempts})
            return
        reason = "its worker died" if died else f"{kind.__name__}: {error}"
        message = f"given up after attempt {attempts}: {reason}"
        worker = job.worker_name or ""
        failure = ChunkFailure(
            chunk=chunk, message=message, fatal=False, attempts=attempts, worker=worker, died=died
        )
        store.write_result(run, failure)

    return handle


def hand_on_jobs(store: RunStore, queue_name: str, worker: str) -> int:
    """Put the jobs of a dead worker back into the queue at once, before their leases lapse.

    A job without attempts left is given up.

    Parameters
    ----------
    store
        The runs on the server.
    queue_name
        The queue that the worker listened on.
    worker
        RQ name of the worker, which must be known to be dead.

    Returns
    -------
    int
        Number of jobs that the worker was running.
    """
    queue = store.queue(queue_name)
    running = store.redis.smembers(executions_of(worker))
    if running:
        store.redis.zadd(queue.started_job_registry.key, dict.fromkeys(running, 0), xx=True)
        # `until=0` takes only the jobs whose leases were just ended. Other leases may look lapsed only
        # because live workers have not renewed them since an outage.
        hand_on_abandoned(queue, failure_handler(store), until=0)
    return len(running)


def clean_queue(
    queue: OrderedQueue, handle: FailureHandler, seconds: int, now: float, *, trusts_leases: bool
) -> None:
    """Put back jobs of dead workers, jobs that were taken but never begun, and jobs whose pause is over.

    Also count the waiting jobs. Workers and ended jobs that have expired are removed from RQ's lists. A
    damaged job is set aside.

    Parameters
    ----------
    queue
        The queue to clean; only one process may clean it at a time.
    handle
        The RQ exception handler that `failure_handler` has made.
    seconds
        How long a lease lasts. A job that was taken from the queue this long ago, and not begun, is put back
        too.
    now
        Time of the server's clock when the caller renewed its own leases (s since 1970).
    trusts_leases
        Whether a lapsed lease means that its worker is dead. This is false after an outage or a jump of the
        server's clock. If it is false, only two things are done: jobs that were taken but never begun are put
        back, and leases and reports that end too late are shortened.
    """
    _guarded(partial(bound_leases, queue.connection, queue.started_job_registry.key, seconds))
    _guarded(partial(bound_reports, queue.connection, queue.name, seconds))
    if trusts_leases:
        # The caller cannot renew its leases during this call, so the call must end long before they lapse.
        _guarded(partial(hand_on_abandoned, queue, handle, until=now, seconds=seconds / 4))
    _guarded(partial(rescue_unbegun, queue, seconds, now))
    if not trusts_leases:
        return
    _guarded(partial(enqueue_due, queue, now))
    _guarded(queue.count_waiting)
    _guarded(partial(forget_gone_workers, queue))
    for registry in (queue.failed_job_registry, queue.finished_job_registry):
        _guarded(partial(queue.connection.zremrangebyscore, registry.key, 0, now))


def hand_on_abandoned(queue: Queue, handle: FailureHandler, until: float, seconds: float = math.inf) -> None:
    """Retry jobs whose lease lapsed by `until` (s since 1970), or give these jobs up. When `seconds` have
    passed, the remaining jobs are left to the next call.

    This replaces RQ's `StartedJobRegistry.cleanup`, which stops at the first job that it cannot read.
    """
    connection: Any = queue.connection
    leases, began = queue.started_job_registry.key, system.monotonic()
    # The first span has leases of ScoringWorkers. The second span has leases of plain RQ workers, and leases
    # that `hand_on_jobs` has ended.
    spans = [(until + OURS, until + RQ_DELAY), (0, until)]
    with connection.pipeline(transaction=False) as pipe:
        for span in spans:
            pipe.zrangebyscore(leases, *span)
        found = pipe.execute()
    lapsed = [(entry, last) for (_, last), entries in zip(spans, found, strict=True) for entry in entries]
    for entry, last in lapsed:
        raw_id = entry.rpartition(b":")[0]
        has_lapsed = partial(_has_lapsed, connection, leases, entry, last)
        with _one_job(queue, raw_id) as read:
            hand_on = partial(_hand_on, queue, handle, read, has_lapsed)
            move(connection, leases, entry, _key(raw_id), hand_on, last)
        if has_lapsed():
            connection.zrem(leases, entry)  # set aside, not moved, so its lease is still there
        if system.monotonic() - began > seconds:
            return


def _has_lapsed(connection: Any, leases: str, entry: bytes, until: float) -> bool:
    end = connection.zscore(leases, entry)
    return end is not None and end <= until


def _hand_on(
    queue: Queue,
    handle: FailureHandler,
    read: Callable[[], Job | None],
    has_lapsed: Callable[[], bool],
    pipe: Pipeline,
) -> None:
    job = read()
    # Check the lease only after reading the job. If another process has handed the job on since the leases
    # were listed, the job already has its next attempt, and `handle` would count that attempt as failed.
    if not has_lapsed():
        return
    # The status QUEUED belongs here. A producer that gets no reply from Redis sends its jobs again, so a job
    # may become QUEUED while a worker runs it. If that worker dies, the attempt counts as failed, too.
    if job and job.get_status(refresh=False) in {JobStatus.STARTED, JobStatus.QUEUED}:
        survives(job)
        handle(job, AbandonedJobError, AbandonedJobError(), None)
        if job.should_retry:
            job.retry(queue, pipe)
        else:
            record_failure(job, "its worker died", pipe)


def enqueue_due(queue: Queue, now: float) -> None:
    """Put back jobs whose pause after a failed attempt has ended by `now`, a time of the server's clock. Jobs
    that callers have enqueued by name, and that RQ has scheduled (as with `enqueue_in`), are enqueued at
    their time.

    In RQ itself, only the scheduler puts such jobs back. It is a separate process, which not every worker
    starts.
    """
    connection: Any = queue.connection
    paused = queue.scheduled_job_registry.key
    due = connection.zrangebyscore(paused, 0, now, start=0, num=1000)
    # If a chunk's pause ends later than `LONGEST_PAUSE` from now, the server's clock has jumped back since
    # the pause began, so the chunk is due. A job that a caller enqueued by name may be scheduled for any
    # time.
    late = connection.zrangebyscore(paused, now + LONGEST_PAUSE, "+inf", start=0, num=1000)
    due += [raw_id for raw_id in late if keys.parse_job_id(raw_id.decode(errors="replace"))]
    for raw_id in due:
        with _one_job(queue, raw_id) as read:
            move(connection, paused, raw_id, _key(raw_id), partial(_enqueue, queue, read))


def _enqueue(queue: Queue, read: Callable[[], Job | None], pipe: Pipeline) -> None:
    if job := read():
        enqueue(queue, job, pipe)


def _key(raw_id: bytes) -> str:
    return Job.key_for(raw_id.decode(errors="replace"))


def rescue_unbegun(queue: OrderedQueue, seconds: float, now: float) -> None:
    """Put back jobs that left the queue but reached no worker, because a reply of Redis was lost.

    RQ would count a failed attempt for such a job; this function does not.

    Parameters
    ----------
    queue
        The queue.
    seconds
        A job is put back if it was not begun within this time.
    now
        Time of the server's clock. The clock may have jumped back since the job was taken.
    """
    connection: Any = queue.connection
    waiting = queue.intermediate_queue_key
    leases = connection.zrange(queue.started_job_registry.key, 0, -1)
    started = {entry.rpartition(b":")[0] for entry in leases}
    for raw_id in connection.lrange(waiting, 0, -1):
        if raw_id not in started:
            queue.rescue(raw_id, f"{waiting}:first_seen:".encode() + raw_id, now, seconds)


def forget_gone_workers(queue: Queue) -> None:
    """Remove from RQ's lists the workers whose records have expired."""
    connection: Any = queue.connection
    listed = workers_of(queue.name)
    names = sorted(connection.smembers(listed))
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.exists(name)
        gone = [name for name, exists in zip(names, pipe.execute(), strict=True) if not exists]
    if gone:
        connection.srem(listed, *gone)
        connection.srem(ALL_WORKERS, *gone)


@contextmanager
def _one_job(queue: Queue, raw_id: bytes) -> Iterator[Callable[[], Job | None]]:
    """Yield a function that reads one job, and set the job aside after an error in the ``with`` block.

    If the error says that Redis cannot serve, the job is not set aside, and the error is raised.
    """
    try:
        with about_job(raw_id.decode(errors="replace")):
            yield lambda: read_job(queue, raw_id)
    except Exception as error:
        if isinstance(error, RedisUnavailable) or cannot_serve(error):
            raise
        set_aside(queue, raw_id, str(error) if isinstance(error, DamagedJob) else repr(error))


def _guarded(step: Callable[[], object]) -> None:
    """Run one step of `clean_queue`. If Redis refuses a command of the step, only log that."""
    try:
        step()
    except redis.ResponseError as error:
        if cannot_serve(error):
            raise
        logger.warning("one of the queue's lists cannot be cleaned: %s", error)
