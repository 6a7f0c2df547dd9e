"""Every error rankmill raises on purpose.

The message of each is one line for a person: what is wrong, where, and the way out.
Commands print it as it is, never with a traceback, and end with the exit code of its class.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from typing import ClassVar, Literal

from rankmill.jobs.contract.shown import shown


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    FAILED = 1
    """The command failed while it ran, or no server answers; the same command may work later."""
    USAGE = 2
    """The command line, the settings or the input must be changed; nothing was done."""
    ROW_ERRORS = 3
    """Done, but some rows have no score."""
    INTERRUPTED = 130
    """Ended by Ctrl-C or SIGTERM."""


class Fault(Enum):
    """Who caused a chunk to get no scores; it decides what happens to the chunk."""

    ATTEMPT = "attempt"
    """The attempt's, or unknown: the chunk is tried again, as often as its run allows. If it fails each
    time, its producer splits it until the faulty row is alone."""
    WORKER = "worker"
    """The worker's or its host's: another worker scores it, unless all live ones refuse."""
    JOB = "job"
    """The job's or its payload's, which cannot be read: it is set aside, and submitted again."""
    RUN = "run"
    """The run's: no worker could score it, so it ends."""


RowFault = Literal["null", "tokenizer", "too_long", "model", "not_a_number"]
"""Why a row has an error instead of a score, while its neighbours have scores: a text is null, the tokenizer
fails, the pair is too long and must not be cut, the model fails, or its output is not a number."""


class RankmillError(Exception):
    """Base of all expected errors.

    ``fault`` tells a worker what to do if it occurs while a chunk is scored. As text it has no character that
    a terminal acts on: files of models, and names, come from anywhere.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    fault: ClassVar[Fault] = Fault.ATTEMPT

    def __str__(self) -> str:
        return shown(super().__str__())


class ConfigError(RankmillError):
    """A setting is unknown, or its value is not allowed."""

    exit_code = ExitCode.USAGE


class InputError(RankmillError):
    """The input, or an option that describes it, cannot be used; nothing was scored."""

    exit_code = ExitCode.USAGE


class OutputBusy(InputError):
    """Another process is making the same output."""


class InputChanged(RankmillError):
    """The input has changed since its scoring began, so no output can be made from it."""


class OutputError(RankmillError):
    """The output, or the working folder beside it, cannot be written."""


class StoreError(RankmillError):
    """An object store refuses, or did not serve for the longest time that a command waits."""


class ConnectionFailed(RankmillError):
    """No Redis or Valkey server answers at the given URL."""


class RedisUnavailable(RankmillError):
    """The server could not serve for the longest time that a command waits."""


class RedisFailed(RankmillError):
    """The server refused a command, for a reason that does not go away by waiting."""


class ValueRefused(RedisFailed):
    """The server, or a proxy before it, takes no value as large as one of a run."""

    fault = Fault.RUN


class WireError(RankmillError):
    """Data from Redis is damaged, over a limit, or of another format than this release reads."""


class FormatError(WireError):
    """Data from Redis have another format; processes of the release that wrote them can read them."""

    fault = Fault.WORKER


class SpecError(RankmillError):
    """The model cannot be loaded or run here as the spec asks; this worker leaves the run to others.

    Parameters
    ----------
    message
        What is wrong.
    option
        Name of the spec's field that does not fit the model, on whatever worker; ``None``: another reason.
    """

    fault = Fault.WORKER

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class WorkerError(SpecError):
    """It is this worker or its host that cannot score a chunk; it leaves all runs of the model to others."""


class WrongWorkerError(RankmillError):
    """A job reached an RQ worker that is not a ScoringWorker."""


class ForeignJobError(RankmillError):
    """A job on a scoring queue names a function that does not score."""


class RunFailed(RankmillError):
    """A run cannot be completed.

    Parameters
    ----------
    message
        Why.
    option
        As of `SpecError`.
    """

    fault = Fault.RUN

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class WrongScores(RunFailed):
    """A worker that has scored rows of a run computes wrong scores: its device, or a tokenizer library."""


class RunnerError(RankmillError):
    """One runner cannot score the files of a submitted run, but another may: the run goes back."""

    fault = Fault.WORKER


class RunExpired(InputError):
    """There is no such run, or its results are no longer kept."""


_TOO_LONG = re.compile(r"the .+ has ([\d,]+) tokens, and ([\d,]+) are taken: shorten it")


def too_long(what: str, tokens: int, most: int) -> str:
    """Why a row of so many tokens has no score: `most` is the limit. `what` names the row, such as a pair."""
    return f"the {what} has {tokens:,} tokens, and {most:,} are taken: shorten it"


def read_too_long(reason: str) -> tuple[int, int] | None:
    """The numbers of a reason that `too_long` gave; ``None`` if it is another reason."""
    found = _TOO_LONG.fullmatch(reason)
    return (int(found[1].replace(",", "")), int(found[2].replace(",", ""))) if found else None


class StillWaiting(RankmillError):
    """The wait for a run's scores has ended without all of them, and the run goes on.

    Parameters
    ----------
    reason
        Why the wait has ended.
    then
        What has become of the run.
    """

    def __init__(self, reason: str, then: str = "the run goes on: ask again, or cancel it") -> None:
        super().__init__(f"{reason}; {then}")
        self._reason = reason

    def of_a_cancelled_run(self) -> StillWaiting:
        """The same error of a run that was cancelled then."""
        return type(self)(self._reason, "the run is cancelled")


class RunTimeout(StillWaiting, TimeoutError):
    """Not all scores came in time."""


class NoWorkers(StillWaiting):
    """There is no worker that could do it, and none has come while the client waited for one."""


class RunCancelled(RankmillError):
    """The run was cancelled; it has no further scores."""


class NotInRegistry(InputError):
    """The registry of models has no such version or alias."""


class RegistryConflict(InputError):
    """A change conflicts with the present contents of a registry, or with their use."""


class RegistryError(RankmillError):
    """Contents of a registry of models are damaged or incomplete."""


class RegistryAway(RegistryError):
    """The registry of models cannot be reached, read or written."""


class EmbeddedError(RankmillError):
    """The embedded server or its workers could not be started or kept alive."""


def fault_of(error: BaseException) -> Fault:
    """Whose fault an error is; unknown for errors that rankmill has not raised."""
    return error.fault if isinstance(error, RankmillError) else Fault.ATTEMPT
