"""Files and batches as OpenAI's API shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rankmill.extensions.batches.records import BatchCounts, BatchRecord, FileRecord, R
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.runners.record import FileRun

_STATES = {"waiting": "validating", "done": "completed", "failed": "failed", "cancelled": "cancelled"}

_LINE = re.compile(r"line (\d+): ")

ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


def file_view(file: FileRecord) -> dict[str, Any]:
    """Return a file's record as JSON in the form of OpenAI's API."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_view(
    batch: BatchRecord,
    run: FileRun | None,
    counts: BatchCounts | None,
    files: Sequence[str | None] = (None, None),
    *,
    cancelling: bool = False,
) -> dict[str, Any]:
    """Return a batch as JSON in the form of OpenAI's API.

    Parameters
    ----------
    batch
        Record of the batch.
    run
        Record of the batch's run; ``None`` if it has expired.
    counts
        Counts of the batch's lines; ``None`` if they have expired or are not written yet.
    files
        The ids of the files with the batch's output and with its errors.
    cancelling
        Whether the batch was cancelled but its run has not ended yet.
    """
    state = _state(run, cancelling=cancelling)
    ended = int(run.ended) if run and run.ended else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors(run),
        "input_file_id": batch.file,
        "completion_window": "24h",
        "status": state,
        "output_file_id": files[0],
        "error_file_id": files[1],
        "created_at": int(batch.created),
        "in_progress_at": int(run.started) if run and run.started else None,
        "expires_at": None,
        "finalizing_at": ended if state == "completed" else None,
        "completed_at": ended if state == "completed" else None,
        "failed_at": ended if state == "failed" else None,
        "expired_at": None,
        "cancelling_at": ended if state == "cancelled" else None,
        "cancelled_at": ended if state == "cancelled" else None,
        "request_counts": _counts(run, counts),
        "metadata": batch.metadata or None,
    }


def page(
    latest_first: Sequence[R], shown: Any, after: str | None, limit: int, *, oldest_first: bool = False
) -> dict[str, Any]:
    """Return one page of a list of records as JSON.

    Parameters
    ----------
    latest_first
        All records of the list, the latest first.
    shown
        Makes the JSON of a record.
    after
        The page begins after the record with this id; ``None`` means the first page.
    limit
        Maximum number of records on the page.
    oldest_first
        Whether to show the oldest record first.

    Raises
    ------
    Refusal
        The list has no record with the id `after`. Do not send the first page instead: a client would then
        read the list for ever.
    """
    records = list(reversed(latest_first)) if oldest_first else list(latest_first)
    places = [place for place, record in enumerate(records) if record.id == after]
    if after and not places:
        raise Refusal("invalid", f"after: {after!r:.100} is not in the list (any more)", param="after")
    start = places[0] + 1 if places else 0
    part = [shown(record) for record in records[start : start + limit]]
    return {
        "object": "list",
        "data": part,
        "first_id": part[0]["id"] if part else None,
        "last_id": part[-1]["id"] if part else None,
        "has_more": start + limit < len(records),
    }


def _state(run: FileRun | None, *, cancelling: bool) -> str:
    if run is None:
        return "expired"
    if cancelling and not run.is_ended:
        return "cancelling"
    if run.state != "running":
        return _STATES[run.state]
    if run.rows is None:
        return "validating"
    return "finalizing" if run.progress.rows >= run.rows else "in_progress"


def _counts(run: FileRun | None, counts: BatchCounts | None) -> dict[str, int]:
    """Count a batch's lines, answers and errors. Until the answers are written, their number is estimated
    from the scored rows.
    """
    rows = (run and run.rows) or 0
    total = counts.total if counts else rows
    if counts and counts.completed + counts.failed:
        return {"total": total, "completed": counts.completed, "failed": counts.failed}
    done = total * run.progress.rows // rows if run and rows else 0
    return {"total": total, "completed": min(done, total), "failed": 0}


def _errors(run: FileRun | None) -> dict[str, Any] | None:
    if run is None or run.state != "failed":
        return None
    line = _LINE.match(run.reason)
    error = {"code": "invalid_batch" if line else "failed", "message": run.reason, "param": None}
    return {"object": "list", "data": [{**error, "line": int(line[1]) if line else None}]}
