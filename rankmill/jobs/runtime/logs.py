"""Logs: readable lines on a terminal, JSON elsewhere.

Every line that is written within `about`, even by a library, has the ids of its run, chunk, job and worker.
So one id follows a chunk from its producer to its worker and back.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.keys import parent_of
from rankmill.jobs.contract.shown import shown, shown_json
from rankmill.jobs.runtime.passwords import mask_passwords

if TYPE_CHECKING:
    from rankmill.jobs.runtime.settings import LogFormat, LogLevel

OURS = "rankmill"
"""The logger above all of rankmill's."""

RQ = ("rq.worker", "rq.job")
"""Loggers to which RQ's command line gives handlers of their own."""

_ids: ContextVar[Mapping[str, str | int]] = ContextVar("ids", default={})  # noqa: B039  # is never changed


@contextmanager
def about(**ids: str | int) -> Iterator[None]:
    """Add `ids` (``run``, ``chunk``, ``job``, ``worker``) to every line that this thread logs inside."""
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


@contextmanager
def about_job(job_id: str) -> Iterator[None]:
    """Do as `about`, with the ids of a job, its run and its chunk."""
    run, chunk = keys.parse_job_id(job_id) or (None, None)
    ids = {"run": run, "chunk": None if chunk is None else parent_of(chunk), "job": job_id}
    with about(**{name: value for name, value in ids.items() if value is not None}):
        yield


def set_up(level: LogLevel, form: LogFormat, **ids: str | int) -> None:
    """Make this process log to standard error; every line has `ids`.

    Libraries log warnings and errors. RQ, which mostly repeats rankmill, logs more only at level ``debug``.
    """
    handler = _StandardError()
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(_Human() if human else _Json())
    handler.addFilter(lambda record: _note_ids(record, ids))
    chosen = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(chosen, logging.WARNING), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger(OURS).setLevel(chosen)
    for name in RQ:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.INFO if chosen <= logging.DEBUG else max(chosen, logging.WARNING))


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Human(logging.Formatter):
    """Formats a line such as ``12:30:05 warning what happened  run=0af chunk=7``."""

    def format(self, record: logging.LogRecord) -> str:
        ids = "".join(f" {name}={value}" for name, value in _ids_of(record).items())
        message = mask_passwords(" ".join(record.getMessage().splitlines()))
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {message}"
        parts = [line + (f" {ids}" if ids else "")]
        if record.exc_info:
            parts.append(mask_passwords(self.formatException(record.exc_info)))
        return shown("\n".join(parts))


class _Json(logging.Formatter):
    """Formats a line as JSON: time (UTC), level, logger, message, ids, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": mask_passwords(record.getMessage()),
            **_ids_of(record),
        }
        if record.exc_info:
            line["exception"] = mask_passwords(self.formatException(record.exc_info))
        return shown_json(json.dumps(line, ensure_ascii=False))


def _note_ids(record: logging.LogRecord, ids: Mapping[str, str | int]) -> bool:
    """Store the ids in the record, in the thread that logs it."""
    record.ids = {**ids, **_ids.get()}
    return True


def _ids_of(record: logging.LogRecord) -> dict[str, str | int]:
    found: dict[str, str | int] = getattr(record, "ids", {})
    return found
