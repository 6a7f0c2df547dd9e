"""Every error rankmill raises on purpose.

The message of each is one line for a person: what is wrong, where, and the way out.
Commands print it as it is, never with a traceback, and end with the exit code of its class.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    FAILED = 1
    """Something went wrong on the way, or no server answers: the same command may work later."""
    USAGE = 2
    """The command line, the settings or the input must be changed; nothing was done."""
    ROW_ERRORS = 3
    """Done, but some rows have no score."""
    INTERRUPTED = 130
    """Ended by Ctrl-C or SIGTERM."""


class RankmillError(Exception):
    """Base of all expected errors."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class ConfigError(RankmillError):
    """A setting is unknown or has a value it cannot take."""

    exit_code = ExitCode.USAGE


class InputError(RankmillError):
    """The input, or an option that describes it, cannot be used; nothing was scored."""

    exit_code = ExitCode.USAGE


class InputChanged(RankmillError):
    """The input is not what it was when its scoring began, so that no output can be made of it."""


class OutputError(RankmillError):
    """The output, or what is kept beside it until it is there, cannot be written."""


class ConnectionFailed(RankmillError):
    """No Redis or Valkey server answers at the given URL."""


class RedisUnavailable(RankmillError):
    """The server could not serve for as long as was to be waited for it."""


class RedisFailed(RankmillError):
    """The server refused a command for a reason that waiting does not mend."""


class WireError(RankmillError):
    """A payload is not in a format this version reads, or is over its limits."""


class FormatError(WireError):
    """Another release has written it; a worker of that release can read it."""


class SpecError(RankmillError):
    """The model cannot be loaded or run as the spec asks; no retry would help."""


class WorkerError(SpecError):
    """One worker cannot score it, and another may: its chunks go back to the queue."""


class WrongWorkerError(RankmillError):
    """A job reached an RQ worker that is no ScoringWorker."""


class ForeignJobError(RankmillError):
    """A job on a scoring queue asks for another function than `jobs.score_chunk`."""


class RunFailed(RankmillError):
    """A run cannot be completed."""


class RunCancelled(RankmillError):
    """The run was cancelled; it has no further scores."""


class EmbeddedError(RankmillError):
    """The embedded server or its workers could not be started or kept alive."""
