"""The job function. RQ calls it by name; the worker process says what it does.

``jobs`` must stay light, so nothing here knows the engine: a ScoringWorker binds its scorer when
it starts, and any other RQ worker that picks up a job fails it with the command to use instead.
"""

from __future__ import annotations

from collections.abc import Callable

from rq import get_current_job

from jobs.errors import WrongWorkerError
from jobs.results import ChunkFailure
from jobs.runs import RunStore

Scorer = Callable[[str, int], object]
"""Takes on chunk ``(run_id, chunk)``; what it returns and how scores get back is the worker's business."""

_scorer: Scorer | None = None


def bind_scorer(scorer: Scorer | None) -> None:
    """Make `scorer` what `score_chunk` calls in this process; ``None`` unbinds."""
    global _scorer  # noqa: PLW0603
    _scorer = scorer


def score_chunk(run_id: str, chunk: int) -> object:
    """Score one chunk of a run: the function of every rankmill job.

    Raises
    ------
    WrongWorkerError
        This process is no ScoringWorker. The run is told, so that its producer need not wait.
    """
    if _scorer is None:
        raise _wrong_worker(run_id, chunk)
    return _scorer(run_id, chunk)


def worker_command(queue: str) -> str:
    """The command that starts a worker for `queue`, as the README shows it."""
    return f"rq worker {queue} --worker-class workers.ScoringWorker --serializer json"


def wrong_worker_message(queue: str) -> str:
    """One line for a queue with workers that cannot score."""
    return (
        f"queue {queue!r} is served by a plain RQ worker, which cannot score; "
        f"start its workers with: {worker_command(queue)}"
    )


def _wrong_worker(run_id: str, chunk: int) -> WrongWorkerError:
    """Tell the run, whose producer would wait for ever, and make the error to raise."""
    job = get_current_job()
    if job is None:
        return WrongWorkerError("jobs.score_chunk runs in RQ workers only")
    error = WrongWorkerError(wrong_worker_message(job.origin))
    store = RunStore(job.connection)
    run = store.load(run_id)
    if run is not None:
        store.write_result(run, ChunkFailure(chunk, str(error), fatal=True))
    return error
