"""The work on one submitted run: what score-file does, and whose fault it is if it cannot be done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import pyarrow as pa

from jobs.errors import (
    ConnectionFailed,
    InputError,
    OutputBusy,
    OutputError,
    RedisUnavailable,
    RunnerError,
    StoreError,
)
from jobs.files.record import FileRun, Outcome, Seal
from jobs.files.request import FileOrder
from jobs.run import Progress
from jobs.runtime.settings import Settings
from producer.files.sink import ScoredFile
from producer.files.stores.paths import ObjectPath, as_path
from producer.files.stores.writing import identity
from rankmill.score_file import score_file
from rankmill.scoring.opening import find_input
from rankmill.scoring.request import Request
from rankmill.scoring.summary import Summary

Note = Callable[..., object]
"""Changes fields of the run's record; with ``now``, it is written before this returns, or an error raised."""


def work_on(run: FileRun, settings: Settings, note: Note) -> None:
    """Score the files of `run`; `note` is told of all that its record holds.

    Raises
    ------
    RunnerError
        This runner cannot, but another may.
    OutputBusy
        Another process is making the output now.
    RedisUnavailable
        The server could not serve for the longest time that a command waits.
    RankmillError
        No runner can.
    """
    order = run.order
    _check_here(order, settings)
    asked = order.request.model_copy(update={"restart": order.request.restart and not run.restarted})
    own = {"queue": order.queue, "chunk_size": order.chunk_size}
    given = {**order.spec.model_dump(), **{name: value for name, value in own.items() if value is not None}}

    def view(total: int, *, quiet: bool) -> _View:
        note(rows=total, restarted=True, now=True)
        return _View(note)

    def confirm(output: ScoredFile | None, summary: Summary) -> None:
        seal = output and Seal(
            path=str(output.path.resolve()), identity=_identity(output.partial, output.path)
        )
        note(seal=seal, outcome=_outcome(summary), now=True)

    try:
        score_file(
            Request.of(asked, quiet=True), settings.model_copy(update=given), view=view, confirm=confirm
        )
    except (OutputBusy, RedisUnavailable, ConnectionFailed):
        raise
    except (OutputError, StoreError, OSError, MemoryError, pa.ArrowException) as error:
        raise RunnerError(" ".join(f"{type(error).__name__}: {error}".split())) from None


def is_made(run: FileRun) -> bool:
    """Whether the output of `run` is in its place, and complete: its runner died, or left it, just after."""
    if not run.seal or not run.outcome:
        return False
    output = as_path(run.seal.path)
    return output.exists() and _identity(output, output) == run.seal.identity


class _View:
    """Writes the progress into the record."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def __enter__(self) -> _View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, progress: Progress, workers: int) -> None:
        self._note(progress=progress)


def _check_here(order: FileOrder, settings: Settings) -> None:
    """Raise `RunnerError` if this host lacks what the order names, or may not send its webhook."""
    request = order.request
    if request.relative_path:
        raise InputError(f"{request.relative_path}: not absolute; runners have working folders of their own")
    try:
        find_input(Request.of(request.at_home(), quiet=True))
    except InputError as error:
        raise RunnerError(str(error)) from None
    folder = Path(request.output or "").parent
    if "://" in str(request.output):
        pass  # score-file says what it can write to
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RunnerError(f"{folder}: no directory that this runner can write the output to")
    model = order.spec.model
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise RunnerError(f"{model}: no such model directory on this runner's host")
    if not order.webhook:
        return
    host = urlsplit(order.webhook).hostname
    if host not in settings.webhook_hosts:
        raise RunnerError(f"webhook: webhook_hosts of this runner does not list {host}")
    if not settings.webhook_secret:
        raise RunnerError("webhook: this runner has no webhook_secret to sign it with")


def _outcome(summary: Summary) -> Outcome:
    return Outcome(**{name: getattr(summary, name) for name in Outcome.model_fields})


def _identity(path: Path, output: Path) -> str:
    """What a file keeps when it becomes `output`, on any host that sees it."""
    return identity(path, in_store=isinstance(output, ObjectPath))
