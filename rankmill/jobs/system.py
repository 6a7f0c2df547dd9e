"""The clocks, pauses, threads, randomness, disks and processes of the system, as this package uses them.

Code that decides when or in which order something happens calls `system`, such as ``system.monotonic()``. So
a simulation can replace these functions, and run the real code in virtual time in one thread. Asynchronous
tasks do not need `system`: their event loop is their clock.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

logger = logging.getLogger(__name__)


def _unique_id() -> str:
    return uuid.uuid4().hex


@dataclass
class System:
    """The functions and classes through which a process uses its host.

    Attributes
    ----------
    now, monotonic
        The time in seconds. ``now`` counts from 1970, and may jump. ``monotonic`` counts from an unspecified
        time, and never goes back.
    sleep
        Pauses the calling thread for some seconds.
    Thread, Event, Lock, RLock, Condition, Semaphore, Executor
        As `threading` and `concurrent.futures` have them; a ``Semaphore`` is bounded.
    thread_id
        A number for the calling thread. No other thread has this number at the same time.
    uniform
        A random number between two numbers.
    unique_id
        A unique text of 32 hexadecimal digits.
    fsync
        Waits until all that was written to a file descriptor is on the disk.
    Popen
        Starts a process.
    exit
        Ends this process at once, with an exit status.
    """

    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    Thread: type[threading.Thread] = threading.Thread
    Event: type[threading.Event] = threading.Event
    Lock: Callable[[], threading.Lock] = threading.Lock
    RLock: Callable[[], threading.RLock] = threading.RLock
    Condition: type[threading.Condition] = threading.Condition
    Semaphore: type[threading.BoundedSemaphore] = threading.BoundedSemaphore
    Executor: type[ThreadPoolExecutor] = ThreadPoolExecutor
    thread_id: Callable[[], int] = threading.get_ident
    uniform: Callable[[float, float], float] = random.uniform
    unique_id: Callable[[], str] = _unique_id
    fsync: Callable[[int], None] = os.fsync
    Popen: type[subprocess.Popen[bytes]] = subprocess.Popen
    exit: Callable[[int], NoReturn] = os._exit


system = System()


@dataclass(frozen=True)
class Backoff:
    """How long to pause after failures in a row.

    Attributes
    ----------
    first, longest
        Seconds of the first pause, and of the longest, before jitter.
    jitter
        A pause is up to this share longer or shorter, at random, so that callers do not all try again
        together.
    """

    first: float
    longest: float
    jitter: float = 0.0

    def pause(self, failures: int) -> float:
        """Seconds to pause after this many failures in a row, counted from 1.

        >>> [Backoff(0.5, 3.0).pause(failures) for failures in (1, 2, 3, 4, 5000)]
        [0.5, 1.0, 2.0, 3.0, 3.0]
        """
        pause = min(self.first * 2.0 ** min(failures - 1, 100), self.longest)
        return pause * system.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else pause


class Periodic:
    """Calls a function again and again in a thread, with pauses, and goes on after errors.

    An error that is raised again and again is logged only once.

    Parameters
    ----------
    name
        The thread's name, which the log also names if a call fails.
    do
        The function to call.
    seconds
        Seconds from the end of a call to the next one.
    at_once
        Whether the first call comes at the start instead of after `seconds`.
    woken
        An event that other code sets to make the next call at once. By default, only `wake` sets it.
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

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self, seconds: float | None = 5.0) -> None:
        """Begin no further call, and wait at most `seconds` for the present one (``None`` for any time)."""
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
            except Exception as error:
                # catch every error, because the next call must follow: leases must be renewed
                if repr(error) != self._failed:
                    logger.exception("%s failed, trying again", self._name)
                self._failed = repr(error)
            self._wait()

    def _wait(self) -> None:
        self._woken.wait(self._seconds)
        self._woken.clear()
