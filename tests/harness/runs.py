"""Runs without a producer, and what is kept of one beside its output."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from benchmarks.faults.kills import folder_of
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


def kept_bytes(output: Path) -> int:
    """Bytes that the process which makes an output has written to its journal; nobody else may read that."""
    with suppress(FileNotFoundError):
        return (folder_of(output) / "journal.db-wal").stat().st_size
    return 0


SOME_BYTES = 100_000
"""What is written of some ten chunks."""
