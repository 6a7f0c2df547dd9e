"""Finds a run by its id, and cancels it."""

from __future__ import annotations

import redis

from rankmill.cluster.watch import find_watched
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.run import Run
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.settings import Settings


def find_run(store: RunStore, prefix: str) -> Run:
    """Find the run whose id begins with `prefix`. A detached run is found only by its whole id.

    Raises
    ------
    InputError
        No run's id begins with `prefix`, or several ids do.
    WireError
        The run in Redis is damaged or has another format.
    """
    ids = store.find(prefix)
    if len(ids) > 1:
        raise InputError(
            f"{len(ids)} runs begin with {prefix}: {', '.join(ids[:5])}; give more characters of the id"
        )
    exact = [prefix] if prefix.isalnum() else []  # detached runs are not listed
    run = store.load(*(ids or exact)) if ids or exact else None
    if run is None:
        raise InputError(
            f"there is no run {prefix}: it has finished, was cancelled or has expired; score-file lists the "
            "rows without a score of a finished run in OUTPUT.errors.jsonl, beside its output"
        )
    return run


def cancel_run(client: redis.Redis, settings: Settings, run_id: str) -> str:
    """Cancel a run, and return a sentence that names it. The run may also belong to an extension.

    Parameters
    ----------
    client, settings
        The server, and the settings with which extensions find their runs.
    run_id
        The run's id, or the beginning of it.

    Raises
    ------
    InputError
        No run's id begins with `run_id`, or several ids do.
    WireError
        The run in Redis is damaged or has another format.
    """
    store = RunStore(client)
    watched = None if store.find(run_id) else find_watched(client, settings, run_id)
    if watched:
        return watched.cancel()
    run = find_run(store, run_id)
    waiting = store.cancel(run)
    return f"run {run.id} is cancelled; {waiting} waiting chunks have left queue {run.queue!r}"
