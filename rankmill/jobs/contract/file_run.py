"""The state, progress and outcome of a run of files that other processes score for a caller."""

from __future__ import annotations

from typing import Literal, Self

from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.schema import Count, Seconds, WireModel
from rankmill.jobs.system import system

State = Literal["waiting", "running", "done", "failed", "cancelled"]

ENDED = frozenset({"done", "failed", "cancelled"})

_MAX_REASON_CHARS = 2000


class RunOutcome(WireModel):
    """The output of a run of files, its rows, and how they were scored."""

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


class FileRunState(WireModel):
    """The state of a run of files that other processes score, as its caller sees it.

    Attributes
    ----------
    reason
        Why the run failed, or why it waits again.
    rows
        Rows of the input; ``None`` until a process has opened it.
    outcome
        What the run has made; ``None`` until shortly before the run ends.
    """

    id: str
    order: FileOrder
    created: Seconds
    state: State = "waiting"
    reason: str = ""
    started: Seconds | None = None
    ended: Seconds | None = None
    rows: Count | None = None
    progress: Progress = Progress()
    outcome: RunOutcome | None = None

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    def end(self, state: State, reason: str = "") -> Self:
        return self.changed(state=state, reason=reason[:_MAX_REASON_CHARS], ended=system.now())

    def changed(self, **changes: object) -> Self:
        return self.model_copy(update=changes)
