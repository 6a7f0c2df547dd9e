"""A claimed job: what it asks for, where its pairs come from, and where its scores go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from opentelemetry.trace import INVALID_SPAN, Span
from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.utils import now
from rq.worker import SimpleWorker

from rankmill.jobs.contract.errors import ForeignJobError, RankmillError, RedisUnavailable, RunFailed
from rankmill.jobs.contract.job import BASE_TIMEOUT, JOB_FUNCTION, OLD_JOB_FUNCTION, chunk_of
from rankmill.jobs.contract.priority import priority_of, run_id_of_request
from rankmill.jobs.contract.results import ChunkResult, ChunkScores
from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.wire import decode_pairs
from rankmill.jobs.protocol.pairs_job import (
    DAY,
    OLD_PAIRS_FUNCTION,
    PAIRS_FUNCTION,
    read_pairs,
    read_request,
    return_value,
)
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.jobs.runtime.patience import cannot_serve

if TYPE_CHECKING:
    from rankmill.workers.engine.engine import Engine, Work

Texts = Sequence[str | None]


class Executions(ExecutionRegistry):
    """The executions of a job that are both listed and stored in Redis.

    RQ keeps the list entry of an execution longer than its data, and a restarted server may have only one of
    them. RQ (3.0) cannot finish a job while an execution is listed without data.
    """

    def get_executions(self, start: int = 0, end: int = -1) -> list[Execution]:
        """Listed executions whose data can be read."""
        known = []
        for execution_id in self.get_execution_ids(start, end):
            with suppress(ValueError, KeyError, OverflowError):  # gone, or damaged
                known.append(Execution.fetch(execution_id, self.job_id, self.connection))
        return known


class ScoringJob(Job):
    """A job that can only ask for scores: of a chunk of a run, or of pairs that it brings.

    RQ imports and calls any function, callback and webhook that a job in Redis names, so anyone who
    can write to the queue can run any code on every worker. A ScoringWorker calls none of them.
    """

    @property
    def has_pairs(self) -> bool:
        """Whether the job brings its pairs."""
        return self.func_name in {PAIRS_FUNCTION, OLD_PAIRS_FUNCTION}

    @cached_property
    def chunk(self) -> tuple[str, int]:
        """The run's id and the number of the chunk to score; a job that brings its pairs is a run of one.

        Raises
        ------
        ForeignJobError
            The job asks for something else than scores.
        """
        if self.has_pairs:
            return run_id_of_request(self.id), 0
        if self.func_name not in {JOB_FUNCTION, OLD_JOB_FUNCTION}:
            raise ForeignJobError(
                f"job {self.id} asks for {self.func_name}; "
                f"a ScoringWorker runs nothing but {JOB_FUNCTION} and {PAIRS_FUNCTION}"
            )
        return chunk_of(self)

    @property
    def run_ttl(self) -> int:
        """The run's expiry in seconds, which its jobs carry as theirs."""
        ttl = int(self.failure_ttl or 0)
        return ttl if ttl > 0 else DAY

    @property
    def begin_seconds(self) -> int:
        """Longest time to load the model and to tokenize; a job by name's timeout is not for that."""
        return BASE_TIMEOUT if self.has_pairs else int(self.timeout or 0)

    def perform(self) -> None:
        """Never call the function of the job: the worker scores `chunk` itself."""
        raise ForeignJobError(f"job {self.id} can be run only by ScoringWorker's own loop")

    @property
    def execution_registry(self) -> Executions:
        """The job's executions."""
        return Executions(self.id, self.connection)

    @property
    def success_callback(self) -> None:
        """None, whatever the job says."""

    @property
    def failure_callback(self) -> None:
        """None, whatever the job says."""

    @property
    def stopped_callback(self) -> None:
        """None, whatever the job says."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send none; a job's webhooks are ignored."""


@dataclass(eq=False)
class ChunkClaim:
    """A chunk whose job this worker took off its queue and has not finished yet.

    Pairs, run and result are in Redis under keys of their own. ``run`` is known once it was read, ``engine``
    and ``work`` once the pairs were fetched and tokenized. ``claimed`` and ``started`` are monotonic times
    (s): when the job was claimed, and when its scoring began.
    """

    in_redis: ClassVar[bool] = True
    """Whether the run is in Redis, with its progress."""

    job: ScoringJob
    queue: Queue
    execution: Execution
    span: Span
    store: RunStore
    claimed: float = field(default_factory=time.monotonic)
    started: float = 0.0
    run: Run | None = None
    engine: Engine | None = None
    work: Work | None = None
    forward: Span = INVALID_SPAN
    _payload: bytes | None = None

    @property
    def run_id(self) -> str:
        """Id of the run; raises as `ScoringJob.chunk`."""
        return self.job.chunk[0]

    @property
    def chunk(self) -> int:
        """Number of the chunk; raises as `ScoringJob.chunk`."""
        return self.job.chunk[1]

    @property
    def _is_request(self) -> bool:
        return priority_of(self.run_id) == "request"

    def load(self) -> Run | None:
        """Read the run, with the pairs of a request, which are few; ``None`` if it is gone.

        Raises
        ------
        WireError, InputError
            It cannot be read.
        """
        if self._is_request:
            self.run, self._payload = self.store.load_with(self.run_id, self.chunk)
        else:
            self.run = self.store.load(self.run_id)
        return self.run

    def pairs(self, run: Run) -> tuple[Texts, Texts] | None:
        """Queries and passages, ``[n]`` each; ``None`` if nobody waits for their scores any more.

        Raises
        ------
        WireError
            They cannot be read.
        """
        payload, self._payload = self._payload, None
        if not self._is_request:
            payload = self.store.payload(run, self.chunk)
        return None if payload is None else decode_pairs(payload)

    def settle(self, run: Run, rows: int, mine: Settled) -> Settled:
        """What all chunks of the run are scored with, if this worker has `mine` and the chunk `rows`.

        A request of one chunk has no others that could be scored differently.
        """
        if self._is_request and (self.chunk, rows) == (0, run.rows):
            return mine
        return self.store.settle(run, mine)

    def is_wanted(self) -> bool:
        """Whether somebody still waits for the scores."""
        return self.store.exists(self.run_id)

    def finish(self, worker: SimpleWorker, result: ChunkResult | None) -> None:
        """End the job and write its result, if any, in one transaction, without WATCH: it can be repeated."""
        job = self.job
        with worker.connection.pipeline() as pipe:
            if result is not None:
                self.store.add_result(pipe, self.run_id, result, job.run_ttl)
            worker.increment_successful_job_count(pipeline=pipe)
            if job.started_at:
                worker.increment_total_working_time(now() - job.started_at, pipe)
            worker.cleanup_execution(job, pipe, self.execution)
            pipe.delete(job.key, job.execution_registry.key)
            pipe.execute()

    def fail(self, worker: SimpleWorker, error: Exception) -> None:
        """Let RQ record a failed attempt, in one line if rankmill has the reason."""
        trace = None if isinstance(error, RankmillError) else error.__traceback__
        worker._finalize_failure(self.job, self.queue, self.execution, (type(error), error, trace))


class PairsClaim(ChunkClaim):
    """A job that brings its pairs; it ends as RQ's own jobs do, with RQ's result."""

    in_redis = False
    _texts: tuple[Texts, Texts] | None = None

    def load(self) -> Run | None:
        self._texts = read_pairs(self.job)  # before any model is loaded for them
        self.run = read_request(self.job)
        return self.run

    def pairs(self, run: Run) -> tuple[Texts, Texts] | None:
        return self._texts

    def settle(self, run: Run, rows: int, mine: Settled) -> Settled:
        return mine

    def is_wanted(self) -> bool:
        connection: Any = self.job.connection
        status = connection.hget(self.job.key, "status")
        return status not in {None, JobStatus.CANCELED.value.encode()}

    def finish(self, worker: SimpleWorker, result: ChunkResult | None) -> None:
        """End the job; what follows it, such as jobs that depend on it, is RQ's."""
        try:
            if isinstance(result, ChunkScores):
                worker._finalize_success(self.job, self.queue, self.execution, return_value(result))
            elif result is not None:
                self.fail(worker, RunFailed(result.message))
            else:
                with worker.connection.pipeline() as pipe:
                    worker.cleanup_execution(self.job, pipe, self.execution)
                    pipe.execute()
        except Exception as error:
            if isinstance(error, RedisUnavailable) or cannot_serve(error):
                raise
            raise DamagedJob(f"RQ cannot end it ({type(error).__name__}: {error})") from None

    def fail(self, worker: SimpleWorker, error: Exception) -> None:
        """As a chunk does; what rankmill has the reason of, no other attempt would change."""
        if isinstance(error, RankmillError):
            self.job.retries_left = 0
        super().fail(worker, error)
