"""Tables of a snapshot for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rankmill.cluster.damage import Damaged
from rankmill.cluster.queues import QueueState
from rankmill.cluster.snapshot import RunState, Snapshot
from rankmill.cluster.workers import WorkerState
from rankmill.jobs.contract.run import RowError
from rankmill.jobs.protocol.submitted.record import FileRun
from rankmill.jobs.protocol.worker_report import GpuReport, WorkerReport

ID_CHARS = 12
"""Characters of a run's id shown in tables; enough to identify it."""

MAX_REASON_CHARS = 300
"""Characters of a worker's reason for a refusal that are shown."""

_STYLES = {
    "busy": "green",
    "idle": "",
    "draining": "yellow",
    "drained": "yellow",
    "lost": "bold red",
    "foreign": "yellow",
}


def overview(cluster: Snapshot, most_runs: int) -> RenderableType:
    """Queues, workers and the first runs."""
    parts: list[RenderableType] = []
    if cluster.trouble:
        parts.append(Text(f"{plain(cluster.trouble)}: producers and workers wait for it.", style="bold red"))
    parts += [queues_table(cluster.queues), workers_table(cluster.workers)]
    parts.append(runs_table(cluster.runs[:most_runs], cluster.at))
    more = cluster.runs_total - len(cluster.runs[:most_runs])
    if more > 0:
        parts.append(Text(f"{more:,} more runs: rankmill runs"))
    if any(worker.state == "lost" for worker in cluster.workers):
        parts.append(Text("A lost worker has died or cannot reach Redis; other workers get its chunks."))
    parts += [
        Text(f"{plain(worker.name)} {what}: {_reasons(reasons)}", style="yellow")
        for worker in cluster.workers
        if worker.report
        for what, reasons in (
            ("leaves chunks to other workers", worker.report.refusals),
            ("tries again with the next chunk what it has refused", worker.report.half_open),
        )
        if reasons
    ]
    if cluster.set_aside:
        last, jobs = cluster.set_aside[0], len(cluster.set_aside)
        how_many = "1 job was" if jobs == 1 else f"{jobs} jobs were"
        what = plain(f"{last.job}: {last.reason}")
        parts.append(Text(f"{how_many} unreadable and set aside; the last one is {what}", style="yellow"))
    parts += [
        Text(_nobody(queue), style="bold red")
        for queue in cluster.queues
        if queue.waiting and not queue.workers
    ]
    for files in cluster.file_queues:
        counts = f"{files.waiting:,} waiting, {files.running:,} running; runners: {files.runners:,}"
        line = f"Submitted runs in queue {plain(files.name)}: {counts}"
        nobody = files.waiting and not files.runners
        start = "; start some with rankmill runner" if nobody else ""
        parts.append(Text(f"{line}{start}.", style="bold red" if nobody else ""))
    if cluster.damaged:
        parts += [
            Text("\nThese keys in Redis are damaged:", style="bold red"),
            damaged_table(cluster.damaged),
        ]
    return Group(*parts)


def queues_table(queues: Iterable[QueueState]) -> RenderableType:
    """One line for each queue."""
    table = _table("queue", "waiting", "oldest", "running", "failed", "workers", left=1)
    for queue in queues:
        table.add_row(
            plain(queue.name),
            f"{queue.waiting:,}",
            duration(queue.oldest_seconds),
            f"{queue.started:,}",
            Text(f"{queue.failed:,}", style="red" if queue.failed else ""),
            f"{queue.workers:,}",
        )
    return _or_word(table, "No queues yet.")


def workers_table(workers: Iterable[WorkerState]) -> RenderableType:
    """One line for each worker."""
    table = _table("worker", "queues", "state", "device", "pairs", "row errors", "padding", "beat", left=4)
    for worker in workers:
        report = worker.report
        table.add_row(
            plain(worker.name),
            plain(", ".join(worker.queues)),
            Text(worker.state, style=_STYLES[worker.state]),
            plain(report.device) if report else "",
            f"{report.pairs:,}" if report else "",
            f"{report.row_errors:,}" if report else "",
            _padding(report) if report else "",
            f"{duration(worker.beat_seconds)} ago",
        )
    return _or_word(table, "No workers.")


def live_table(workers: Iterable[WorkerState]) -> RenderableType:
    """One line for each worker, with what it keeps loaded and what it uses of its host."""
    table = _table("worker", "state", "queues", "cpu", "memory", "gpu", "hits", "beat", "models", left=3)
    table.columns[0].no_wrap, table.columns[-1].justify = True, "left"
    for worker in workers:
        report = worker.report
        state = Text(worker.state, style=_STYLES[worker.state])
        if report and worker.state == "draining":
            state.append(f" ({report.claimed_jobs:,} left)")
        table.add_row(
            plain(worker.name),
            state,
            plain(", ".join(worker.queues)),
            f"{report.cpu:.1f} cores" if report and report.cpu is not None else "",
            _size(report.resident_bytes) if report else "",
            _gpu(report.gpu) if report else "",
            _hits(report) if report else "",
            f"{duration(worker.beat_seconds)} ago",
            (plain(", ".join(report.models)) or "none") if report else "",
        )
    return _or_word(table, "No workers: start some with rankmill workers start.")


def runs_table(runs: Iterable[RunState], now: float) -> RenderableType:
    """One line for each run."""
    table = _table("run", "model", "queue", "rows", "done", "row errors", "rows/s", "left", "age", left=3)
    for run in runs:
        table.add_row(
            run.id[:ID_CHARS],
            plain(run.model),
            plain(run.queue),
            "?" if run.rows is None else f"{run.rows:,}",
            f"{run.rows_done / run.rows:.0%}" if run.rows else f"{run.rows_done:,}",
            Text(f"{run.row_errors:,}", style="red" if run.row_errors else ""),
            "" if run.rows_per_second is None else f"{run.rows_per_second:,.0f}",
            duration(run.seconds_left),
            duration(now - run.created),
        )
    return _or_word(table, "No runs.")


def submitted_table(runs: Iterable[FileRun], now: float) -> RenderableType:
    """One line for each submitted run."""
    table = _table("submitted run", "state", "output", "rows", "done", "runner", "age", left=3)
    for run in runs:
        table.add_row(
            run.id[: ID_CHARS + 1],
            Text(run.state, style="red" if run.state == "failed" else ""),
            plain(run.order.request.output or ""),
            "?" if run.rows is None else f"{run.rows:,}",
            f"{run.progress.rows / run.rows:.0%}" if run.rows else "",
            plain(run.runner),
            duration(now - run.created),
        )
    return _or_word(table, "No submitted runs.")


def errors_table(errors: Iterable[RowError]) -> RenderableType:
    """One line for each row without a score."""
    table = _table("row", "attempts", "worker", "error", left=0)
    table.columns[2].justify = table.columns[3].justify = "left"
    for error in errors:
        table.add_row(f"{error.row:,}", str(error.attempts), plain(error.worker), plain(error.error))
    return table


def damaged_table(damaged: Iterable[Damaged]) -> RenderableType:
    """One line for each key that cannot be read."""
    table = _table("key", "reason", left=2)
    for each in damaged:
        table.add_row(plain(each.key), plain(each.reason))
    return table


def duration(seconds: float | None) -> str:
    """Seconds as text in the two largest units.

    >>> [duration(seconds) for seconds in (None, 0.4, 75, 7260, 180000)]
    ['', '0 s', '1 min 15 s', '2 h 1 min', '2 d 2 h']
    """
    if seconds is None:
        return ""
    left = max(round(seconds), 0)
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        parts.append((count, name))
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count or name == "s")


def plain(text: str) -> str:
    """The text without characters that a terminal would take for control codes."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _reasons(reasons: Sequence[str]) -> str:
    """The first reason, and how many more there are."""
    first, *more = reasons
    return plain(first[:MAX_REASON_CHARS]) + (f" (and {len(more):,} more)" if more else "")


def _nobody(queue: QueueState) -> str:
    """One line for a queue whose chunks nobody takes."""
    name = plain(queue.name)
    if queue.drained:
        return f"All workers of queue {name} are drained: rankmill workers resume NAME makes one take chunks."
    start = f"start some with score-workers --queue {plain(shlex.quote(queue.name))}"
    return f"Queue {name} has no workers: {start}."


def _size(count: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def _gpu(gpu: GpuReport | None) -> str:
    """Use, memory and temperature of a GPU."""
    if gpu is None:
        return ""
    use = "" if gpu.use is None else f"{gpu.use:.0%}, "
    warmth = "" if gpu.celsius is None else f", {gpu.celsius:.0f}\N{NO-BREAK SPACE}°C"
    return f"{use}{gpu.memory_used / 2**30:.0f}/{gpu.memory_size / 2**30:.0f}\N{NO-BREAK SPACE}GiB{warmth}"


def _hits(report: WorkerReport) -> str:
    """Share of the chunks whose model was loaded already."""
    looks = report.model_hits + report.model_loads
    return f"{report.model_hits / looks:.1%}" if looks else ""


def _padding(report: WorkerReport) -> str:
    return f"{1 - report.tokens / report.padded_tokens:.1%}" if report.padded_tokens else ""


def _table(*names: str, left: int) -> Table:
    """A table whose first `left` columns are left-aligned and the others right-aligned."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < left else "right", overflow="fold")
    return table


def _or_word(table: Table, word: str) -> RenderableType:
    return Group(table if table.row_count else Text(word), Text(""))
