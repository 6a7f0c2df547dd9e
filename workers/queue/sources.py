"""Where a job's pairs come from and where its scores go: to a run in Redis, or to the job itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rq.job import JobStatus
from rq.utils import now

from rankmill.jobs.contract.errors import RankmillError, RedisUnavailable, RunFailed
from rankmill.jobs.contract.priority import priority_of
from rankmill.jobs.contract.results import ChunkResult, ChunkScores
from rankmill.jobs.contract.wire import decode_pairs
from rankmill.jobs.protocol.pairs_job import read_pairs, read_request, return_value
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.jobs.runtime.patience import cannot_serve

if TYPE_CHECKING:
    from rq.worker import SimpleWorker

    from rankmill.jobs.contract.run import Run, Settled
    from rankmill.workers.queue.claim import Claim, Source, Texts
    from rankmill.workers.queue.rq_job import ScoringJob


def source_of(job: ScoringJob, store: RunStore) -> Source:
    """The source of a job; raises `ForeignJobError` if it asks for no scores."""
    return OwnPairs(job) if job.has_pairs else ChunkOfRun(job, store)


class ChunkOfRun:
    """A chunk of a run: pairs, run and result are in Redis under keys of their own."""

    in_redis = True

    def __init__(self, job: ScoringJob, store: RunStore) -> None:
        self._store = store
        self._run_id, self._chunk = job.chunk
        self._is_request = priority_of(self._run_id) == "request"
        self._payload: bytes | None = None
        self._rows = 0

    def load(self) -> Run | None:
        """As the protocol says; a request's pairs, which are few, come with it."""
        if not self._is_request:
            return self._store.load(self._run_id)
        run, self._payload = self._store.load_with(self._run_id, self._chunk)
        return run

    def pairs(self, run: Run) -> tuple[Texts, Texts] | None:
        payload, self._payload = self._payload, None
        if not self._is_request:
            payload = self._store.payload(run, self._chunk)
        if payload is None:
            return None
        queries, passages = decode_pairs(payload)
        self._rows = len(queries)
        return queries, passages

    def settle(self, run: Run, mine: Settled) -> Settled:
        """As the protocol says; a request of one chunk has no others that could be scored differently."""
        if self._is_request and (self._chunk, self._rows) == (0, run.rows):
            return mine
        return self._store.settle(run, mine)

    def wanted(self, run: Run) -> bool:
        return self._store.exists(run.id)

    def finish(self, worker: SimpleWorker, claim: Claim, result: ChunkResult | None) -> None:
        """As the protocol says, without WATCH, so that it can be repeated."""
        job = claim.job
        with worker.connection.pipeline() as pipe:
            if result is not None:
                self._store.add_result(pipe, self._run_id, result, job.run_ttl)
            worker.increment_successful_job_count(pipeline=pipe)
            if job.started_at:
                worker.increment_total_working_time(now() - job.started_at, pipe)
            worker.cleanup_execution(job, pipe, claim.execution)
            pipe.delete(job.key, job.execution_registry.key)
            pipe.execute()


class OwnPairs:
    """The pairs of a job that brings them; it ends as RQ's own jobs do, with RQ's result."""

    in_redis = False

    def __init__(self, job: ScoringJob) -> None:
        self._job = job
        self._pairs: tuple[Texts, Texts] | None = None

    def load(self) -> Run | None:
        self._pairs = read_pairs(self._job)  # before any model is loaded for them
        return read_request(self._job)

    def pairs(self, run: Run) -> tuple[Texts, Texts] | None:
        return self._pairs

    def settle(self, run: Run, mine: Settled) -> Settled:
        return mine

    def wanted(self, run: Run) -> bool:
        connection: Any = self._job.connection
        status = connection.hget(self._job.key, "status")
        return status not in {None, JobStatus.CANCELED.value.encode()}

    def finish(self, worker: SimpleWorker, claim: Claim, result: ChunkResult | None) -> None:
        """As the protocol says; what follows the job, such as jobs that depend on it, is RQ's."""
        job, queue, execution = claim.job, claim.queue, claim.execution
        try:
            if isinstance(result, ChunkScores):
                worker._finalize_success(job, queue, execution, return_value(result))
            elif result is not None:
                fail(worker, claim, RunFailed(result.message))
            else:
                with worker.connection.pipeline() as pipe:
                    worker.cleanup_execution(job, pipe, execution)
                    pipe.execute()
        except Exception as error:
            if isinstance(error, RedisUnavailable) or cannot_serve(error):
                raise
            raise DamagedJob(f"RQ cannot end it ({type(error).__name__}: {error})") from None


def fail(worker: SimpleWorker, claim: Claim, error: Exception) -> None:
    """Let RQ record a failed attempt, in one line if rankmill has the reason.

    What no other attempt would change is the last attempt of a job that brings its pairs.
    """
    expected = isinstance(error, RankmillError)
    if expected and claim.source and not claim.source.in_redis:
        claim.job.retries_left = 0
    trace = None if expected else error.__traceback__
    worker._finalize_failure(claim.job, claim.queue, claim.execution, (type(error), error, trace))
