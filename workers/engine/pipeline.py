"""The threads of a worker: one scores claimed work, another writes the results.

During a forward, the worker's main thread claims, fetches and tokenizes the next chunks, and the
writing thread writes finished ones. So the forward never waits for them.
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
"""Most pairs in a small chunk (a request). Small chunks have their own lane, beside that of larger ones."""

_WAIT_SECONDS = 5

FIRST_BATCH_SECONDS = 900
"""A worker's first batch (with compilation) counts as hanging after this time."""

LATER_BATCH_SECONDS = 300
"""A later batch counts as hanging after this time or 100 times the slowest batch, whichever is longer."""

Answer = Callable[[], None]

logger = logging.getLogger(__name__)


@dataclass
class _Lane:
    """Waiting rows of one engine and one size class; lanes take turns, one batch each."""

    engine: Engine
    rows: WaitingRows[Work] = field(default_factory=WaitingRows)


class Pipeline:
    """Scores work of several chunks at once, and answers each chunk when its last row is scored.

    A request of up to `SMALL` pairs waits for the batch in progress, and then for one batch of
    larger chunks before each batch of requests, no matter how many larger chunks are claimed.

    Parameters
    ----------
    batch_wait
        Seconds to wait for more rows when less than a full batch waits and no forward runs.
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
        """Score `work` with `engine`, then call `answer` in the writing thread."""
        if not work.left:
            self.answer(answer)
            return
        with self._changed:
            key = id(engine), len(work.rows) <= SMALL
            lane = self._lanes.setdefault(key, _Lane(engine))
            engine.queue(work, lane.rows)
            self._answers[work] = answer
            self._pending += work.left
            self._changed.notify_all()

    def drop(self, work: Work, answer: Answer) -> None:
        """Remove the waiting rows of `work` and call `answer` instead; has no effect if no row waits."""
        with self._changed:
            for key, lane in list(self._lanes.items()):
                dropped = lane.rows.remove(work)
                if not lane.rows.batches:
                    del self._lanes[key]
                if dropped:
                    self._pending -= dropped
                    del self._answers[work]
                    self.answer(answer)
                    self._changed.notify_all()
                    return

    def answer(self, answer: Answer) -> None:
        """Call `answer` in the writing thread, after all earlier answers."""
        self._writer.submit(self._guard(answer))

    def wait_for_room(self, most: int, seconds: float) -> bool:
        """Wait up to `seconds` until fewer than `most` rows are pending; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending < most, seconds)

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait up to `seconds` until all work is scored and answered; returns whether it is."""
        idle = self.wait_for_room(1, seconds)
        if idle:
            self._writer.submit(lambda: None).result()  # returns after all earlier answers
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
        """Whether the batch in the forward counts as hanging."""
        since, slowest = self._batch_since, self._slowest_batch
        if since is None:
            return False
        limit = FIRST_BATCH_SECONDS if slowest is None else max(LATER_BATCH_SECONDS, 100 * slowest)
        return time.monotonic() - since > limit

    def close(self, finish: bool) -> None:
        """Stop after all work if `finish`, else after the batch in progress; pending answers are written."""
        with self._changed:
            self._closed = True
            if not finish:
                self._lanes.clear()
            self._changed.notify_all()
        self._forward.join()
        self._writer.shutdown()

    def _run(self) -> None:
        """The forward thread: runs batches, with up to `Backend.depth` forwards in progress."""
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
        """Take the next batch, from the lane whose turn it is; ``None`` without one, or after `close`."""
        with self._changed:
            if wait:
                self._wait_for_work()
            if not self._lanes:
                return None
            key, lane = self._lanes.popitem(last=False)
            parts = lane.rows.take()
            if lane.rows.batches:
                self._lanes[key] = lane
            return lane.engine, parts

    def _wait_for_work(self) -> None:
        waiting = True
        while waiting:
            with metrics.stage("wait"):  # in steps, so that the metrics show a long wait while it lasts
                waiting = not self._changed.wait_for(lambda: self._lanes or self._closed, _WAIT_SECONDS)
                if not waiting:
                    self._wait_for_a_full_batch()

    def _wait_for_a_full_batch(self) -> None:
        deadline = time.monotonic() + self._batch_wait
        while not self._closed and all(lane.rows.batches < 2 for lane in self._lanes.values()):
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return

    def _finish(self, engine: Engine, flight: Flight, last: bool) -> float:
        """Finish a batch and answer the chunks that it completes.

        Returns the seconds since the batch before it ended, or since this one began if there was none.
        """
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
        """`run`, ending the process on any error: its leases expire, and another worker does its work."""

        def guarded() -> None:
            try:
                run()
            except BaseException:
                logger.critical("the worker ends after an error; other workers do its work", exc_info=True)
                logging.shutdown()
                os._exit(1)

        return guarded
