"""The interface for kinds of orders. An order tells a runner what output to make.

The runner itself knows how to score files. Entry points of ``rankmill.orders`` add other kinds of orders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from rankmill.extensions.runners.record import FileRun
from rankmill.jobs.contract.errors import ConfigError, RunnerError
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.file_run import RunOutcome
from rankmill.jobs.runtime.settings import Settings
from rankmill.plugins import load
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.workspace import OutputFile
from rankmill.score.score_file import Confirm


class Score(Protocol):
    """A function that scores files like score-file. It stops if `step_made` says that another runner has made
    the scores.
    """

    def __call__(
        self,
        request: FileRequest,
        confirm: Confirm,
        tokens_column: str | None = None,
        step_made: Callable[[], bool] = lambda: False,
    ) -> None: ...


class Keep(Protocol):
    """A function that notes a run's outcome. If the output is complete, the call comes just before it is
    moved from `file` to `path`. An exception prevents the move.
    """

    def __call__(
        self, outcome: RunOutcome, file: Path | None = None, path: AnyPath | None = None
    ) -> None: ...


class OrderKind(Protocol):
    """How a runner checks, carries out and cleans up one kind of orders."""

    def check(self, run: FileRun) -> None:
        """Raise `InputError` if the order is not valid."""

    def carry_out(self, run: FileRun, settings: Settings, score: Score, keep: Keep) -> None:
        """Make the output of a run. If a runner dies at this, another runner calls `carry_out` again."""

    def why_failed(self, error: Exception, order: FileOrder) -> str:
        """Explain to the submitter of an order why it failed."""

    def place(self, order: FileOrder) -> OutputFile | None:
        """Return the file of scores from which the output is made, or ``None`` if the output itself has the
        scores.
        """

    def clear(self, order: FileOrder) -> None:
        """Delete the intermediate files of an order whose output is complete."""


def kind_of(order: FileOrder) -> OrderKind | None:
    """Return the object that carries out this kind of order, or ``None`` for an order to score files.

    Raises
    ------
    RunnerError
        This runner does not have the extension that carries out such orders.
    """
    if order.kind is None:
        return None
    try:
        return cast("OrderKind", load("rankmill.orders", order.kind))
    except (KeyError, ConfigError) as error:
        why = f" ({error})" if isinstance(error, ConfigError) else ""
        raise RunnerError(f"this runner has no extension for a {order.kind}{why}") from None
