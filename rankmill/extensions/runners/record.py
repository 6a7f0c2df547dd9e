"""The record of a submitted run: its state, which everybody may read and one process at a time writes."""

from __future__ import annotations

from typing import Literal, Self

from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.contract.file_run import FileRunState, State
from rankmill.jobs.contract.schema import Count, WireModel
from rankmill.jobs.system import system

_MARK = "s"
"""First letter of a submitted run's id; no hexadecimal digit, and no request's first letter."""


class Seal(WireModel):
    """A complete output file: where it belongs, and properties that it keeps when it is moved there."""

    path: str
    identity: str


class Notice(WireModel):
    """A webhook: whether it was delivered, or why not yet; ``attempts`` counts requests sent so far."""

    state: Literal["due", "delivered", "given up"] = "due"
    attempts: Count = 0
    reason: str = ""


class FileRun(FileRunState):
    """A submitted run, as runners keep it.

    Attributes
    ----------
    runner
        Name of the runner that has it, or had it last.
    deaths
        Runners that died in a row without scoring a row of it.
    begun_rows
        Rows that were scored when the present runner began.
    seal
        The complete output, noted just before it is moved into place.
    restarted
        Whether a runner has begun: another one then continues, also with ``--restart``.
    notice
        Its webhook, once it has ended.
    """

    runner: str = ""
    deaths: Count = 0
    begun_rows: Count = 0
    seal: Seal | None = None
    restarted: bool = False
    notice: Notice | None = None

    def end(self, state: State, reason: str = "") -> Self:
        """The run, ended now; its webhook is due."""
        return super().end(state, reason).changed(notice=Notice() if self.order.webhook else None)


def new_file_run(order: FileOrder, run_id: str | None = None) -> FileRun:
    """A run that waits for a runner; `run_id` is that of a job enqueued by its name."""
    return FileRun(id=run_id or new_file_run_id(), order=order, created=system.now())


def new_file_run_id() -> str:
    """A new id."""
    return _MARK + system.unique_id()
