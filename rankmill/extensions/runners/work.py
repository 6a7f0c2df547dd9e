"""Carries out one submitted run like score-file. A `RunnerError` means that another runner may succeed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from rankmill.extensions.runners.orders import kind_of
from rankmill.extensions.runners.record import FileRun, Seal
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.jobs.contract.errors import (
    ConnectionFailed,
    InputError,
    OutputBusy,
    OutputError,
    RankmillError,
    RedisUnavailable,
    RunnerError,
    StoreError,
)
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.file_run import RunOutcome
from rankmill.jobs.contract.home import expanded
from rankmill.jobs.contract.priority import NOBODY
from rankmill.jobs.contract.prompts import check_text
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.stores.output_record import OutputRecord
from rankmill.producer.files.stores.paths import AnyPath, as_path, resolved
from rankmill.producer.files.stores.roots import confined
from rankmill.producer.files.stores.writing import identity
from rankmill.producer.files.workspace import clear_workspace
from rankmill.score.input import find_input
from rankmill.score.output import find_target
from rankmill.score.progress import Show
from rankmill.score.score_file import Confirm, drop_last_run, score_file

logger = logging.getLogger(__name__)

Note = Callable[..., None]
"""A function to call with changed fields of a run's record. With ``now``, the function also writes the record
to Redis immediately, and raises an error if the runner must leave the run.
"""


def work_on(run: FileRun, settings: Settings, note: Note) -> None:
    """Carry out the order of `run`; `note` is called with each change of the run's record.

    Raises
    ------
    RunnerError
        This runner cannot score the files, but another may.
    OutputBusy
        Another process is making the output now.
    RedisUnavailable
        Redis could not serve within the longest time that a command waits for it.
    RankmillError
        No runner can score the files.
    """
    order = run.order
    own = {name: value for name in ("queue", "chunk_size") if (value := getattr(order, name)) is not None}
    tenant = {"tenant": order.tenant or NOBODY.name, "weight": order.weight or NOBODY.weight}
    options = settings.model_copy(update={**order.spec.model_dump(), **own, **tenant})

    @contextmanager
    def view(total: int) -> Iterator[Show]:
        note(rows=total, restarted=True, now=True)
        begun_rows = run.begun_rows

        def show(progress: Progress, workers: int, doing: str) -> None:
            nonlocal begun_rows  # fewer, if the last runner's rows are on another host
            begun_rows = min(begun_rows, progress.rows)
            note(progress=progress, begun_rows=begun_rows)

        yield show

    def score(
        request: FileRequest,
        confirm: Confirm,
        tokens_column: str | None = None,
        step_made: Callable[[], bool] = lambda: False,
    ) -> None:
        # The last runner was perhaps not dead but slow, and may have made the output since.
        def is_made() -> bool:
            return step_made() or made(run) is not None

        score_file(request, options, view=view, confirm=confirm, tokens_column=tokens_column, made=is_made)

    def keep(outcome: RunOutcome, file: AnyPath | None = None, path: AnyPath | None = None) -> None:
        seal = Seal(path=str(resolved(path)), identity=identity(file, path)) if file and path else None
        note(seal=seal, outcome=outcome, now=True)
        if seal and confined():
            record = OutputRecord(as_path(order.request.output or ""))
            told = outcome.model_dump_json(include={*RunOutcome.model_fields})  # a `Summary` has more fields
            record.seal(_name_of(run), seal.model_dump_json(), told)

    try:
        _check_order(run)
        _check_here(order, settings)
        kind = kind_of(order)
        if kind is None:
            request = order.request.model_copy(
                update={"restart": order.request.restart and not run.restarted}
            )
            score(
                request, lambda output, made: keep(made, *((output.partial, output.path) if output else ()))
            )
            return
        kind.carry_out(run, settings, score, keep)
        note(now=True)  # fails if another runner has taken over: do not delete its intermediate files
        clear(run)
    except (OutputBusy, RedisUnavailable, ConnectionFailed):
        raise
    except (OutputError, StoreError, OSError, MemoryError, pa.ArrowException) as error:
        raise RunnerError(" ".join(f"{type(error).__name__}: {error}".split())) from None


def made(run: FileRun) -> FileRun | None:
    """If the run's output is complete, return the run with its outcome, else ``None``.

    A run whose output is complete may lack its outcome: its last runner may have been stopped just after
    moving the output, or the server may have lost the outcome.
    """
    if _is_in_place(run):
        return run
    sealed = _sealed(run)
    return sealed if sealed is not run and _is_in_place(sealed) else None


def _sealed(run: FileRun) -> FileRun:
    """Return the run with the outcome and seal that the output's record has for this run.

    If the record cannot be read, or has none, `run` itself is returned.
    """
    try:
        place = as_path(run.order.request.output or "")
        if roots := confined():
            roots.check(place, "write")
        seal, outcome = OutputRecord(place).sealed(_name_of(run))
        sealed = Seal.model_validate_json(seal), RunOutcome.model_validate_json(outcome)
    except (RankmillError, OSError, ValueError):
        return run
    return run.changed(seal=sealed[0], outcome=sealed[1])


def _name_of(run: FileRun) -> str:
    """Name a run in its output's record, by its id and its time: plain RQ may use an id again."""
    return f"{run.id} {run.created}"


def _is_in_place(run: FileRun) -> bool:
    """Return whether the run's output is in place, and is the file that its runner made."""
    if not run.seal or not run.outcome:
        return False
    try:
        output = as_path(run.seal.path)
        if roots := confined():  # the path may be forged: others can write the record in Redis
            roots.check(output, "write")
        return output.exists() and identity(output, output) == run.seal.identity
    except (RankmillError, OSError, ValueError):
        return False


def drop(run: FileRun, settings: Settings) -> None:
    """Delete what the scoring of an ended run left in Redis.

    The run's folder stays, with the rows that are scored, so that the run continues if it is submitted again.
    If the folder cannot be read, nothing is deleted, and the data in Redis expire by themselves.
    """
    request = run.order.request
    try:
        _check_order(run)
        kind = kind_of(run.order)
        place = (kind and kind.place(run.order)) or find_target(request, ()).place()
        if roots := confined():
            roots.check(place.path, "write")
        with closing(client_for(settings.redis_url or "", settings.redis_wait_seconds)) as client:
            drop_last_run(place, len(run.order.models), RunStore(client))
    except RedisUnavailable:
        raise
    except (RankmillError, OSError, ValueError) as error:
        logger.warning("what another runner has begun is not deleted: %s", error)


def clear(run: FileRun) -> None:
    """Delete the intermediate files of a run whose output is complete, even those of a dead runner."""
    with suppress(RankmillError, OSError):
        _check_order(run)  # the order may be forged: others can write the record in Redis
        clear_workspace(find_target(run.order.request, ()).place())
        if kind := kind_of(run.order):
            kind.clear(run.order)


def _check_order(run: FileRun) -> None:
    """Check the names of all files in the order, before any is read.

    Raises
    ------
    InputError
        No runner can do what the order asks for.
    RunnerError
        The order names a file outside of this runner's roots, or needs an extension that this runner lacks.
    """
    order, request = run.order, run.order.request
    if request.relative_path:
        raise InputError(f"{request.relative_path}: not absolute; runners have working folders of their own")
    check_text(order.spec.prompt_template)
    if kind := kind_of(order):
        kind.check(run)
    roots = confined()
    if roots is None:
        return
    for name in request.read_names:
        roots.check_name(name, "read")
    for model in order.models:
        place = expanded(model)
        if model.startswith("~") or place.is_absolute() or ".." in place.parts or place.is_dir():
            roots.check(place, "read")
    if request.output:
        roots.check(as_path(request.output), "write")


def _check_here(order: FileOrder, settings: Settings) -> None:
    """Raise `RunnerError` if this host lacks a file or folder that the order names, or if this runner may not
    send the order's webhook.
    """
    request = order.request
    try:
        source = find_input(request.at_home())
        if roots := confined():
            for file in source.files:
                roots.check(file.path, "read")
    except InputError as error:
        raise RunnerError(str(error)) from None
    folder = Path(request.output or "").parent
    if "://" in str(request.output):
        pass  # score-file itself reports where it cannot write
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RunnerError(f"{folder}: no directory that this runner can write the output to")
    for model in order.models:
        if Path(model).is_absolute() and not Path(model).is_dir():
            raise RunnerError(f"{model}: no such model directory on this runner's host")
    if not order.webhook:
        return
    host, own = urlsplit(order.webhook).hostname, settings.of(RunnerSettings)
    if host not in own.webhook_hosts:
        raise RunnerError(f"webhook: webhook_hosts of this runner does not list {host}")
    if not own.webhook_secret:
        raise RunnerError("webhook: this runner has no webhook_secret to sign it with")
