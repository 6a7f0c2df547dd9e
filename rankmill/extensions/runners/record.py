"""The record of a submitted run. Any process may read it; only the holder of the run writes it."""

from __future__ import annotations

from typing import Literal, Self

from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.contract.file_run import FileRunState, State
from rankmill.jobs.contract.schema import Count, WireModel
from rankmill.jobs.system import system

_MARK = "s"
"""First letter of a submitted run's id. Ids of other runs begin with other letters or digits."""


class Seal(WireModel):
    """Identifies a complete output file, before and after the file is moved to its final ``path``."""

    path: str
    identity: str


class Notice(WireModel):
    """The state of a run's webhook, the number of attempts to send it, and the reason why the last attempt
    failed.
    """

    state: Literal["due", "delivered", "given up"] = "due"
    attempts: Count = 0
    reason: str = ""


class FileRun(FileRunState):
    """A submitted run, as runners keep it.

    Attributes
    ----------
    runner
        Name of the runner that holds the run or has held it last.
    deaths
        Number of runners in a row that died without scoring a row.
    begun_rows
        Number of rows that were scored before the present runner began.
    seal
        Identifies the complete output file; recorded just before the file is moved into place.
    restarted
        Whether a runner has begun to score the rows. If true, the next runner continues the scoring, even if
        the order says ``--restart``.
    notice
        The state of the run's webhook, after the run has ended.
    """

    runner: str = ""
    deaths: Count = 0
    begun_rows: Count = 0
    seal: Seal | None = None
    restarted: bool = False
    notice: Notice | None = None

    def end(self, state: State, reason: str = "") -> Self:
        """Return a copy of the run that has ended now, with this `state`. If the order names a webhook, the
        webhook is due.
        """
        return super().end(state, reason).changed(notice=Notice() if self.order.webhook else None)


def new_file_run(order: FileOrder, run_id: str | None = None) -> FileRun:
    """Make a submitted run that waits for a runner. Its id is `run_id`, or a new id."""
    return FileRun(id=run_id or new_file_run_id(), order=order, created=system.now())


def new_file_run_id() -> str:
    """A new id for a submitted run."""
    return _MARK + system.unique_id()
