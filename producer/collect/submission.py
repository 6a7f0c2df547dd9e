"""A run on the producer's side: submit chunks within a window, collect their results, yield them in order."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import pyarrow as pa

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RedisUnavailable, RunCancelled, RunFailed, RunTimeout
from rankmill.jobs.contract.results import BadResult, ChunkResult, ChunkScores
from rankmill.jobs.contract.run import Progress, Run, Settled
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.scored_rows import read_scored_rows
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.producer.collect.agreed import Agreed
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.leftovers import Leftovers
from rankmill.producer.collect.listeners import Listeners
from rankmill.producer.collect.payloads import Encoder
from rankmill.producer.collect.reuse.earlier import EarlierScores
from rankmill.producer.collect.sizing import Sizes
from rankmill.producer.collect.splitting import ScoredTable, Unit
from rankmill.producer.collect.window import Window

_SWEEP_SECONDS = 10
"""After waiting so long for a chunk, check that the jobs of all chunks in Redis still exist."""

logger = logging.getLogger(__name__)


class Submission:
    """Submits the chunks of a run and yields its scored tables in input order.

    It works while the caller iterates `tables`: it submits chunks when the window has room, so Redis never
    holds more than the window allows. Finished chunks that wait for an earlier one are in memory or on disk.

    Parameters
    ----------
    store, run
        The server, and the run that `begin` stores there.
    leftovers
        Removes the run from Redis when it has ended.
    source, columns
        Tables to score, one chunk each, and the names of their query and passage columns.
    sizes
        How many chunks may be in Redis without a result, and how large the source cuts them.
    journal
        Stores each result before Redis deletes it. Chunks whose result it has are not submitted.
    reuse
        As of `Window`.
    """

    def __init__(
        self,
        store: RunStore,
        run: Run,
        leftovers: Leftovers,
        source: Iterator[pa.Table],
        columns: tuple[str, str],
        sizes: Sizes,
        journal: Journal | None = None,
        reuse: EarlierScores | None = None,
    ) -> None:
        self.run = run
        self.on_wait: Callable[[], None] = lambda: None
        """Called at least every second while waiting; an exception it raises ends the wait."""
        self.deadline = math.inf
        """When to stop waiting, in `time.monotonic` seconds."""
        self.listeners: Listeners | None = None
        self._store, self._leftovers, self._journal, self._sizes = store, leftovers, journal, sizes
        self._span = tracing.begin("run", run=run.id, model=run.spec.model, queue=run.queue)
        self._window = Window(run, source, sizes.window, journal, self._span, reuse)
        self._waits_since = self._collected = self._heard = time.monotonic()
        self._is_request = run.priority == "request" and journal is None
        self._new = self._is_request  # until the run is stored, together with its first chunks
        self._looked = self._heard if self._is_request else -math.inf
        self._entries: list[str] = []  # ids of what was collected of the stream and is still in Redis
        self._cancelled = False
        self._late = False  # whether the caller's time was over, when it was last looked at
        self._encoder = Encoder(columns, self._window.trace, times=self._is_request)
        self._agreed = Agreed(run.spec, journal.first if journal else None)

    def begin(self) -> None:
        """Store the run on the server, unless it is a request."""
        if not self._new:
            with self._at_redis():
                self._restore()
                self._store.note(self.run, self._window.notes.progress)
                self._look_at_workers()

    def tables(self) -> Iterator[ScoredTable]:
        """Yield every table of the source with its scores, in order.

        Raises
        ------
        RunFailed
            The run cannot be scored: for example, its model cannot be loaded.
        RunCancelled
            `cancel` was called, or another process cancelled the run.
        RedisUnavailable, RedisFailed
            The server could not serve during the whole allowed wait, or it refuses a command.
        RunTimeout, NoWorkers
            `deadline` has passed, or nobody listens; call again to go on.
        """
        window = self._window
        try:
            while not window.done:
                self.fill()
                if window.ready:
                    self._keep_up()
                    yield window.take()
                    self._waits_since = time.monotonic()
                elif not window.done:
                    self._wait()
        except (RunFailed, RunCancelled):
            window.close()
            raise
        window.close()
        self._leftovers.remove(self.run, [], answered=window.answered)
        self._span.end()
        with about(run=self.run.id):
            done = window.notes.progress
            logger.info("run complete: %d rows, %d without a score", done.rows, done.row_errors)

    @property
    def progress(self) -> Progress:
        """The rows done so far, those of unfinished chunks included."""
        return self._window.notes.progress

    def fill(self) -> None:
        """Submit some chunks if the window has room; between two such steps, results are collected."""
        self._check_cancelled()
        if self._window.wants_chunks() and (fresh := self._window.fill()):
            with self._at_redis():
                self._send(fresh)

    def cancel(self) -> None:
        """Cancel the run and remove its waiting chunks from the queue."""
        if not self._cancelled:
            self._span.add_event("cancelled")
            self._span.end()
        self._cancelled = True
        self._leftovers.remove(self.run, {*self._window.units, *self._window.answered}, hurry=self._late)

    def _wait(self) -> None:
        """Collect results, waiting a little for the first; a fatal failure ends the run."""
        self._look_around()
        with self._at_redis():
            if self.listeners and time.monotonic() - self._heard > self._store.patrol_seconds:
                self.listeners.check(self._heard)
            self._collect(0 if self._window.wants_chunks() else self._store.patrol_seconds)
            self._look_at_workers()
            if time.monotonic() - self._waits_since > _SWEEP_SECONDS:
                self._sweep()
                self._waits_since = time.monotonic()
        if self._window.fatal:
            self.cancel()
            raise RunFailed(self._window.fatal.message)

    def _keep_up(self) -> None:
        """Collect what is there now and then, while finished chunks are handed to the caller."""
        if self._window.units and time.monotonic() - self._collected > self._store.patrol_seconds:
            with self._at_redis():
                self._collect(0)
                self._look_at_workers()

    def _look_at_workers(self) -> None:
        """Note now and then what workers have scored of their chunks, and what they claim ahead."""
        now, window = time.monotonic(), self._window
        if now - self._looked < self._store.patrol_seconds:
            return
        self._looked = now
        with suppress(RedisUnavailable), waiting(most=0):  # other commands wait for the server
            if self._sizes.window.follows_workers:
                self._sizes.window.follow(self._store.capacity(self.run.queue), window.chunk_rows)
            if window.see(read_scored_rows(self._store.redis, self.run)):
                self._store.note(self.run, window.notes.progress)

    def _collect(self, seconds: float) -> None:
        """Collect the results that have arrived, waiting up to `seconds` for the first.

        It keeps no position in the stream: what it has read it deletes, and a server that lost its data may
        number new results lower than those before.
        """
        self._collected = time.monotonic()
        block = math.ceil(1000 * max(min(seconds, self.deadline - self._collected), 0))
        entries = self._store.results(self.run, block_ms=block)
        if not entries:
            if self._store.was_cancelled(self.run):
                logger.warning("run cancelled by somebody else")
                self.cancel()
            self._check_cancelled()
            return
        self._heard = time.monotonic()
        found = [self._vetted(result) for _, result in entries]
        bad = [result for result in found if isinstance(result, BadResult)]
        halves = self._window.accept([result for result in found if not isinstance(result, BadResult)])
        self._entries += [entry for entry, _ in entries]
        if not (self._is_request and self._window.complete):  # else all of it is deleted now
            self._forget()
        if halves:
            self._send(halves)
        if bad:
            self._refuse(bad)

    def _vetted(self, result: ChunkResult | BadResult) -> ChunkResult | BadResult:
        """Return the result if it fits its chunk and the run's precision, or else a `BadResult`."""
        unit = None if result.chunk is None else self._window.units.get(result.chunk)
        if unit is None or not isinstance(result, ChunkScores):
            return result
        if len(result.scores) != len(unit.table):
            return BadResult(result.chunk, f"it has {len(result.scores)} scores for {len(unit.table)} pairs")
        if objection := self._agreed.objection(result.stats, self._settle):
            return BadResult(result.chunk, objection)
        self._sizes.chunks.see(result.stats.worker, len(result.scores))
        return result

    def _settle(self, mine: Settled) -> Settled:
        """Fix what the run is scored with, if it has other chunks to score."""
        return mine if self._window.has_one_left else self._store.settle(self.run, mine)

    def _forget(self) -> None:
        """Delete the collected results from Redis, and write the run's progress there."""
        window, notes = self._window, self._window.notes
        self._store.forget(self.run, window.answered, self._entries, notes.progress, notes.errors)
        window.answered, self._entries, notes.errors = [], [], []
        if self._cancelled:  # meanwhile, by another thread
            self.cancel()

    def _refuse(self, bad: list[BadResult]) -> None:
        """Submit chunks with an unusable result again; the result counts as a failed attempt."""
        reasons: dict[int, str] = {}
        for result in bad:
            with about(chunk="unknown" if result.chunk is None else result.chunk):
                logger.warning("a result cannot be used: %s", result.reason)
            if result.chunk in self._window.units:
                reasons[result.chunk] = result.reason
        lost = self._store.missing(self.run, reasons)  # the others still have a job that will write a result
        self._submit_again({number: f"its result cannot be used: {reasons[number]}" for number in lost})

    def _sweep(self) -> None:
        """Submit chunks again whose jobs are missing in Redis; give up those without an attempt left."""
        units = list(self._window.units)
        lost = self._store.missing(self.run, units)
        if found := self._store.put_back(self.run, [number for number in units if number not in {*lost}]):
            logger.warning("Redis has lost lists of the queue: %d chunks are put back", found)
        self._collect(0)  # a missing job may have finished meanwhile; its result came with its end
        if lost := [number for number in lost if number in self._window.units]:
            logger.warning("Redis has lost %d chunks", len(lost))
        self._submit_again(dict.fromkeys(lost, "it was lost"))

    def _submit_again(self, reasons: Mapping[int, str]) -> None:
        """Submit units again, by number. A unit without an attempt left fails with its reason."""
        if again := self._window.again(reasons):
            logger.warning("submitting %d chunks again", len(again))
            self._restore()
            self._send(again)

    def _restore(self) -> None:
        """Store the run on the server again, with what is settled."""
        self._store.restore(self.run)
        if any(self._agreed.settled):
            self._store.settle(self.run, self._agreed.settled)

    def _send(self, units: dict[int, Unit]) -> None:
        rows = sum(len(unit.table) for unit in units.values())
        payloads = self._store.compute(lambda: self._encoder.encode(units), rows)
        self._window.sent(units)
        try:
            self._store.enqueue(self.run, payloads, new=self._new)
            self._new = False
        finally:
            if self._cancelled:  # meanwhile, by another thread
                self.cancel()
        for number, unit in units.items():
            with about(chunk=unit.chunk, job=keys.job_id(self.run.id, number)):
                logger.debug("submitted %d rows", len(unit.table))

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise RunCancelled(f"run {self.run.id} was cancelled")

    def _look_around(self) -> None:
        self.on_wait()
        self._check_cancelled()
        self._late = time.monotonic() > self.deadline
        if self._late:
            raise RunTimeout(f"run {self.run.id}: {self.progress.rows} rows were done when the time was over")

    @contextmanager
    def _at_redis(self) -> Iterator[None]:
        """Redis commands in the ``with`` block wait for the server; `_look_around` is called meanwhile."""
        with about(run=self.run.id), redis_errors(), waiting(look=self._look_around, until=self.deadline):
            yield
