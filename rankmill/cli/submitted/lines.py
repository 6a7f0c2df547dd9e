"""A submitted run as lines of text."""

from __future__ import annotations

import time

from rankmill.cluster.tables import duration, plain
from rankmill.jobs.protocol.submitted.record import FileRun


def describe(run: FileRun) -> str:
    """The run's state, and what there is to know in it."""
    request, done = run.order.request, run.outcome
    source = request.run or ", ".join(request.inputs)
    lines = [
        f"submitted run {run.id} is {run.state}{f': {plain(run.reason)}' if run.reason else ''}",
        f"model {plain(run.order.spec.model)}: {plain(source)} to {plain(request.output or '')}",
    ]
    if run.state == "done" and done:
        lines.append(
            f"{done.rows - done.row_errors:,} of {done.rows:,} rows scored; scores are in {done.output}"
        )
        if done.row_errors:
            lines.append(f"{done.row_errors:,} rows have no score; {done.errors_file} says which and why")
    elif run.rows is not None:
        speed = run.progress.rows_per_second()
        left = duration(run.progress.seconds_left(run.rows))
        lines.append(
            f"{run.progress.rows:,} of {run.rows:,} rows are done"
            + (f", {speed:,.0f} pairs/s, time left: {left}" if speed and not run.is_ended else "")
        )
    if run.runner:
        lines.append(f"runner {plain(run.runner)}")
    if run.notice:
        why = f" ({plain(run.notice.reason)})" if run.notice.reason else ""
        lines.append(f"webhook {run.notice.state} after {run.notice.attempts} attempts{why}")
    lines.append(f"submitted {duration(time.time() - run.created)} ago")
    return "\n".join(lines)
