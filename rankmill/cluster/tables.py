"""Makes tables for a terminal from a snapshot of the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rankmill.cluster.failed import FailedJob
from rankmill.cluster.snapshot import Damaged, QueueState, RunState, Snapshot, WorkerState
from rankmill.cluster.verdict import MAX_REASON_CHARS, verdict
from rankmill.jobs.contract.run import RowError
from rankmill.jobs.contract.shown import natural_order
from rankmill.jobs.protocol.worker_report import GpuReport, WorkerReport
from rankmill.jobs.runtime.durability import Durability

Row = TypeVar("Row")

ID_CHARS = 12
"""Tables show this many characters of a run's id, enough to identify the run."""

_FRAME = 4
"""Number of lines that the screen needs besides the workers and the text above their table: the head of the
table, the count of hidden workers, an empty line, and the prompt.
"""

_FEWEST = 3
"""At least this many workers are shown, even if the terminal has too few lines for them."""

_STYLES = {
    "busy": "green",
    "idle": "",
    "draining": "yellow",
    "drained": "yellow",
    "lost": "bold red",
    "foreign": "yellow",
}


@dataclass(frozen=True)
class Overview:
    """Shows a cluster in a terminal: its faults, at most `most_runs` runs, the queues and the workers.

    Workers in trouble come first. A terminal shows only as many workers as fit.
    """

    cluster: Snapshot
    most_runs: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        above, below = Group(*self._above()), Group(*self._below())
        yield above
        most = None
        if console.is_terminal:
            lines = len(console.render_lines(above, options)) + len(console.render_lines(below, options))
            most = max(console.height - lines - _FRAME, _FEWEST)
        yield _first_workers(self.cluster.workers, most)
        yield below

    def _above(self) -> list[RenderableType]:
        told, cluster = verdict(self.cluster), self.cluster
        runs = cluster.runs[: self.most_runs]
        parts: list[RenderableType] = [
            *(
                Text(f"{plain(fault.text)}: {plain(fault.remedy)}.", style="bold red")
                for fault in told.faults
            ),
            *([] if told.faults else [Text(f"{told.sentence}.", style="bold green")]),
            Text(""),
            runs_table(runs, cluster.at),
        ]
        if cluster.runs_total > len(runs):
            parts.append(Text(f"{cluster.runs_total - len(runs):,} more runs: rankmill runs\n"))
        return [*parts, queues_table(cluster.queues)]

    def _below(self) -> list[RenderableType]:
        cluster = self.cluster
        parts: list[RenderableType] = [
            Text(plain(line)) for seen in cluster.extensions.values() for line in seen.lines()
        ]
        if cluster.durability:
            parts.append(Text(_kept(cluster.durability)))
            parts += [Text(f"{plain(risk.text)}.", style="yellow") for risk in cluster.durability.risks]
        if cluster.damaged:
            parts += [
                Text("\nThese keys in Redis are damaged:", style="bold red"),
                damaged_table(cluster.damaged),
            ]
        return parts


def _first_workers(workers: Sequence[WorkerState], most: int | None) -> RenderableType:
    ordered = sorted(workers, key=lambda worker: (not _is_in_trouble(worker), natural_order(worker.name)))
    # One worker too many may be shown: the line "and 1 more" would need as much room.
    if most is None or len(ordered) <= most + 1:
        return workers_table(ordered)
    states = Counter(worker.state for worker in ordered[most:])
    more = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    return Group(workers_table(ordered[:most], gap=False), Text(f"and {more}: rankmill workers\n"))


def _is_in_trouble(worker: WorkerState) -> bool:
    refuses = bool(worker.report and worker.report.refusals)
    return worker.state not in {"busy", "idle"} or worker.is_slow or refuses


def queues_table(queues: Iterable[QueueState]) -> RenderableType:
    """Make a table with one line for each queue."""
    return _or_word("No queues yet.", table(queues, {
        "queue": lambda queue: plain(queue.name),
        "waiting": lambda queue: f"{queue.waiting:,}",
        "oldest": lambda queue: duration(queue.oldest_seconds),
        "running": lambda queue: f"{queue.started:,}",
        "failed": lambda queue: _alarm(queue.failed),
        "workers": lambda queue: f"{queue.workers:,}",
    }, left="queue"))  # fmt: skip


def workers_table(workers: Iterable[WorkerState], *, gap: bool = True) -> RenderableType:
    """Make a table with one line for each worker. With `gap`, an empty line follows the table."""
    return _or_word("No workers.", table(workers, {
        "worker": lambda worker: plain(worker.name),
        "queues": lambda worker: plain(", ".join(worker.queues)),
        "state": lambda worker: Text(worker.state, style=_STYLES[worker.state]),
        "device": _of_report(lambda report: plain(report.device)),
        "pairs": _of_report(lambda report: f"{report.pairs:,}"),
        "row errors": _of_report(lambda report: f"{report.row_errors:,}"),
        "padding": _of_report(_padding),
        "beat": lambda worker: f"{duration(worker.beat_seconds)} ago",
    }, left="worker queues state device"), gap=gap)  # fmt: skip


def live_table(workers: Iterable[WorkerState]) -> RenderableType:
    """Make a table of the workers' loaded models and use of the host, with one line for each worker."""
    return _or_word("No workers: start some with rankmill workers start.", table(workers, {
        "worker": lambda worker: plain(worker.name),
        "pid": lambda worker: "" if worker.pid is None else str(worker.pid),
        "state": _live_state,
        "queues": lambda worker: plain(", ".join(worker.queues)),
        "cpu": _of_report(lambda report: "" if report.cpu is None else f"{report.cpu:.1f} cores"),
        "memory": _of_report(lambda report: size(report.resident_bytes)),
        "gpu": _of_report(lambda report: _gpu(report.gpu)),
        "hits": _of_report(_hits),
        "beat": lambda worker: f"{duration(worker.beat_seconds)} ago",
        "models": _of_report(lambda report: plain(", ".join(report.models)) or "none"),
    }, left="worker state queues models", unbroken="worker"))  # fmt: skip


def runs_table(runs: Iterable[RunState], now: float) -> RenderableType:
    """Make a table with one line for each run."""
    return _or_word("No runs.", table(runs, {
        "run": lambda run: run.id[:ID_CHARS],
        "model": lambda run: plain(run.model),
        "queue": lambda run: plain(run.queue),
        "rows": lambda run: "?" if run.rows is None else f"{run.rows:,}",
        "done": lambda run: f"{run.rows_done / run.rows:.0%}" if run.rows else f"{run.rows_done:,}",
        "waiting": lambda run: f"{run.waiting:,}",
        "row errors": lambda run: _alarm(run.row_errors),
        "rows/s": lambda run: "" if run.rows_per_second is None else f"{run.rows_per_second:,.0f}",
        "left": lambda run: duration(run.seconds_left),
        "age": lambda run: duration(now - run.created),
    }, left="run model queue"))  # fmt: skip


def errors_table(errors: Iterable[RowError]) -> RenderableType:
    """Make a table with one line for each row without a score."""
    return table(errors, {
        "row": lambda error: f"{error.row:,}",
        "attempts": lambda error: str(error.attempts),
        "worker": lambda error: plain(error.worker),
        "error": lambda error: plain(error.error),
    }, left="worker error")  # fmt: skip


def failed_table(jobs: Iterable[FailedJob], now: float) -> RenderableType:
    """Make a table with one line for each job that failed for good or was set aside."""
    return _or_word("No failed jobs, and none was set aside.", table(jobs, {
        "job": lambda job: plain(job.id),
        "queue": lambda job: plain(job.queue),
        "state": lambda job: job.state,
        "age": lambda job: "" if job.at is None else duration(now - job.at),
        "reason": lambda job: plain(job.reason[:MAX_REASON_CHARS]),
    }, left="job queue state reason"))  # fmt: skip


def damaged_table(damaged: Iterable[Damaged]) -> RenderableType:
    """Make a table with one line for each key in Redis that cannot be read."""
    return table(damaged, {
        "key": lambda entry: plain(entry.key),
        "reason": lambda entry: plain(entry.reason),
    }, left="key reason")  # fmt: skip


def duration(seconds: float | None) -> str:
    """Write a duration in its two largest units; ``None`` becomes an empty text.

    >>> [duration(seconds) for seconds in (None, 0.4, 75, 7260, 180000)]
    ['', '0 s', '1 min 15 s', '2 h 1 min', '2 d 2 h']
    """
    if seconds is None:
        return ""
    rest = max(round(seconds), 0)
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts.append((count, name))
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count or name == "s")


def plain(text: str) -> str:
    """Replace the characters of a text that a terminal would read as control codes."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def size(count: int) -> str:
    """Write a number of bytes as text, in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def _gpu(gpu: GpuReport | None) -> str:
    if gpu is None:
        return ""
    use = "" if gpu.use is None else f"{gpu.use:.0%}, "
    warmth = "" if gpu.celsius is None else f", {gpu.celsius:.0f}\N{NO-BREAK SPACE}°C"
    return f"{use}{gpu.memory_used / 2**30:.0f}/{gpu.memory_size / 2**30:.0f}\N{NO-BREAK SPACE}GiB{warmth}"


def _hits(report: WorkerReport) -> str:
    looks = report.model_hits + report.model_loads
    return f"{report.model_hits / looks:.1%}" if looks else ""


def _padding(report: WorkerReport) -> str:
    return f"{1 - report.tokens / report.padded_tokens:.1%}" if report.padded_tokens else ""


def _live_state(worker: WorkerState) -> Text:
    state = Text(worker.state, style=_STYLES[worker.state])
    if worker.report and worker.state == "draining":
        state.append(f" ({worker.report.claimed_jobs:,} left)")
    elif worker.is_slow:
        state.append(", slow", style="yellow")
    elif worker.report and worker.report.doing:
        state.append(f", {worker.report.doing}")
    return state


def _of_report(cell: Callable[[WorkerReport], str]) -> Callable[[WorkerState], str]:
    return lambda worker: cell(worker.report) if worker.report else ""


def _kept(durability: Durability) -> str:
    facts = {
        "maxmemory-policy": durability.maxmemory_policy,
        "maxmemory": {None: None, 0: "0"}.get(durability.maxmemory, size(durability.maxmemory or 0)),
        "appendonly": {None: None, True: "yes", False: "no"}[durability.appendonly],
        "appendfsync": durability.appendfsync if durability.appendonly is not False else "",
        "save": durability.save if durability.save != "" else "never",
        "replicas": durability.replicas,
        "min-replicas-to-write": {None: None, True: "set", False: "0"}[durability.needs_replicas],
    }
    known = [f"{name} {plain(str(value))}" for name, value in facts.items() if value not in (None, "")]
    unknown = [name for name, value in facts.items() if value is None]
    told = f"Redis: {', '.join(known) or 'it does not say how it keeps data'}."
    return told + (f" Not known: {', '.join(unknown)}." if known and unknown else "")


def _alarm(count: int) -> Text:
    return Text(f"{count:,}", style="red" if count else "")


def table(
    rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str | Text]], *, left: str, unbroken: str = ""
) -> Table:
    """Make a table.

    Parameters
    ----------
    rows
        What the rows of the table are made from.
    columns
        For each column its title, and a function that makes the text of a row's cell.
    left
        Titles of the columns that are left-aligned, separated by spaces. A space in a title is written as
        ``-``.
    unbroken
        Title of the column whose texts are not broken into lines.
    """
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "left" if name.replace(" ", "-") in left.split() else "right"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name == unbroken)
    for row in rows:
        made.add_row(*(cell(row) for cell in columns.values()))
    return made


def _or_word(word: str, table: Table, *, gap: bool = True) -> RenderableType:
    return Group(table if table.row_count else Text(word), *([Text("")] if gap else []))
