"""The jobs of ScoringWorkers (each asks for scores), and how they are taken off queues."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar, cast

from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job

from rankmill.jobs.contract.errors import ForeignJobError
from rankmill.jobs.contract.job import BASE_TIMEOUT, JOB_FUNCTION, OLD_JOB_FUNCTION, chunk_of
from rankmill.jobs.contract.priority import run_id_of_request
from rankmill.jobs.protocol.pairs_job import DAY, OLD_PAIRS_FUNCTION, PAIRS_FUNCTION
from rankmill.jobs.protocol.set_aside import DamagedJob, read_job, set_aside
from rankmill.workers.host import metrics

AnyQueue = TypeVar("AnyQueue", bound=Queue)


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

    @cached_property
    def has_pairs(self) -> bool:
        """Whether the job brings its pairs.

        Raises
        ------
        ForeignJobError
            The job asks for something else than scores.
        """
        pairs = {PAIRS_FUNCTION, OLD_PAIRS_FUNCTION}
        if self.func_name not in {JOB_FUNCTION, OLD_JOB_FUNCTION, *pairs}:
            raise ForeignJobError(
                f"job {self.id} asks for {self.func_name}; "
                f"a ScoringWorker runs nothing but {JOB_FUNCTION} and {PAIRS_FUNCTION}"
            )
        return self.func_name in pairs

    @cached_property
    def chunk(self) -> tuple[str, int]:
        """The run's id and the number of the chunk to score; a job that brings its pairs is a run of one.

        Raises
        ------
        ForeignJobError
            As `has_pairs`.
        """
        return (run_id_of_request(self.id), 0) if self.has_pairs else chunk_of(self)

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


def take_job(
    pop: Callable[[], tuple[bytes, AnyQueue] | None], claimed: Collection[str], stopped: Callable[[], bool]
) -> tuple[ScoringJob, AnyQueue] | None:
    """Take the next valid job; jobs that cannot be read are set aside.

    Parameters
    ----------
    pop
        Moves the id of the next job from its queue to the intermediate queue, and returns both.
    claimed
        Ids of the jobs that this worker has claimed, as a queue may contain an id twice.
    stopped
        Returns whether to take no more jobs.

    Returns
    -------
    The job and its queue; ``None`` if there was none.
    """
    while not stopped():
        found = pop()
        if found is None:
            return None
        raw_id, queue = found
        try:
            job = read_job(queue, raw_id)
        except DamagedJob as error:
            set_job_aside(queue, raw_id, str(error))
            continue
        if job is not None and job.id not in claimed:
            return cast("ScoringJob", job), queue
        cast("Any", queue.connection).lrem(queue.intermediate_queue_key, 1, raw_id)
    return None


def set_job_aside(queue: Queue, raw_id: bytes, reason: str) -> None:
    """Set a job aside and count it."""
    set_aside(queue, raw_id, reason)
    metrics.set_aside.inc()


def pop(queues: Sequence[AnyQueue], seconds: int) -> tuple[bytes, AnyQueue] | None:
    """Wait for a job as RQ's workers do: with a single queue, its id moves to an intermediate list."""
    connection: Any = queues[0].connection
    if len(queues) == 1:
        (queue,) = queues
        raw_id = connection.blmove(queue.key, queue.intermediate_queue_key, seconds)
        return None if raw_id is None else (raw_id, queue)
    by_key = {queue.key.encode(): queue for queue in queues}
    found = connection.blpop(list(by_key), seconds)
    return None if found is None else (found[1], by_key[found[0]])
