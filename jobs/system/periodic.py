"""A thread that does something again and again, until it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rankmill.jobs.system import system

logger = logging.getLogger(__name__)


class Periodic:
    """Calls `do` every `seconds` in a thread of its own; the next one follows what it raises.

    An error that is raised again and again is logged once.

    Parameters
    ----------
    name
        The thread's name; also what failed, in the log.
    do
        What to call.
    seconds
        From the end of a call to the next.
    at_once
        Whether the first call comes at the start, and not after `seconds`.
    woken
        Set by others who want the next call now; default: only `wake` does.
    """

    def __init__(
        self,
        name: str,
        do: Callable[[], None],
        seconds: float,
        woken: threading.Event | None = None,
        *,
        at_once: bool = True,
    ) -> None:
        self._name, self._do, self._seconds = name, do, seconds
        self._at_once, self._stopped, self._failed = at_once, False, ""
        self._woken = woken or system.Event()
        self._thread = system.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the next call come now."""
        self._woken.set()

    def stop(self, seconds: float | None = 5.0) -> None:
        """Let no further call begin, and wait for the present one, at most `seconds` (``None``: any time)."""
        self._stopped = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout=seconds)

    def _run(self) -> None:
        if not self._at_once:
            self._wait()
        while not self._stopped:
            try:
                self._do()
                self._failed = ""
            except Exception as error:  # whatever it is: leases must be renewed, and others must be seen
                if repr(error) != self._failed:
                    logger.exception("%s failed, trying again", self._name)
                self._failed = repr(error)
            self._wait()

    def _wait(self) -> None:
        self._woken.wait(self._seconds)
        self._woken.clear()
