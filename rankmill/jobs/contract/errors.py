"""The errors that rankmill raises on purpose.

The message of each error is one line that says what is wrong, where, and what to do. Commands print the
message as it is, never with a traceback, and end with the exit code of the error's class.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from typing import ClassVar, Literal

from rankmill.jobs.contract.shown import shown


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    FAILED = 1
    """The command failed while it ran, or no server answered; the same command may work later."""
    USAGE = 2
    """The command line, the settings or the input must be changed."""
    ROW_ERRORS = 3
    """The command has finished, but some rows have no score."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM ended the command."""


class Fault(Enum):
    """The cause of a chunk without scores; it decides what happens to the chunk."""

    ATTEMPT = "attempt"
    """The cause lies in this attempt, or is unknown: the chunk is tried again, as often as its run allows.

    If the worker died in the last attempt, the producer splits the chunk until the faulty row is alone.
    After any other last attempt, all rows of the chunk get the reason as their error.
    """
    WORKER = "worker"
    """The cause is the worker or its host: another worker scores the chunk, unless all live workers refuse
    the run.
    """
    JOB = "job"
    """The job or its payload cannot be read: the job is set aside, and the producer submits the chunk again.
    """
    RUN = "run"
    """The cause is the run: no worker could score it, so it ends."""


RowFault = Literal["null", "tokenizer", "too_long", "model", "not_a_number"]
"""Why a row has an error, while the rows beside it have scores.

- ``null``: a text is null.
- ``tokenizer``: the tokenizer fails.
- ``too_long``: a text or the row is too long, and must not be cut.
- ``model``: the model fails.
- ``not_a_number``: the model's output is not a number.
"""


class RankmillError(Exception):
    """Base of the errors that rankmill raises on purpose.

    ``fault`` tells a worker what to do if the error occurs while it scores a chunk. The error's text escapes
    every character that a terminal would act on, because names and models' files may come from anywhere.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    fault: ClassVar[Fault] = Fault.ATTEMPT

    def __str__(self) -> str:
        return shown(super().__str__())


class ConfigError(RankmillError):
    """A setting is unknown or has a value that is not allowed, or installed packages do not fit together."""

    exit_code = ExitCode.USAGE
    fault = Fault.WORKER


class InputError(RankmillError):
    """The input, an option or an argument cannot be used as given."""

    exit_code = ExitCode.USAGE


class OutputBusy(InputError):
    """Another process is writing the same output."""


class InputChanged(RankmillError):
    """The input has changed since its scoring began, so its output cannot be completed."""


class OutputError(RankmillError):
    """The output or its working folder cannot be written."""


class StoreError(RankmillError):
    """An object store refuses a request, or did not answer within the longest time that a command waits."""


class ConnectionFailed(RankmillError):
    """No Redis or Valkey server answers at the given URL, or the server there refuses this user."""


class RedisUnavailable(RankmillError):
    """The Redis server could not serve within the longest time that a command waits for it."""


class RedisFailed(RankmillError):
    """The Redis server refused a command for a reason that does not pass with time."""


class ValueRefused(RedisFailed):
    """The Redis server, or a proxy before it, refuses a value of the run, such as a chunk, because of its
    size.
    """

    fault = Fault.RUN


class WireError(RankmillError):
    """Data from Redis are damaged, exceed a limit, or have another format than this release reads."""


class FormatError(WireError):
    """Data from Redis are in the format of another release, which only processes of that release can read."""

    fault = Fault.WORKER


class SpecError(RankmillError):
    """The model cannot be loaded or run here as the spec asks; this worker leaves the run to other workers.

    Parameters
    ----------
    message
        What is wrong.
    option
        Name of the spec's field, if its value is wrong for the model on every worker; otherwise ``None``.
    """

    fault = Fault.WORKER

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class WorkerError(SpecError):
    """A worker or its host cannot score a chunk. The worker leaves all runs of the model to other workers."""


class WrongWorkerError(RankmillError):
    """A job reached an RQ worker that is not a ScoringWorker."""


class ForeignJobError(RankmillError):
    """A job on a scoring queue names a function that does not score."""


class RunFailed(RankmillError):
    """A run cannot be completed.

    Parameters
    ----------
    message
        Why the run cannot be completed.
    option
        Name of the spec's field, if its value is wrong for the model on every worker; otherwise ``None``.
    """

    fault = Fault.RUN

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class WrongScores(RunFailed):
    """A worker that scored rows of this run computes wrong scores.

    The cause is that worker's device or a tokenizer library.
    """


class RunnerError(RankmillError):
    """One runner, a process that scores submitted files, cannot score the files of a run. The run goes back
    to the queue for another runner.
    """

    fault = Fault.WORKER


class RunExpired(InputError):
    """The run does not exist, or its results are no longer kept."""


_TOO_LONG = re.compile(r"the .+ has ([\d,]+) tokens, and ([\d,]+) are taken: shorten it")


def too_long(row: str, tokens: int, most: int) -> str:
    """Return the error message of a row that has too many tokens.

    Parameters
    ----------
    row
        What to call the row, such as ``pair``.
    tokens, most
        The row's number of tokens, and the largest allowed number.
    """
    return f"the {row} has {tokens:,} tokens, and {most:,} are taken: shorten it"


def read_too_long(reason: str) -> tuple[int, int] | None:
    """Read a row's number of tokens, and the largest allowed number, from an error message of `too_long`.

    Return ``None`` for other messages.
    """
    match = _TOO_LONG.fullmatch(reason)
    return (int(match[1].replace(",", "")), int(match[2].replace(",", ""))) if match else None


class StillWaiting(RankmillError):
    """The wait for a run's scores ended before all of them came.

    Parameters
    ----------
    reason
        Why the wait has ended.
    then
        What happens to the run after the wait.
    """

    def __init__(self, reason: str, then: str = "the run goes on: ask again, or cancel it") -> None:
        super().__init__(f"{reason}; {then}")
        self._reason = reason

    def of_a_cancelled_run(self) -> StillWaiting:
        return type(self)(self._reason, "the run is cancelled")


class RunTimeout(StillWaiting, TimeoutError):
    """Not all scores came in time."""


class NoWorkers(StillWaiting):
    """No suitable worker listens on the run's queue. The client may have waited for one before it raised this
    error.
    """


class RunCancelled(RankmillError):
    """The run was cancelled, and gets no further scores."""


class NotInRegistry(InputError):
    """The registry of models does not have this version or alias."""


class RegistryConflict(InputError):
    """A change to a registry of models conflicts with its present contents, or with runs that use them."""


class RegistryError(RankmillError):
    """Contents of a registry of models are damaged or incomplete."""


class RegistryAway(RegistryError):
    """The registry of models cannot be reached, read or written."""


class EmbeddedError(RankmillError):
    """A Redis server or worker that rankmill starts on this host could not be started or kept alive.

    Rankmill starts a server and workers of its own if the user names no server.
    """


def fault_of(error: BaseException) -> Fault:
    """Return an error's `Fault`, which decides what happens to the chunk being scored.

    An error that rankmill did not raise is a `Fault.ATTEMPT`.
    """
    return error.fault if isinstance(error, RankmillError) else Fault.ATTEMPT
