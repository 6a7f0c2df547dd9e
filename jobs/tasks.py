"""The job function, which RQ calls by name in a worker that is not a ScoringWorker.

A ScoringWorker reads the job and calls its scorer directly (`workers.worker`), so ``jobs`` does not
depend on the engine. In any other RQ worker this function fails the job, and writes a failure with the
right worker command to the run.
"""

from __future__ import annotations

from typing import NoReturn

from rq import get_current_job

from jobs.errors import WrongWorkerError
from jobs.results import ChunkFailure
from jobs.runs import RunStore


def score_chunk(run_id: str, chunk: int) -> NoReturn:
    """Fail, as the process is not a ScoringWorker. The run gets the failure, so its producer does not wait.

    Raises
    ------
    WrongWorkerError
        Always.
    """
    job = get_current_job()
    if job is None:
        raise WrongWorkerError("jobs.score_chunk runs in RQ workers only")
    error = WrongWorkerError(wrong_worker_message(job.origin))
    store = RunStore(job.connection)
    run = store.load(run_id)
    if run is not None:
        store.write_result(run, ChunkFailure(chunk=chunk, message=str(error), fatal=True))
    raise error


def worker_command(queue: str) -> str:
    """The command that starts a worker for `queue`, as the README shows it."""
    return f"rq worker {queue} --worker-class workers.ScoringWorker --serializer json"


def wrong_worker_message(queue: str) -> str:
    """One line for a queue with workers that cannot score."""
    return (
        f"queue {queue!r} is served by a plain RQ worker, which cannot score; "
        f"start its workers with: {worker_command(queue)}"
    )
