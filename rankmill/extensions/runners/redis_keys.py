"""Names of the Redis keys of submitted runs and their runners; each key has an expiry."""

from __future__ import annotations

from rankmill.jobs.contract.keys import PREFIX, of_queue


def file_run(run_id: str) -> str:
    """String: the record of a submitted run, as JSON."""
    return f"{PREFIX}:file-run:{run_id}"


def file_run_cancelled(run_id: str) -> str:
    """String: exists if the submitted run is cancelled; the run's runner looks for it."""
    return f"{PREFIX}:file-run:{run_id}:cancelled"


def file_run_refusals(run_id: str) -> str:
    """Hash: the reasons why runners cannot score the submitted run, by runner's name."""
    return f"{PREFIX}:file-run:{run_id}:refusals"


def file_runs() -> str:
    """Sorted set: ids of the submitted runs, ordered by the time (s since 1970) at which each was last
    submitted, taken, worked on or ended.
    """
    return f"{PREFIX}:file-runs"


def file_queues() -> str:
    """Sorted set: names of the queues of submitted runs, ordered by their last use (s since 1970)."""
    return f"{PREFIX}:file-queues"


def runners(queue: str) -> str:
    """Sorted set: names of a queue's live runners, ordered by the time from which each counts as dead."""
    return f"{of_queue(queue)}runners"


def webhooks(queue: str) -> str:
    """Sorted set: ended submitted runs whose webhook is not delivered, ordered by the time of the next
    attempt.
    """
    return f"{of_queue(queue)}webhooks"
