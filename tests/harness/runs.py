"""Runs without a producer."""

from __future__ import annotations

from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.contract.run import Run, new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.runs import RunStore


def stored_run(
    store: RunStore,
    *,
    model: str = "m",
    queue: str = "q",
    ttl: int = 60,
    max_retries: int = 0,
    rows: int | None = None,
    priority: Priority | None = None,
) -> Run:
    """A new run, written to the server."""
    run = new_run(
        ScoreSpec(model=model), queue=queue, ttl=ttl, max_retries=max_retries, rows=rows, priority=priority
    )
    store.restore(run)
    return run
