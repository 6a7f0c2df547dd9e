"""What a queue can make a worker do: score a chunk, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any

from rq.executions import Execution, ExecutionRegistry
from rq.job import Job

from jobs.errors import ForeignJobError
from jobs.job import JOB_FUNCTION, chunk_of


class Executions(ExecutionRegistry):
    """The executions of a job that Redis still knows.

    RQ lists an execution for longer than it keeps it, a restarted server may know either alone,
    and RQ (3.0) cannot finish a job while one is listed that is not there.
    """

    def get_executions(self, start: int = 0, end: int = -1) -> list[Execution]:
        """Those that are listed and there."""
        known = []
        for execution_id in self.get_execution_ids(start, end):
            with suppress(ValueError, KeyError, OverflowError):  # gone, or damaged
                known.append(Execution.fetch(execution_id, self.job_id, self.connection))
        return known


class ScoringJob(Job):
    """A job that can only ask for a chunk's scores.

    RQ imports and calls whatever function, callbacks and webhooks a job in Redis names, so that
    whoever can write to the queue can run anything on every worker. A ScoringWorker does not.
    """

    @cached_property
    def chunk(self) -> tuple[str, int]:
        """The run's id and the number of the chunk to score.

        Raises
        ------
        ForeignJobError
            The job asks for something else.
        """
        if self.func_name != JOB_FUNCTION:
            raise ForeignJobError(
                f"job {self.id} asks for {self.func_name}; a ScoringWorker runs nothing but {JOB_FUNCTION}"
            )
        return chunk_of(self)

    def perform(self) -> None:
        """Call no function, whatever the job says: the worker scores `chunk` itself."""
        raise ForeignJobError(f"job {self.id} is for the worker's own loop")

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
        """Send none, whatever the job says."""
