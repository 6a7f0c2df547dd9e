"""The interface for kinds of orders. An order says which output a runner is to make. Runners can score files
by themselves; extensions add other kinds of orders by entry points of ``rankmill.orders``.
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
    """A function that scores files as score-file does, and asks `step_made` whether another runner has made
    the scores meanwhile.
    """

    def __call__(
        self,
        request: FileRequest,
        confirm: Confirm,
        tokens_column: str | None = None,
        step_made: Callable[[], bool] = lambda: False,
    ) -> None: ...


class Keep(Protocol):
    """A function that notes a run's outcome. For a complete output in `file`, the function is called just
    before `file` is moved to `path`. If the function raises an exception, `file` is not moved.
    """

    def __call__(
        self, outcome: RunOutcome, file: Path | None = None, path: AnyPath | None = None
    ) -> None: ...


class OrderKind(Protocol):
    """One kind of orders: how a runner checks orders of this kind, carries them out, and clears up."""

    def check(self, run: FileRun) -> None:
        """Raise `InputError` if the order is not valid."""

    def carry_out(self, run: FileRun, settings: Settings, score: Score, keep: Keep) -> None:
        """Make the output of a run. `carry_out` may be called again for the same run, if the run's last
        runner died at any point.
        """

    def why_failed(self, error: Exception, order: FileOrder) -> str:
        """Return the reason why an order has failed, in words for the one who submitted it."""

    def place(self, order: FileOrder) -> OutputFile | None:
        """Return the intermediate file of scores from which an order's output is made; ``None`` if the output
        itself has the scores.
        """

    def clear(self, order: FileOrder) -> None:
        """Delete the intermediate files of an order whose output is in its place."""


def kind_of(order: FileOrder) -> OrderKind | None:
    """Return the object that carries out orders of this order's kind; ``None`` for an order to score files.

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
