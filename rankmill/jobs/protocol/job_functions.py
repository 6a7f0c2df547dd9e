"""The functions that scoring jobs name, `rankmill.score_chunk` and `rankmill.score_pairs`; both always fail.

RQ calls these functions by name in a worker that is not a ScoringWorker. A ScoringWorker reads the job and
scores it itself, so the functions need no engine.
"""

from __future__ import annotations

from typing import Any, NoReturn

from rq import get_current_job
from rq.job import Job

from rankmill.jobs.contract.errors import WrongWorkerError
from rankmill.jobs.contract.job import JOB_FUNCTION, chunk_of, wrong_worker_message
from rankmill.jobs.contract.results import ChunkFailure
from rankmill.jobs.protocol.pairs_job import PAIRS_FUNCTION
from rankmill.jobs.protocol.rq import let_expire
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import queue_workers


def score_chunk(run_id: str, chunk: str) -> NoReturn:
    """Raise an error: only a ScoringWorker can score a chunk, and ScoringWorkers do not call this function.

    A plain RQ worker calls this function. If the queue has a ScoringWorker, the job goes back to the queue.
    If the queue has none, a failure is written to the run, so that the producer does not wait. The failure's
    message has the command that starts a ScoringWorker.

    Raises
    ------
    WrongWorkerError
        A worker that cannot score has run the job.
    WireError
        Raised instead if the run or the job's arguments cannot be read.
    """
    job, message = _wrong_worker(JOB_FUNCTION)
    store = RunStore(job.connection)
    run = None if _leave_to_others(job) else store.load(run_id)
    if run is not None:
        store.write_result(run, ChunkFailure(chunk=chunk_of(job)[1], message=message, fatal=True))
    raise WrongWorkerError(message)


def score_pairs(pairs: list[tuple[str, str]], *, model: str, **spec: Any) -> NoReturn:
    """Raise an error: only a ScoringWorker can score a job of pairs, and ScoringWorkers do not call this
    function.

    A plain RQ worker calls this function. If the queue has a ScoringWorker, the job goes back to the queue.

    Parameters
    ----------
    pairs
        At most `MAX_PAIRS` pairs of query and passage; a pair with ``None`` gets an error instead of a score.
    model, spec
        Fields of `ScoreSpec`.

    Raises
    ------
    WrongWorkerError
        Always.
    """
    job, message = _wrong_worker(PAIRS_FUNCTION)
    _leave_to_others(job)
    raise WrongWorkerError(message)


def _wrong_worker(function: str) -> tuple[Job, str]:
    """Return the current job and the message that this worker cannot score it. Also set the job's expiry."""
    job = get_current_job()
    if job is None:
        raise WrongWorkerError(f"{function} runs in RQ workers only")
    let_expire(job)
    return job, wrong_worker_message(job.origin)


def _leave_to_others(job: Job) -> bool:
    """Return whether the job's queue has a ScoringWorker. If so, let the job go back to the queue without
    losing an attempt.
    """
    has_others = bool(queue_workers(job.connection, job.origin).scoring)
    if has_others:
        job.retries_left = (job.retries_left or 0) + 1
        # No pause before the retry: after a pause, this worker would be first in line, and get the same job
        # again.
        job.retry_intervals = None
    return has_others
