"""The stages of a worker: claimed work goes in, a thread scores it, another one answers for it.

While a batch is in the forward, the worker's main thread claims, fetches and tokenizes the next
chunks, and finished ones are written back: the forward waits for none of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from workers import metrics
from workers.engine.engine import Engine, Flight, Part, Work
from workers.engine.rows import WaitingRows

SMALL = 256
"""Pairs. Smaller chunks (requests) have a lane of their own, beside that of larger ones."""

_WAIT_SECONDS = 5

FIRST_BATCH_SECONDS = 900
"""A first batch that takes longer than this, compilation and all, never ends."""

LATER_BATCH_SECONDS = 300
"""Nor does a later one that takes longer than this and than a hundred times the slowest before it."""

Answer = Callable[[], None]

logger = logging.getLogger(__name__)


@dataclass
class _Lane:
    """Work of one engine and one size class; lanes take turns, a batch each."""

    engine: Engine
    pool: WaitingRows[Work] = field(default_factory=WaitingRows)


class Pipeline:
    """Scores work of several chunks at once and answers each as soon as its last row is scored.

    A request of up to `SMALL` pairs waits for the batch in progress, and then for one batch of
    larger chunks before each batch of requests, however much of those has been claimed.

    Parameters
    ----------
    batch_wait
        Seconds to wait for more when there is less than a batch of work and nothing runs.
    """

    def __init__(self, batch_wait: float) -> None:
        self._batch_wait = batch_wait
        self._changed = threading.Condition()
        self._lanes: OrderedDict[tuple[int, bool], _Lane] = OrderedDict()
        self._answers: dict[Work, Answer] = {}
        self._pending = 0
        self._closed = False
        self._batch_since: float | None = None
        self._slowest_batch: float | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._forward = threading.Thread(target=self._guard(self._run), name="forward", daemon=True)
        self._forward.start()

    def put(self, engine: Engine, work: Work, answer: Answer) -> None:
        """Let `engine` score `work`, and call `answer`, in the writing thread, when it is done."""
        if not work.left:
            self.answer(answer)
            return
        with self._changed:
            key = id(engine), len(work.rows) <= SMALL
            lane = self._lanes.setdefault(key, _Lane(engine))
            engine.queue(work, lane.pool)
            self._answers[work] = answer
            self._pending += work.left
            self._changed.notify_all()

    def drop(self, work: Work, answer: Answer) -> None:
        """Score no more of `work`, and call `answer` instead, unless all of it is in the forward already."""
        with self._changed:
            for key, lane in list(self._lanes.items()):
                dropped = lane.pool.remove(work)
                if not lane.pool.batches:
                    del self._lanes[key]
                if dropped:
                    self._pending -= dropped
                    del self._answers[work]
                    self.answer(answer)
                    self._changed.notify_all()
                    return

    def answer(self, answer: Answer) -> None:
        """Call `answer` in the writing thread, after those before it."""
        self._writer.submit(self._guard(answer))

    def wait_for_room(self, most: int, seconds: float) -> bool:
        """Wait until fewer than `most` rows are pending; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending < most, seconds)

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until all is scored and answered; whether that is so."""
        idle = self.wait_for_room(1, seconds)
        if idle:
            self._writer.submit(lambda: None).result()  # comes after all answers
        return idle

    @property
    def pending(self) -> int:
        """Pairs that are not scored yet."""
        return self._pending

    @property
    def working(self) -> bool:
        """Whether a batch is in the forward."""
        return self._batch_since is not None

    def wedged(self) -> bool:
        """Whether the batch in the forward has been there for so long that it will never end."""
        since, slowest = self._batch_since, self._slowest_batch
        if since is None:
            return False
        limit = FIRST_BATCH_SECONDS if slowest is None else max(LATER_BATCH_SECONDS, 100 * slowest)
        return time.monotonic() - since > limit

    def close(self, finish: bool) -> None:
        """Stop: after all work if `finish`, else after the batch in progress. Answers are written first."""
        with self._changed:
            self._closed = True
            if not finish:
                self._lanes.clear()
            self._changed.notify_all()
        self._forward.join()
        self._writer.shutdown()

    def _run(self) -> None:
        """The forward thread: batch after batch, with as many begun as the device likes."""
        flights: deque[tuple[Engine, Flight]] = deque()
        while True:
            batch = self._take(wait=not flights)
            if batch is None and not flights:
                return
            if batch is not None:
                engine, parts = batch
                self._batch_since = self._batch_since or time.monotonic()
                flights.append((engine, engine.submit(parts)))
            if batch is None or len(flights) >= engine.model.backend.depth:
                engine, flight = flights.popleft()
                seconds = self._finish(engine, flight, last=not flights)
                if engine.may_adapt(flight, seconds):
                    while flights:
                        self._finish(*flights.popleft(), last=not flights)
                    self._batch_since = time.monotonic()
                    engine.adapt(flight)
                    self._batch_since = None

    def _take(self, wait: bool) -> tuple[Engine, list[Part]] | None:
        """The next batch of the lane whose turn it is; ``None`` if there is none, or never will be."""
        with self._changed:
            if wait:
                self._wait_for_work()
            if not self._lanes:
                return None
            key, lane = self._lanes.popitem(last=False)
            parts = lane.pool.take()
            if lane.pool.batches:
                self._lanes[key] = lane
            return lane.engine, parts

    def _wait_for_work(self) -> None:
        waiting = True
        while waiting:
            with metrics.stage("wait"):  # in pieces, so that a long wait is seen while it lasts
                waiting = not self._changed.wait_for(lambda: self._lanes or self._closed, _WAIT_SECONDS)
                if not waiting:
                    self._wait_for_a_full_batch()

    def _wait_for_a_full_batch(self) -> None:
        deadline = time.monotonic() + self._batch_wait
        while not self._closed and all(lane.pool.batches < 2 for lane in self._lanes.values()):
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return

    def _finish(self, engine: Engine, flight: Flight, last: bool) -> float:
        """Answer for what is complete with a batch; the seconds since the one before, or since it began."""
        complete = engine.finish(flight)
        now = time.monotonic()
        seconds = now - (self._batch_since or now)
        metrics.stage_seconds.labels("forward").observe(seconds)
        self._slowest_batch = max(self._slowest_batch or 0.0, seconds)
        self._batch_since = None if last else now
        with self._changed:
            self._pending -= sum(len(rows) for _, rows in flight.parts)
            for work in complete:
                self.answer(self._answers.pop(work))
            self._changed.notify_all()
        return seconds

    def _guard(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run`, or end the process: its leases lapse and its work is done by another."""

        def guarded() -> None:
            try:
                run()
            except BaseException:
                logger.critical("the worker cannot go on, its work moves to another", exc_info=True)
                logging.shutdown()
                os._exit(1)

        return guarded
