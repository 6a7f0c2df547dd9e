"""The record of a submitted run: its state, which everybody may read and one process at a time writes."""

from __future__ import annotations

from typing import Literal

from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.schema import Count, Seconds, WireModel
from rankmill.jobs.system import system

State = Literal["waiting", "running", "done", "failed", "cancelled"]

ENDED = frozenset({"done", "failed", "cancelled"})
"""States after which nothing more happens to a run."""

_MARK = "s"
"""First letter of a submitted run's id; no hexadecimal digit, and no request's first letter."""

MAX_REASON_CHARS = 2000


class RunOutcome(WireModel):
    """The result of a run: output, rows, rows without a score, and the rest of score-file's summary."""

    output: str
    rows: Count
    row_errors: Count
    resumed_rows: Count
    errors_file: str | None
    seconds: Seconds
    model: str
    revision: str | None
    precision: str
    retries: Count


class Seal(WireModel):
    """A complete output file: where it belongs, and properties that it keeps when it is moved there."""

    path: str
    identity: str


class Notice(WireModel):
    """A webhook: whether it was delivered, or why not yet; ``attempts`` counts requests sent so far."""

    state: Literal["due", "delivered", "given up"] = "due"
    attempts: Count = 0
    reason: str = ""


class FileRun(WireModel):
    """A submitted run.

    Attributes
    ----------
    reason
        Why it failed, or why it waits again.
    runner
        Name of the runner that has it, or had it last.
    deaths
        Runners that died in a row without scoring a row of it.
    rows
        Rows of the input; ``None`` until a runner has opened it.
    begun_rows
        Rows that were scored when the present runner began.
    seal
        The complete output, noted just before it is moved into place.
    restarted
        Whether a runner has begun: another one then continues, also with ``--restart``.
    outcome
        What it has made; known shortly before its end.
    """

    id: str
    order: FileOrder
    created: Seconds
    state: State = "waiting"
    reason: str = ""
    runner: str = ""
    started: Seconds | None = None
    ended: Seconds | None = None
    deaths: Count = 0
    rows: Count | None = None
    begun_rows: Count = 0
    progress: Progress = Progress()
    seal: Seal | None = None
    restarted: bool = False
    outcome: RunOutcome | None = None
    notice: Notice | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will happen to it, except its webhook."""
        return self.state in ENDED

    def end(self, state: State, reason: str = "") -> FileRun:
        """The run, ended now."""
        return self.model_copy(
            update={
                "state": state,
                "reason": reason[:MAX_REASON_CHARS],
                "ended": system.now(),
                "notice": Notice() if self.order.webhook else None,
            }
        )

    def changed(self, **changes: object) -> FileRun:
        """The run with other values of some fields."""
        return self.model_copy(update=changes)


def new_file_run(order: FileOrder, run_id: str | None = None) -> FileRun:
    """A run that waits for a runner; `run_id` is that of a job enqueued by its name."""
    return FileRun(id=run_id or new_file_run_id(), order=order, created=system.now())


def new_file_run_id() -> str:
    """A new id."""
    return _MARK + system.unique_id()
