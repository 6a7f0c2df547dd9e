"""The bell of a queue: it wakes a worker that has room for requests only when one comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from rq import Queue

from jobs import keys

_SECONDS = 1
"""How long one command listens."""


class Bell:
    """Listens in a thread, and only while it is told to.

    A worker takes any job by waiting for it at the queue; one that is full of bulk work cannot, as it
    would get bulk work. Each request rings once, so it wakes one such worker.

    Parameters
    ----------
    queues
        The worker's queues.
    rung
        Called, from the thread, when a request has come.
    """

    def __init__(self, queues: Sequence[Queue], rung: Callable[[], None]) -> None:
        self._connection: Any = queues[0].connection
        self._keys = [keys.bell(queue.name) for queue in queues]
        self._rung = rung
        self._listening = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Begin to listen."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bell", daemon=True)
            self._thread.start()
        self._listening.set()

    def pause(self) -> None:
        """Listen no more, from the next second on."""
        self._listening.clear()

    def _run(self) -> None:
        while self._listening.wait():
            try:
                if self._connection.blpop(self._keys, _SECONDS):
                    self._rung()
            except redis.RedisError:  # the worker's own commands say so; it also looks every second
                time.sleep(_SECONDS)
