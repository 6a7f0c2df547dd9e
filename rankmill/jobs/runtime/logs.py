"""Logs to standard error, as readable lines or as JSON. With JSON, all that Python code writes to standard
error is JSON.

`about` gets the ids of a run, chunk, job or worker. Every line that is logged in its ``with`` block, even by
a library, has these ids. So one id finds all lines about a chunk, those of its producer and of its worker.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.keys import parent_of
from rankmill.jobs.contract.shown import shown, shown_json
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.system import system

if TYPE_CHECKING:
    from rankmill.jobs.runtime.settings import LogFormat, LogLevel

OURS = "rankmill"

RQ = ("rq.worker", "rq.job")
"""Loggers to which RQ's command line gives handlers of their own."""

_ids: ContextVar[Mapping[str, str | int]] = ContextVar("ids", default={})  # noqa: B039 -- it is never changed


@contextmanager
def about(**ids: str | int) -> Iterator[None]:
    """Add `ids` (``run``, ``chunk``, ``job``, ``worker``) to all lines that this thread logs in the ``with``
    block.
    """
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


@contextmanager
def about_job(job_id: str) -> Iterator[None]:
    """Add the ids of a job, its run and its chunk to all that this thread logs in the ``with`` block."""
    run, chunk = keys.parse_job_id(job_id) or (None, None)
    ids = {"run": run, "chunk": None if chunk is None else parent_of(chunk), "job": job_id}
    with about(**{name: value for name, value in ids.items() if value is not None}):
        yield


def set_up(level: LogLevel, form: LogFormat, **ids: str | int) -> None:
    """Make this process log to standard error; every line has these `ids`, such as the worker's name.

    Of libraries, only warnings and errors are logged. With level ``debug``, RQ's other lines are logged too.
    """
    handler = _StandardError()
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(_Human() if human else _Json())
    if not human:
        write_json()
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


def write_json() -> None:
    """From now on, turn each line that Python code writes to `sys.stderr` into a line of JSON."""
    if not isinstance(sys.stderr, JsonLines):
        sys.stderr = JsonLines(sys.stderr)


def complain(line: str) -> None:
    """Write to standard error why a command fails, as plain text or as JSON."""
    if isinstance(sys.stderr, JsonLines):
        sys.stderr.add("error", line)
    else:
        print(line, file=sys.stderr)


class JsonLines(io.TextIOBase):
    """A standard error that turns each line into a line of JSON.

    A line that already is a JSON object stays as it is. If carriage returns have overwritten a line, only its
    last state is kept.

    Parameters
    ----------
    plain
        The stream to which the JSON is written.
    """

    encoding = "utf-8"

    def __init__(self, plain: TextIO) -> None:
        self.plain = plain
        self._begun: dict[int, str] = {}
        """By thread, the beginning of a line that the thread has not finished yet."""

    def write(self, text: str) -> int:
        thread = system.thread_id()
        *lines, rest = (self._begun.pop(thread, "") + text).split("\n")
        if rest:
            self._begun[thread] = rest
        for line in lines:
            if said := line.rstrip("\r").rpartition("\r")[2].strip():
                if _is_object(said):
                    self.plain.write(said + "\n")
                else:
                    self.add("info", said)
        return len(text)

    def add(self, level: str, message: str) -> None:
        record = logging.makeLogRecord({"name": "stderr", "levelname": level.upper(), "msg": message})
        self.plain.write(_Json().format(record) + "\n")
        self.plain.flush()

    def flush(self) -> None:
        self.plain.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        """Always false, even on a terminal, so that nobody draws a progress bar over the JSON."""
        return False

    def fileno(self) -> int:
        """Return the descriptor for child processes. What they write is not turned into JSON."""
        return self.plain.fileno()


def _is_object(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr.plain if isinstance(sys.stderr, JsonLines) else sys.stderr
            stream.write(self.format(record) + "\n")
            stream.flush()
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
    """Store `ids`, and the ids that `about` got, in the record. This must be done in the thread that logs the
    record, because no other thread knows the ids of `about`.
    """
    record.ids = {**ids, **_ids.get()}
    return True


def _ids_of(record: logging.LogRecord) -> dict[str, str | int]:
    ids: dict[str, str | int] = getattr(record, "ids", {})
    return ids
