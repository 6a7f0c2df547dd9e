"""Time limits for what a worker's main thread does with a model's files and with rows."""

from __future__ import annotations

import signal
from typing import Any, ClassVar, NoReturn

from rq.timeouts import JobTimeoutException, UnixSignalDeathPenalty

from rankmill.jobs.system import system

_GRACE_SECONDS = 60.0
"""Seconds after a limit until a call that does not react to the signal counts as hanging; it runs in C."""


JobTimeout = JobTimeoutException
"""RQ's exception for a job that took too long."""


class TooLong(BaseException):
    """A time limit is over. It is not an `Exception`, so that no ``except Exception`` catches it."""


class DeathPenalty(UnixSignalDeathPenalty):
    """RQ's alarm, which may be nested in another one; it raises `TooLong` in the main thread."""

    _waiting: ClassVar[list[DeathPenalty]] = []

    def __init__(self, timeout: float, exception: type[BaseException] = TooLong, **_: Any) -> None:
        super().__init__(max(int(timeout), 1), exception)  # type: ignore[no-untyped-call]

    def setup_death_penalty(self) -> None:
        """See `BaseDeathPenalty`."""
        self._before, self._left = signal.getsignal(signal.SIGALRM), signal.alarm(0)
        self._began = system.monotonic()
        self._waiting.append(self)
        super().setup_death_penalty()  # type: ignore[no-untyped-call]

    def handle_death_penalty(self, signum: int, frame: object) -> NoReturn:
        """See `UnixSignalDeathPenalty`."""
        self._forget()
        raise self._exception

    def cancel_death_penalty(self) -> None:
        """See `BaseDeathPenalty`; an enclosing alarm continues."""
        super().cancel_death_penalty()  # type: ignore[no-untyped-call]
        self._forget()
        if self._left:
            signal.signal(signal.SIGALRM, self._before)
            signal.alarm(max(int(self._left - (system.monotonic() - self._began)), 1))

    def _forget(self) -> None:
        if self in self._waiting:
            self._waiting.remove(self)

    @classmethod
    def is_overdue(cls) -> bool:
        """Whether a limit is over and the main thread does not react, so that it never will; other threads
        ask this.
        """
        now = system.monotonic()
        return any(now - each._began > each._timeout + _GRACE_SECONDS for each in list(cls._waiting))
