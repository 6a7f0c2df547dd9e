"""Runs a worker's threads that score claimed work and write the results.

During a forward, the worker's main thread claims, fetches and tokenizes the next chunks, and the writing
thread writes finished chunks. So forwards need not wait for these two threads.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.batches.planner import WaitingRows
from rankmill.workers.engine.engine import Engine, Flight, Part, ScoresChanged, tokens_in
from rankmill.workers.engine.work import Work
from rankmill.workers.host import metrics
from rankmill.workers.models.loading import Model

_WAIT_SECONDS = 5

_LOOK_SECONDS = 1
"""While a thread waits for all scores, it checks after this many seconds whether the worker must stop."""

_ENOUGH_BATCHES = 2

_ALERT_SECONDS = 10
"""For this many seconds after a request, only one forward is in progress, so that the next request waits
less.
"""

FIRST_BATCH_SECONDS = 900
"""Seconds after which a worker's first batch counts as hanging; this time may include compilation."""

LATER_BATCH_SECONDS = 300
"""A batch after a worker's first one counts as hanging under two conditions: it takes more than this many
seconds, and more than 100 times as long as the worker's slowest batch so far.
"""

REQUESTS_FOR_BULK = 3
"""While both requests and bulk work wait, this many pairs of requests are scored for each pair of bulk work.
"""

Answer = Callable[[], None]

logger = logging.getLogger(__name__)


class PriorityTurns:
    """Decides whether requests or bulk work are scored next.

    Requests come first until they have had more than `REQUESTS_FOR_BULK` pairs for each pair of bulk work.

    >>> turns = PriorityTurns()
    >>> turns.took("request", 20)
    >>> turns.bulk_is_next
    True
    >>> turns.took("bulk", 64)
    >>> turns.bulk_is_next
    False
    """

    def __init__(self) -> None:
        self._ahead = 0
        self._part = 0

    @property
    def bulk_is_next(self) -> bool:
        """Whether bulk work is scored before the next request, if any bulk work waits."""
        return self._ahead > 0

    def took(self, kind: str, pairs: int) -> None:
        """Record that a batch of requests or of bulk work was taken to be scored.

        The lead of requests over bulk work, or of bulk work over requests, is limited, so that neither kind
        later gets many batches in a row.

        Parameters
        ----------
        kind
            ``request`` or ``bulk``.
        pairs
            The batch's pairs.
        """
        if kind == "request":
            self._ahead = min(self._ahead + pairs, max(self._part, pairs))
        else:
            self._part = REQUESTS_FOR_BULK * pairs
            self._ahead = max(self._ahead - self._part, -self._part)

    def no_bulk_waits(self) -> None:
        """Forget that bulk work is owed a turn, because no bulk work waits."""
        self._ahead = min(self._ahead, 0)


@dataclass
class _Lane:
    """The waiting rows of one engine and one priority. Engines of a priority take turns, batch by batch."""

    engine: Engine
    priority: Priority
    rows: WaitingRows[Work] = field(default_factory=WaitingRows)


class Pipeline:
    """Scores the work of several chunks together, and answers each chunk when its last row is scored.

    Requests come before bulk work. But while both wait, a quarter of the pairs that are scored are bulk work.
    While requests keep coming, only one forward is in progress at a time, so that the next request waits for
    at most one forward.

    Parameters
    ----------
    batch_wait
        Before a forward, wait at most this many seconds for more rows. There is no wait while another forward
        is in progress, or if two batches of the same engine and priority wait.
    stopping
        Returns whether the worker must stop without scoring all work.
    """

    def __init__(self, batch_wait: float, stopping: Callable[[], bool] = lambda: False) -> None:
        self._batch_wait = batch_wait
        self._stopping = stopping
        self._changed = system.Condition()
        self._lanes: OrderedDict[tuple[int, Priority], _Lane] = OrderedDict()
        self._turns = PriorityTurns()
        self._answers: dict[Work, Answer] = {}
        self._pending: dict[Priority, int] = {"request": 0, "bulk": 0}
        self._alert_until = 0.0
        self._woken = False
        self._closed = False
        self.proven: Callable[[Model], None] = lambda model: None
        """Called with a model after its probes were scored again and had the right scores."""
        self.changed: Callable[[Model, str], None] = lambda model, figures: None
        """Called in the writing thread, with a model and figures, when the model turns out to have wrong
        scores. Nothing is scored afterwards.
        """
        self._batch_since: float | None = None
        self._slowest_batch: float | None = None
        self._flights: deque[tuple[_Lane, Flight]] = deque()
        self._forward: threading.Thread | None = None
        self._writer: ThreadPoolExecutor | None = None

    def start(self) -> Pipeline:
        """Start the threads that score and that write results, and return this pipeline.

        Without these threads, the caller of `step` scores batches and calls answers.
        """
        self._writer = system.Executor(1, thread_name_prefix="writer")
        self._forward = system.Thread(target=self._guard(self._run), name="forward", daemon=True)
        self._forward.start()
        return self

    def put(
        self, engine: Engine, work: Work, answer: Answer, priority: Priority = "bulk", *, whole: bool = False
    ) -> None:
        """Let `engine` score `work`. After the last row is scored, `answer` is called in the writing thread.

        With `whole`, each waiting work is cut into batches by itself, and only when few batches are left. So
        the first rows of `work` are scored later, and until then `withdraw` can remove `work`.
        """
        if not work.left:
            self.answer(answer)
            return
        with self._changed:
            lane = self._lanes.setdefault((id(engine), priority), _Lane(engine, priority))
            engine.queue(work, lane.rows, whole=whole)
            self._answers[work] = answer
            self._pending[priority] += work.left
            if priority == "request":
                self._alert_until = system.monotonic() + _ALERT_SECONDS
            self._changed.notify_all()

    def drop(self, work: Work, answer: Answer) -> None:
        """If any row of `work` still waits, stop scoring `work`, and call `answer` instead of the answer that
        `put` was given.
        """
        with self._changed:
            if self._remove(work):
                self.answer(answer)

    def withdraw(self, work: Work) -> bool:
        """Remove bulk `work` and never call its answer, if no row of `work` is scored or being scored.

        Returns whether the work was removed.
        """
        with self._changed:
            return work in self.unstarted() and self._remove(work)

    def unstarted(self) -> list[Work]:
        """Return the bulk work of which no row is scored or being scored, oldest first for each engine."""
        with self._changed:
            lanes = [lane.rows for lane in self._lanes.values() if lane.priority == "bulk"]
            return [work for rows in lanes for work in rows.whole()]

    def _remove(self, work: Work) -> bool:
        for key, lane in list(self._lanes.items()):
            if removed := lane.rows.remove(work):
                if not lane.rows.batches:
                    del self._lanes[key]
                self._pending[lane.priority] -= removed
                del self._answers[work]
                self._changed.notify_all()
                return True
        return False

    def answer(self, answer: Answer) -> None:
        """Call `answer` in the writing thread, after all earlier answers."""
        if self._writer:
            self._writer.submit(self._guard(answer))
        else:
            answer()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition` holds, and return whether it holds.

        The wait also ends after `seconds`, or by `wake`. The condition is checked whenever work is added,
        finished or removed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._woken or condition(), seconds)
            self._woken = False
            return condition()

    def wake(self) -> None:
        """End another thread's wait in `wait_for`, or its next wait if it does not wait now."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait up to `seconds` until all work is scored and answered, and return whether it is."""
        while self._forward is None and self.step(wait=False):
            pass
        idle = self.wait_for(lambda: not self.pending, seconds)
        if idle and self._writer:
            self._writer.submit(lambda: None).result()  # this runs after all earlier answers
        return idle

    def drain(self) -> None:
        """Wait until all work is scored and the `Answer` of each work was called, or until the worker must
        stop.
        """
        while not self._stopping() and not self.wait_until_idle(_LOOK_SECONDS):
            pass

    @property
    def pending(self) -> int:
        """The number of rows that are not scored yet; a window of a passage is a row."""
        return sum(self._pending.values())

    def pending_of(self, priority: Priority) -> int:
        return self._pending[priority]

    @property
    def hungry(self) -> bool:
        with self._changed:
            return sum(lane.rows.batches for lane in self._lanes.values()) < _ENOUGH_BATCHES

    def wedged(self) -> bool:
        """Return whether the oldest forward in progress has taken so long that it counts as hanging."""
        since, slowest = self._batch_since, self._slowest_batch
        if since is None:
            return False
        limit = FIRST_BATCH_SECONDS if slowest is None else max(LATER_BATCH_SECONDS, 100 * slowest)
        return system.monotonic() - since > limit

    def close(self, finish: bool) -> None:
        """Stop the threads, after all scored work is answered.

        Parameters
        ----------
        finish
            Whether to score all work first; otherwise only the batches in progress are finished.
        """
        with self._changed:
            self._closed = True
            if not finish:
                self._lanes.clear()
            self._changed.notify_all()
        if self._forward and self._writer:
            self._forward.join()
            self._writer.shutdown()

    def _run(self) -> None:
        try:
            while self.step():
                pass
        except ScoresChanged as error:
            # Call `changed` after all earlier answers, because each answer may add a run to those that may
            # have wrong scores.
            self.answer(partial(self.changed, error.model, str(error)))

    def step(self, *, wait: bool = True) -> bool:
        """Begin the forward of the next batch, or finish the oldest forward if none can begin.

        Returns whether something was done. With `wait`, an idle pipeline waits for work first.
        """
        batch = None if self._full() else self._take(wait=wait and not self._flights)
        if batch is not None:
            lane, parts = batch
            self._batch_since = self._batch_since or system.monotonic()
            self._flights.append((lane, lane.engine.submit(parts)))
        elif self._flights:
            self._finish_oldest()
        else:
            return False
        return True

    def _full(self) -> bool:
        if not self._flights:
            return False
        if system.monotonic() < self._alert_until:
            return True
        return len(self._flights) >= self._flights[-1][0].engine.model.backend.depth

    def _finish_oldest(self) -> None:
        lane, flight = self._flights.popleft()
        seconds = self._finish(lane, flight)
        with self._changed:
            adapts = lane.engine.see(flight, seconds)
        if adapts:
            while self._flights:
                self._finish(*self._flights.popleft())
            self._batch_since = system.monotonic()
            lane.engine.adapt(flight)
            self._batch_since = None

    def _take(self, wait: bool) -> tuple[_Lane, list[Part]] | None:
        """Take the next batch, or return ``None`` if none waits. With `wait`, wait for one until `close`."""
        with self._changed:
            if wait:
                self._wait_for_work()
            if not self._lanes:
                return None
            key = self._next_lane()
            lane = self._lanes.pop(key)
            parts = lane.rows.take()
            if lane.rows.batches:
                self._lanes[key] = lane
            self._turns.took(lane.priority, sum(len(rows) for _, rows in parts))
            return lane, parts

    def _next_lane(self) -> tuple[int, Priority]:
        """Return the key of the waiting rows that are scored next: their engine's number and their priority.

        The priority whose turn it is comes first. If no rows of that priority wait, the other priority comes
        first. Among several engines with rows of one priority, the engine that has waited longest is next.
        """
        first: dict[Priority, tuple[int, Priority]] = {}
        for key in self._lanes:
            first.setdefault(key[1], key)
        if "bulk" not in first:
            self._turns.no_bulk_waits()
        order: list[Priority] = ["bulk", "request"] if self._turns.bulk_is_next else ["request", "bulk"]
        return next(first[priority] for priority in order if priority in first)

    def _wait_for_work(self) -> None:
        waiting = True
        while waiting:
            # Wait in short steps, because the metrics show the time of a wait only after the wait has ended.
            with metrics.stage("wait"):
                waiting = not self._changed.wait_for(lambda: self._lanes or self._closed, _WAIT_SECONDS)
                if not waiting:
                    self._wait_for_a_full_batch()
                    waiting = not (self._lanes or self._closed)  # work may have been withdrawn meanwhile

    def _wait_for_a_full_batch(self) -> None:
        deadline = system.monotonic() + self._batch_wait
        while not self._closed and all(lane.rows.batches < 2 for lane in self._lanes.values()):
            seconds = deadline - system.monotonic()
            if seconds <= 0 or not self._changed.wait(seconds):
                return

    def _finish(self, lane: _Lane, flight: Flight) -> float:
        """Finish the forward of a batch, and answer the work whose last row is scored.

        Returns how long the batch took, not counting the time in which it waited for the previous batch.
        """
        complete = lane.engine.finish(flight)
        now = system.monotonic()
        seconds = now - (self._batch_since or now)
        metrics.stage_seconds.labels("forward").observe(seconds)
        self._slowest_batch = max(self._slowest_batch or 0.0, seconds)
        if lane.engine.must_prove:
            lane.engine.prove()  # if this raises, the batch's chunks are not answered
            self.proven(lane.engine.model)
        self._batch_since = system.monotonic() if self._flights else None
        tokens = max(tokens_in(flight.parts), 1)
        for work, rows in flight.parts:
            work.seconds["forward"] = work.seconds.get("forward", 0.0) + seconds
            share = seconds * tokens_in([(work, rows)]) / tokens
            work.seconds["device"] = work.seconds.get("device", 0.0) + share
        with self._changed:
            self._pending[lane.priority] -= sum(len(rows) for _, rows in flight.parts)
            for work in complete:
                self.answer(self._answers.pop(work))
            self._changed.notify_all()
        return seconds

    def _guard(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `run`, and ends the worker's process after any error, so that other
        workers get its jobs.
        """

        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                why = f" of its device ({error})" if isinstance(error, DeviceLost) else ""
                text = f"the worker ends after an error{why}; other workers do its work"
                logger.critical(text, exc_info=not why)
                logging.shutdown()
                system.exit(1)

        return guarded
