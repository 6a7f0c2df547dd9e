"""The interface for kinds of orders. An order tells a runner what output to make.

The runner itself knows how to score files. Entry points of ``rankmill.orders`` add other kinds of orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from rankmill.extensions.runners.record import FileRun
from rankmill.jobs.contract.errors import ConfigError, RunnerError
from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.runtime.settings import Settings
from rankmill.plugins import load
from rankmill.producer.files.workspace import OutputFile

Score = Callable[..., None]
"""A function that scores files like score-file. It gets a `FileRequest`, a `Confirm`, the name of a column
for numbers of tokens or ``None``, and a function that returns whether another runner has made the scores.
"""

Keep = Callable[..., None]
"""A function that records the `RunOutcome` of a run. If the output is complete, it also gets the finished
file and the path to which the file is moved next. An exception prevents the move.
"""


class OrderKind(Protocol):
    """Checks, carries out and cleans up the orders of one kind, for a runner."""

    def check(self, run: FileRun) -> None:
        """Raise `InputError` if the order is not valid."""

    def carry_out(self, run: FileRun, settings: Settings, score: Score, keep: Keep) -> None:
        """Make the output of a run. If the runner dies meanwhile, another runner calls `carry_out` again."""

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
