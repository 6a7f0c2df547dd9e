"""The operating system as this package uses it: clocks, pauses, threads, chance, disks, processes.

Whatever decides when or in which order something happens is asked for here, by ``system.monotonic()`` and the
like. So one thread can drive the real code in virtual time, once it has put its own functions in their place.
Tasks need no such seam: their event loop is their clock.
"""

from __future__ import annotations

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


def _unique_id() -> str:
    return uuid.uuid4().hex


@dataclass
class System:
    """What processes ask of their host.

    Attributes
    ----------
    now, monotonic
        Seconds since 1970, which may jump; seconds since some time, which never go back.
    sleep
        Pauses the calling thread for some seconds.
    Thread, Event, Lock, RLock, Condition, Semaphore, Executor
        As `threading` and `concurrent.futures` have them.
    thread_id
        A number of the calling thread that no other has at the same time.
    uniform
        A random number between two.
    unique_id
        32 hexadecimal digits, unique.
    fsync
        Returns when what was written to a file descriptor is on the disk.
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
"""This process's host."""
