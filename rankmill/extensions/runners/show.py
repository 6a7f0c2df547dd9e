"""Shows submitted runs in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from rankmill.cluster.tables import ID_CHARS, duration, plain, table
from rankmill.extensions.runners.record import FileRun
from rankmill.jobs.contract.shown import counted, unscored
from rankmill.jobs.system import system


def submitted_table(runs: Iterable[FileRun], now: float, *, without_runner: bool) -> RenderableType:
    """Make a table of submitted runs. If `without_runner`, a line below the table says that no runner takes
    them.
    """
    shown = table(runs, {
        "submitted run": lambda run: run.id[: ID_CHARS + 1],
        "state": lambda run: Text(run.state, style="red" if run.state == "failed" else ""),
        "output": lambda run: plain(run.order.request.output or ""),
        "rows": lambda run: "?" if run.rows is None else f"{run.rows:,}",
        "done": lambda run: f"{run.progress.rows / run.rows:.0%}" if run.rows else "",
        "runner": lambda run: plain(run.runner),
        "age": lambda run: duration(now - run.created),
    }, left="submitted-run state output")  # fmt: skip
    lacking = "No runner takes submitted runs: start one with rankmill runner.\n" if without_runner else ""
    return Group(shown, Text(""), *([Text(lacking)] if lacking else []))


def describe(run: FileRun) -> str:
    """Describe a submitted run in several lines: its state, its files, its progress or outcome, and its
    webhook.
    """
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
            lines.append(f"{unscored(done.row_errors)}; {done.errors_file} says which and why")
    elif run.rows is not None:
        now = system.now()
        speed = run.progress.rows_per_second(now)
        time_left = duration(run.progress.seconds_left(run.rows, now))
        lines.append(
            f"{run.progress.rows:,} of {run.rows:,} rows are done"
            + (f", {speed:,.0f} pairs/s, time left: {time_left}" if speed and not run.is_ended else "")
        )
    if run.runner:
        lines.append(f"runner {plain(run.runner)}")
    if run.notice:
        why = f" ({plain(run.notice.reason)})" if run.notice.reason else ""
        attempts = counted(run.notice.attempts, "attempt")
        lines.append(f"webhook {run.notice.state} after {attempts}{why}")
    lines.append(f"submitted {duration(system.now() - run.created)} ago")
    return "\n".join(lines)
