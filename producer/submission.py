"""One run from the producer's side: submit chunks within a window, collect them in order."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa
from opentelemetry.trace import INVALID_SPAN, Span

from jobs import keys
from jobs.errors import RunCancelled, RunFailed
from jobs.job import Payload
from jobs.results import BadResult, ChunkFailure, ChunkResult, ChunkScores, ChunkStats
from jobs.run import Run
from jobs.runs import RunStore
from jobs.runtime import tracing
from jobs.runtime.hosts import cores
from jobs.runtime.logs import about
from jobs.runtime.patience import redis_errors, waiting
from jobs.wire import encode_pairs
from producer.journal import Journal
from producer.leftovers import Leftovers
from producer.notes import Notes
from producer.splitting import Unit, join, scores_and_errors

_POLL_SECONDS = 0.5
"""How long to wait for a result before looking around (a timeout, the caller's `on_wait`)."""

_REFILL_SHARE = 4
"""While there are results to hand out, chunks are submitted when this part of the window is free."""

_ENCODERS = 8
"""Threads that encode and compress chunks, at most; Arrow does so without Python's lock."""

_SWEEP_SECONDS = 10
"""After this long without any result, ask what has become of the chunks in flight."""

FIRST_PIECE = 1 << 40
"""Pieces of chunks are numbered from here: no run has so many chunks."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredTable:
    """A part of the input with its scores; ``stats`` is ``None`` if no worker could score it.

    In each row exactly one of score and error is null. It took so many ``attempts``, the last of
    them by ``worker`` (if any is known).
    """

    table: pa.Table
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats | None
    attempts: int
    worker: str


@dataclass
class _InFlight:
    """A chunk, from row ``start`` on, that was submitted and not yet handed to the caller."""

    table: pa.Table
    start: int
    span: Span = INVALID_SPAN
    result: ChunkResult | None = None
    parts: list[tuple[Unit, ChunkResult]] = field(default_factory=list)


class Submission:
    """Feeds a run and yields its scored tables in input order.

    It works while `tables` is being iterated: chunks go out as the window has room, so neither
    Redis nor this process ever holds more than `window` of them.

    Parameters
    ----------
    store, run
        The run, which `begin` tells the server of.
    leftovers
        Removes the run when it is over.
    source
        Tables to score, one chunk each.
    columns
        Names of the query and passage columns in them.
    window
        Chunks in flight, at most.
    journal
        Where results are kept before Redis forgets them; chunks that are in it already are taken
        from it, and not submitted.
    """

    def __init__(
        self,
        store: RunStore,
        run: Run,
        leftovers: Leftovers,
        source: Iterator[pa.Table],
        columns: tuple[str, str],
        window: int,
        journal: Journal | None = None,
    ) -> None:
        self.run = run
        self.on_wait: Callable[[], None] = lambda: None
        """Called at least every second while waiting; what it raises ends the wait."""
        self.deadline = math.inf
        """When to give up waiting, in `time.monotonic` seconds."""
        self._store = store
        self._leftovers = leftovers
        self._source = source
        self._columns = columns
        self._window = window
        self._journal = journal
        self._in_flight: dict[int, _InFlight] = {}
        self._units: dict[int, Unit] = {}
        """What jobs are there for and has no result yet, by the chunk number in the job."""
        self._entries: list[str] = []
        """Stream entries that were taken in and that Redis is yet to forget."""
        self._answered: list[int] = []
        """Numbers of units that have their result, whose pairs Redis is yet to forget."""
        self._notes = Notes()
        self._span = tracing.begin("run", run=run.id, model=run.spec.model, queue=run.queue)
        self._piece_numbers = count(FIRST_PIECE)
        self._submitted = 0
        self._submitted_rows = 0
        self._taken = 0
        self._exhausted = False
        self._cancelled = False
        self._last_entry = "0"
        self._encoders: ThreadPoolExecutor | None = None
        self._precision: str | None = None
        """What the run's chunks are scored in, once one is."""

    def begin(self) -> None:
        """Let the server know the run."""
        first = self._journal.first if self._journal else None
        self._precision = first.precision if first else None
        with self._at_redis():
            self._restore()

    def tables(self) -> Iterator[ScoredTable]:
        """Yield every table of the source with its scores, in order.

        Raises
        ------
        RunFailed
            The run cannot be scored (its model cannot be loaded, say).
        RunCancelled
            `cancel` was called, or somebody else has cancelled the run.
        RedisUnavailable, RedisFailed
            The server could not serve for as long as was to be waited for it, or refuses a command.
        TimeoutError
            `deadline` has passed; call again to go on.
        """
        while True:
            if self._wants_chunks():
                self.fill()
            if not self._in_flight:
                self._leftovers.remove(self.run, self._answered)
                self._span.end()
                with about(run=self.run.id):
                    done = self._notes.progress
                    logger.info("run complete: %d rows, %d without a score", done.rows, done.row_errors)
                return
            yield self._take(self._next_result())

    def _wants_chunks(self) -> bool:
        """Whether to submit now: several chunks at once cost less, but nothing is waited for meanwhile."""
        next_chunk = self._in_flight.get(self._taken)
        room = self._window - len(self._in_flight)
        return next_chunk is None or next_chunk.result is None or room >= self._window // _REFILL_SHARE

    def fill(self) -> None:
        """Submit chunks until the window is full or the source is empty."""
        self._check_cancelled()
        fresh: dict[int, Unit] = {}
        while not self._exhausted and len(self._in_flight) < self._window:
            table = next(self._source, None)
            if table is None:
                self._exhausted = True
                break
            known = self._journal.get(self._submitted, len(table)) if self._journal else None
            chunk = _InFlight(table, self._submitted_rows)
            self._in_flight[self._submitted] = chunk
            if known:
                chunk.result = known
                self._notes.add(chunk.start, len(table), chunk.result, fresh=False)
            else:
                chunk.span = tracing.begin("chunk", self._span, chunk=self._submitted, rows=len(table))
                fresh[self._submitted] = Unit(self._submitted, table)
            self._submitted += 1
            self._submitted_rows += len(table)
        if fresh:
            with self._at_redis():
                self._send(fresh)

    def cancel(self) -> None:
        """Drop the run and take its waiting chunks off the queue."""
        if not self._cancelled:
            self._span.add_event("cancelled")
            self._span.end()
        self._cancelled = True
        self._leftovers.remove(self.run, {*self._units, *self._answered})

    def _next_result(self) -> _InFlight:
        chunk = self._in_flight[self._taken]
        quiet_since = time.monotonic()
        while chunk.result is None:
            self._look_around()
            with self._at_redis():
                if self._collect():
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > _SWEEP_SECONDS:
                    self._sweep()
                    quiet_since = time.monotonic()
        return chunk

    def _take(self, chunk: _InFlight) -> ScoredTable:
        """Remove the chunk that is next in order; its result is there."""
        result = chunk.result
        if isinstance(result, ChunkFailure) and result.fatal:
            self.cancel()
            raise RunFailed(result.message)
        del self._in_flight[self._taken]
        self._taken += 1
        assert result is not None
        columns = scores_and_errors(result, len(chunk.table))
        if isinstance(result, ChunkScores):
            stats = result.stats
            return ScoredTable(chunk.table, *columns, stats, stats.attempt, stats.worker)
        return ScoredTable(chunk.table, *columns, None, result.attempts, result.worker)

    def _collect(self) -> bool:
        """Take in the results that have come; whether there were any."""
        entries = self._store.results(self.run, after=self._last_entry, block_ms=int(_POLL_SECONDS * 1000))
        if not entries:
            if self._store.was_cancelled(self.run):
                logger.warning("run cancelled by somebody else")
                self.cancel()
            self._check_cancelled()
            return False
        found = [self._vetted(result) for _, result in entries]
        bad = [result for result in found if isinstance(result, BadResult)]
        halves = self._accept([result for result in found if not isinstance(result, BadResult)])
        self._entries += [entry for entry, _ in entries]
        self._last_entry = entries[-1][0]
        self._forget()
        if halves:
            self._send(halves)
        if bad:
            self._refuse(bad)
        return True

    def _vetted(self, result: ChunkResult | BadResult) -> ChunkResult | BadResult:
        """A result that has a score or an error for each row of its chunk, or why it is none."""
        unit = None if result.chunk is None else self._units.get(result.chunk)
        if unit and isinstance(result, ChunkScores) and len(result.scores) != len(unit.table):
            return BadResult(result.chunk, f"it has {len(result.scores)} scores for {len(unit.table)} pairs")
        if unit and isinstance(result, ChunkScores) and self.run.spec.precision == "auto":
            self._precision = self._precision or self._store.settle(self.run, result.stats.precision)
            if result.stats.precision != self._precision:
                message = f"it is in {result.stats.precision}, and the run in {self._precision}"
                return BadResult(result.chunk, message)
        return result

    def _forget(self) -> None:
        """Let Redis drop what was taken in, and tell it how far the run has come."""
        notes = self._notes
        self._store.forget(self.run, self._answered, self._entries, notes.progress, notes.errors)
        self._answered, self._entries, notes.errors = [], [], []
        if self._cancelled:  # meanwhile, by another thread
            self.cancel()

    def _accept(self, results: list[ChunkResult]) -> dict[int, Unit]:
        """Note results, in the journal too where chunks are complete; halves of what kills workers."""
        finished: dict[int, tuple[int, ChunkResult]] = {}
        halves: dict[int, Unit] = {}
        for result in results:
            unit = self._units.pop(result.chunk, None)
            if unit is None:
                continue  # done twice, with the same scores, or no chunk of this run
            self._answered.append(result.chunk)
            if isinstance(result, ChunkFailure) and result.fatal:
                self._in_flight[self._taken].result = result  # no need to wait for those before it
                continue
            self._tell(result, unit)
            if isinstance(result, ChunkFailure) and result.died and len(unit.table) > 1:
                halves |= {next(self._piece_numbers): half for half in unit.halves()}
                continue
            chunk = self._in_flight[unit.chunk]
            chunk.parts.append((unit, result))
            if sum(len(part.table) for part, _ in chunk.parts) == len(chunk.table):
                chunk.result = join(unit.chunk, chunk.parts)
                self._notes.add(chunk.start, len(chunk.table), chunk.result)
                finished[unit.chunk] = len(chunk.table), chunk.result
                chunk.span.end()
        self._units |= halves
        if self._journal:
            self._journal.add(finished)
        return halves

    def _tell(self, result: ChunkResult, unit: Unit) -> None:
        """Log what came of a job; not in the words of its errors, which may be those of a text."""
        worker = result.stats.worker if isinstance(result, ChunkScores) else result.worker
        with about(chunk=unit.chunk, job=keys.job_id(self.run.id, result.chunk), worker=worker):
            rows = len(unit.table)
            if isinstance(result, ChunkScores):
                logger.debug("collected %d rows, %d without a score", rows, result.scores.null_count)
            elif result.died and rows > 1:
                logger.warning("%d rows whose workers died; trying their halves apart", rows)
            else:
                logger.warning("%d rows are given up after %d attempts", rows, result.attempts)

    def _refuse(self, bad: list[BadResult]) -> None:
        """Let chunks whose result cannot be used be scored again: it was an attempt that failed."""
        reasons: dict[int, str] = {}
        for result in bad:
            with about(chunk="unknown" if result.chunk is None else result.chunk):
                logger.warning("a result cannot be used: %s", result.reason)
            if result.chunk in self._units:
                reasons[result.chunk] = result.reason
        lost = self._store.missing(self.run, reasons)  # others have a job that is yet to answer
        self._submit_again({number: f"its result cannot be used: {reasons[number]}" for number in lost})

    def _sweep(self) -> None:
        """Submit again what Redis has forgotten, and give up on what fails without a word."""
        lost = self._store.missing(self.run, list(self._units))
        self._collect()  # a job may have finished, and so be gone, since it was last asked for
        if lost := [number for number in lost if number in self._units]:
            logger.warning("Redis has lost %d chunks", len(lost))
        self._submit_again(dict.fromkeys(lost, "it was lost"))

    def _submit_again(self, reasons: Mapping[int, str]) -> None:
        """Make another attempt at units, by number; for those without one left the reason is the result."""
        again: dict[int, Unit] = {}
        for number, reason in reasons.items():
            unit = self._units[number]
            if unit.submits > self.run.max_retries:
                message = f"given up after attempt {unit.submits}: {reason}"
                failure = ChunkFailure(chunk=number, message=message, fatal=False, attempts=unit.submits)
                self._accept([failure])
            else:
                unit.submits += 1
                again[number] = unit
        if again:
            logger.warning("submitting %d chunks again", len(again))
            self._restore()
            self._send(again)

    def _restore(self) -> None:
        """Let the server know the run, and the precision that it is scored in."""
        self._store.restore(self.run)
        if self._precision and self.run.spec.precision == "auto":
            self._store.settle(self.run, self._precision)

    def _send(self, units: dict[int, Unit]) -> None:
        self._units |= units
        payloads = self._payloads(units)
        try:
            self._store.enqueue(self.run, payloads)
        finally:
            if self._cancelled:  # meanwhile, by another thread
                self.cancel()
        for number, unit in units.items():
            with about(chunk=unit.chunk, job=keys.job_id(self.run.id, number)):
                logger.debug("submitted %d rows", len(unit.table))

    def _payloads(self, units: dict[int, Unit]) -> dict[int, Payload]:
        if len(units) == 1:
            return {number: self._payload(unit) for number, unit in units.items()}
        if self._encoders is None:
            self._encoders = ThreadPoolExecutor(min(cores(), _ENCODERS), "rankmill-encode")
        return dict(zip(units, self._encoders.map(self._payload, units.values()), strict=True))

    def _payload(self, unit: Unit) -> Payload:
        queries, passages = (unit.table[name] for name in self._columns)
        trace = tracing.carrier(self._in_flight[unit.chunk].span)
        return Payload(encode_pairs(queries, passages), len(unit.table), trace, suspect=unit.piece)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise RunCancelled(f"run {self.run.id} was cancelled")

    def _look_around(self) -> None:
        self.on_wait()
        self._check_cancelled()
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"run {self.run.id}: not all scores came in time; ask again to go on waiting")

    @contextmanager
    def _at_redis(self) -> Iterator[None]:
        """Commands within the ``with`` block wait for the server, and this looks around meanwhile."""
        with about(run=self.run.id), redis_errors(), waiting(look=self._look_around):
            yield
