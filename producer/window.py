"""The chunks of a run that are in flight: their position in the input, their pieces, their results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa
from opentelemetry.trace import INVALID_SPAN, Span

from jobs import keys
from jobs.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats
from jobs.run import Run
from jobs.runtime import tracing
from jobs.runtime.logs import about
from producer.journal import Journal
from producer.notes import Notes
from producer.splitting import Unit, join, scores_and_errors

_REFILL_SHARE = 4
"""While results are ready for the caller, chunks are submitted when 1/4 of the window is free."""

FIRST_PIECE = 1 << 40
"""Number of the first piece of a chunk; no run has so many chunks."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredTable:
    """A part of the input with its scores; ``stats`` is ``None`` if no worker could score it.

    In each row exactly one of score and error is null. ``attempts`` is the number of attempts;
    ``worker`` made the last one (empty if it is not known).
    """

    table: pa.Table
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats | None
    attempts: int
    worker: str


@dataclass
class InFlight:
    """A chunk, from row ``start`` of the input, that is submitted and not yet returned to the caller."""

    table: pa.Table
    start: int
    span: Span = INVALID_SPAN
    result: ChunkResult | None = None
    parts: list[tuple[Unit, ChunkResult]] = field(default_factory=list)


class Window:
    """Holds at most `size` chunks of a run, in input order. It does not use Redis.

    Parameters
    ----------
    run
        The run to which the chunks belong.
    source
        Tables to score, one chunk each.
    size
        Most chunks in flight.
    journal
        Stores the results. A chunk whose result is already in the journal gets it from there.
    span
        The run's span, the parent of the chunks' spans.
    """

    def __init__(
        self, run: Run, source: Iterator[pa.Table], size: int, journal: Journal | None, span: Span
    ) -> None:
        self._run = run
        self._source = source
        self._size = size
        self._journal = journal
        self._span = span
        self._in_flight: dict[int, InFlight] = {}
        self._piece_numbers = count(FIRST_PIECE)
        self._cut = 0
        self._cut_rows = 0
        self._taken = 0
        self._exhausted = False
        self.notes = Notes()
        self.units: dict[int, Unit] = {}
        """Units that have a job and no result yet, by the chunk number in the job."""
        self.answered: list[int] = []
        """Numbers of the units that have a result; the caller empties the list."""

    @property
    def next(self) -> InFlight | None:
        """The next chunk in input order; ``None`` if no chunk is in flight."""
        return self._in_flight.get(self._taken)

    def wants_chunks(self) -> bool:
        """Whether to submit chunks now: several at once, which costs less, unless the caller must wait."""
        room = self._size - len(self._in_flight)
        return self.next is None or self.next.result is None or room >= self._size // _REFILL_SHARE

    def fill(self) -> dict[int, Unit]:
        """Cut chunks until the window is full or the source is empty; return the units to submit."""
        fresh: dict[int, Unit] = {}
        while not self._exhausted and len(self._in_flight) < self._size:
            table = next(self._source, None)
            if table is None:
                self._exhausted = True
                break
            known = self._journal.get(self._cut, len(table)) if self._journal else None
            chunk = InFlight(table, self._cut_rows)
            self._in_flight[self._cut] = chunk
            if known:
                chunk.result = known
                self.notes.add(chunk.start, len(table), chunk.result, fresh=False)
            else:
                chunk.span = tracing.begin("chunk", self._span, chunk=self._cut, rows=len(table))
                fresh[self._cut] = Unit(self._cut, table)
            self._cut += 1
            self._cut_rows += len(table)
        return fresh

    def trace(self, unit: Unit) -> Mapping[str, str]:
        """The trace to which a unit's job belongs."""
        return tracing.carrier(self._in_flight[unit.chunk].span)

    def accept(self, results: list[ChunkResult]) -> dict[int, Unit]:
        """Take in results, write complete chunks to the journal; return halves of units that kill workers."""
        finished: dict[int, tuple[int, ChunkResult]] = {}
        halves: dict[int, Unit] = {}
        for result in results:
            unit = self.units.pop(result.chunk, None)
            if unit is None:
                continue  # a second result with the same scores, or not a chunk of this run
            self.answered.append(result.chunk)
            if isinstance(result, ChunkFailure) and result.fatal:
                self._in_flight[self._taken].result = result  # fail now, without those before it
                continue
            self._log(result, unit)
            if isinstance(result, ChunkFailure) and result.died and len(unit.table) > 1:
                halves |= {next(self._piece_numbers): half for half in unit.halves()}
                continue
            chunk = self._in_flight[unit.chunk]
            chunk.parts.append((unit, result))
            if sum(len(part.table) for part, _ in chunk.parts) == len(chunk.table):
                chunk.result = join(unit.chunk, chunk.parts)
                self.notes.add(chunk.start, len(chunk.table), chunk.result)
                finished[unit.chunk] = len(chunk.table), chunk.result
                chunk.span.end()
        self.units |= halves
        if self._journal:
            self._journal.add(finished)
        return halves

    def again(self, reasons: Mapping[int, str]) -> dict[int, Unit]:
        """Return the units with an attempt left, by number. The others fail with their reason."""
        again: dict[int, Unit] = {}
        for number, reason in reasons.items():
            unit = self.units[number]
            if unit.submits > self._run.max_retries:
                message = f"given up after attempt {unit.submits}: {reason}"
                failure = ChunkFailure(chunk=number, message=message, fatal=False, attempts=unit.submits)
                self.accept([failure])
            else:
                unit.submits += 1
                again[number] = unit
        return again

    def take(self) -> ScoredTable:
        """Remove and return the next chunk, which must have its result."""
        chunk = self._in_flight.pop(self._taken)
        self._taken += 1
        result = chunk.result
        assert result is not None
        columns = scores_and_errors(result, len(chunk.table))
        if isinstance(result, ChunkScores):
            stats = result.stats
            return ScoredTable(chunk.table, *columns, stats, stats.attempt, stats.worker)
        return ScoredTable(chunk.table, *columns, None, result.attempts, result.worker)

    def _log(self, result: ChunkResult, unit: Unit) -> None:
        """Log the result of a job, but not its error messages: they may contain text of the input."""
        worker = result.stats.worker if isinstance(result, ChunkScores) else result.worker
        with about(chunk=unit.chunk, job=keys.job_id(self._run.id, result.chunk), worker=worker):
            rows = len(unit.table)
            if isinstance(result, ChunkScores):
                logger.debug("collected %d rows, %d without a score", rows, result.scores.null_count)
            elif result.died and rows > 1:
                logger.warning("%d rows whose workers died; trying their halves apart", rows)
            else:
                logger.warning("%d rows are given up after %d attempts", rows, result.attempts)
