"""The chunks of a run between the input and the caller: in Redis, or finished and waiting for their turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa
from opentelemetry.trace import Span

from rankmill.jobs.contract.results import ChunkFailure, ChunkResult
from rankmill.jobs.contract.run import Run
from rankmill.jobs.runtime import tracing
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.notes import Notes, log_result
from rankmill.producer.collect.reuse.earlier import EarlierScores
from rankmill.producer.collect.reuse.shared import Lenders, SharedPairs
from rankmill.producer.collect.sizing import Load, WindowSize
from rankmill.producer.collect.splitting import ScoredTable, Unit, join, scored_table
from rankmill.producer.collect.spool import Spool

_AT_ONCE = 64
"""Most chunks that are cut at once."""

FIRST_PIECE = 1 << 40
"""Number of the first piece of a chunk; no run has so many rows."""

logger = logging.getLogger(__name__)


@dataclass
class InFlight:
    """A chunk that has no result yet, and the results of its pieces."""

    table: pa.Table
    span: Span
    shared: SharedPairs | None = None
    """The pairs to score, and which of them another chunk asks for; ``None``: all rows are scored."""
    parts: list[tuple[Unit, ChunkResult]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many rows are sent."""
        return int(self.shared.own.sum()) if self.shared else len(self.table)


class Window:
    """The chunks of a run between the input and the caller. It does not use Redis.

    The number of a chunk is its first row in the input. The first chunk begins after the rows of the output's
    parts that are in place.

    It holds no more units without a result than `size` allows. Chunks with a result wait in a spool until
    all chunks before them are taken, so a late chunk keeps no other from being scored.

    Parameters
    ----------
    run
        The run to which the chunks belong.
    source
        Tables to score, one chunk each.
    size
        Most units without a result.
    journal
        Stores the results. A chunk whose result is already in the journal gets it from there.
    span
        The run's span, the parent of the chunks' spans.
    reuse
        The scores that are known, perhaps none; rows with these pairs are not sent, nor pairs that another
        row or a chunk without a result asks for. ``None``: all rows are sent.
    """

    def __init__(
        self,
        run: Run,
        source: Iterator[pa.Table],
        size: WindowSize,
        journal: Journal | None,
        span: Span,
        reuse: EarlierScores | None = None,
    ) -> None:
        self._reuse = reuse
        self._lenders = None if reuse is None else Lenders(reuse.columns)
        self._idle = 0
        """Chunks that wait only for others' scores."""
        self._run, self._source, self._size = run, source, size
        self._journal = journal
        self._span = span
        self._in_flight: dict[int, InFlight] = {}
        self._finished = Spool(journal.folder if journal else None)
        self._piece_numbers = count(FIRST_PIECE)
        self._cut = self._taken = journal.finished.rows if journal else 0
        """Rows that are cut into chunks, and rows that the caller has; each is a chunk's number."""
        self._exhausted = False
        self._load = Load()
        self._sent: dict[int, int] = {}
        """Bytes of payload of the units in the load, by number."""
        self._payload_share = 1.0
        """Bytes of payload for a byte of a table, as last seen."""
        self._most_bytes = 0
        """Most bytes of tables that were in the load at once."""
        self.notes = Notes(journal.rows, journal.finished.row_errors) if journal else Notes(0)
        self.chunk_rows = 0
        """Rows of the largest chunk so far."""
        self.units: dict[int, Unit] = {}
        """Units that have a job and no result yet, by the chunk number in the job."""
        self._scored: Mapping[int, int] = {}
        """Scored rows of units without a result, by number, as last seen."""
        self.answered: list[int] = []
        """Numbers of the units that have a result; the caller empties the list."""
        self.fatal: ChunkFailure | None = None
        """Why no chunk of the run can be scored."""

    @property
    def ready(self) -> bool:
        """Whether the next chunk in input order has its result."""
        return self._taken in self._finished

    @property
    def done(self) -> bool:
        """Whether all chunks are taken."""
        return self._exhausted and self._taken == self._cut

    @property
    def complete(self) -> bool:
        """Whether all chunks have their result; some may not be taken yet."""
        return self._exhausted and not self.units

    @property
    def has_one_left(self) -> bool:
        """Whether a single unit is without a result."""
        return self._exhausted and len(self.units) == 1

    def wants_chunks(self) -> bool:
        """Whether to submit chunks now."""
        if self._exhausted or self._finished.full or self._idle >= _AT_ONCE:
            return False
        has_room = not self.ready or self._finished.has_room(self._most_bytes)
        return has_room and self._size.wants_more(self._load)

    def fill(self) -> dict[int, Unit]:
        """Cut chunks until the window is full, or there are several; return the units to submit."""
        fresh: dict[int, Unit] = {}
        load = Load(*self._load)
        for _ in range(_AT_ONCE):
            if self._size.is_full(load) or self._finished.full or self._idle >= _AT_ONCE:
                break
            table = next(self._source, None)
            if table is None:
                self._exhausted = True
                break
            known = self._known(len(table))
            if known:
                self._finish(self._cut, scored_table(table, known), fresh=False)
            elif (unit := self._begin(table)) is not None:
                fresh[self._cut if unit.table is table else next(self._piece_numbers)] = unit
                load = load.plus(len(unit.table), int(unit.table_bytes * self._payload_share))
            self.chunk_rows = max(self.chunk_rows, len(table))
            self._cut += len(table)
        return fresh

    def _begin(self, table: pa.Table) -> Unit | None:
        """Begin a chunk, and return what is to be scored of it; ``None`` if nothing is."""
        shared = None
        if self._reuse is not None and self._lenders is not None:
            known = self._reuse.known(self._reuse.digests(table)) if len(self._reuse) else None
            shared = self._lenders.share(self._cut, table, known)
            if shared and not shared.keys:
                self._finish(self._cut, shared.asked.table(table, None))
                return None
        span = tracing.begin("chunk", self._span, chunk=self._cut, rows=len(table))
        chunk = self._in_flight[self._cut] = InFlight(table, span, shared)
        if not chunk.rows:
            self._idle += 1
            return None
        return Unit(self._cut, table if shared is None or chunk.rows == len(table) else shared.select(table))

    def _finish(self, chunk: int, part: ScoredTable, *, fresh: bool = True) -> None:
        self.notes.add(chunk, part, fresh=fresh)
        self._finished.put(chunk, part)

    def sent(self, units: Mapping[int, Unit]) -> None:
        """Take note of units that are submitted, with the sizes of their payloads."""
        for number, unit in units.items():
            self._leave(number)
            self.units[number], self._sent[number] = unit, unit.payload_bytes
            self._load = self._load.plus(len(unit.table), unit.payload_bytes)
        tables = sum(unit.table_bytes for unit in units.values())
        self._payload_share = sum(unit.payload_bytes for unit in units.values()) / max(tables, 1)
        self._most_bytes = max(self._most_bytes, int(self._load.payload / self._payload_share))

    def _known(self, rows: int) -> ChunkResult | None:
        """The result of the chunk that is cut now, if an earlier run has left a sound one."""
        if self._journal is None:
            return None
        damaged = self._journal.damaged_rows
        known = self._journal.get(self._cut, rows)
        self.notes.lose(self._journal.damaged_rows - damaged)
        return known

    def see(self, scored: Mapping[int, int]) -> bool:
        """Note the progress, with `scored` rows of units without a result, by number; return if it is new."""
        self._scored, units = scored, self.units
        counts = (min(rows, len(units[number].table)) for number, rows in scored.items() if number in units)
        return self.notes.see(sum(counts))

    def _leave(self, number: int) -> None:
        """Take a unit out of the load, if it is in it."""
        payload = self._sent.pop(number, None)
        if payload is not None:
            rows = len(self.units[number].table)
            self._load = Load(self._load.units - 1, self._load.rows - rows, self._load.payload - payload)

    def trace(self, unit: Unit) -> Mapping[str, str]:
        """The trace to which a unit's job belongs."""
        return tracing.carrier(self._in_flight[unit.chunk].span)

    def accept(self, results: list[ChunkResult]) -> dict[int, Unit]:
        """Take in results, write complete chunks to the journal; return halves of units that kill workers."""
        finished: dict[int, tuple[int, ChunkResult]] = {}
        halves: dict[int, Unit] = {}
        for result in results:
            self._leave(result.chunk)
            unit = self.units.pop(result.chunk, None)
            if unit is None:
                continue  # a second result with the same scores, or not a chunk of this run
            self.answered.append(result.chunk)
            if isinstance(result, ChunkFailure) and result.fatal:
                self.fatal = result
                continue
            log_result(result, unit, self._run.id)
            if isinstance(result, ChunkFailure) and result.died and len(unit.table) > 1:
                halves |= {next(self._piece_numbers): half for half in unit.halves()}
                continue
            chunk = self._in_flight[unit.chunk]
            chunk.parts.append((unit, result))
            if sum(len(part.table) for part, _ in chunk.parts) == chunk.rows:
                finished |= self._answered(unit.chunk, join(unit.chunk, chunk.parts))
        self.units |= halves
        self.see(self._scored)
        if self._journal:
            self._journal.add(finished)
        return halves

    def _answered(self, number: int, whole: ChunkResult) -> dict[int, tuple[int, ChunkResult]]:
        """Finish a chunk whose units have their results, and those that waited for it; return what is new."""
        chunk = self._in_flight[number]
        answers = self._lenders.answer(number, whole) if self._lenders else {}
        finished: dict[int, tuple[int, ChunkResult]] = {}
        if chunk.shared is None:
            self._end(number)
            self._finish(number, scored_table(chunk.table, whole))
            finished[number] = len(chunk.table), whole
        else:
            chunk.shared.result = whole
            finished |= self._complete(number, chunk.shared)
        for each, found in answers.items():
            waiting = self._in_flight[each].shared
            assert waiting
            waiting.add(found)
            finished |= self._complete(each, waiting)
        return finished

    def _complete(self, number: int, shared: SharedPairs) -> dict[int, tuple[int, ChunkResult]]:
        """Finish a chunk with shared pairs, if it has all answers; return what the journal gets."""
        if not shared.is_complete:
            return {}
        table = self._in_flight[number].table
        self._end(number)
        self._finish(number, shared.table(table))
        result = shared.whole(number)
        return {number: (len(table), result)} if result else {}  # a failure is tried again

    def _end(self, number: int) -> None:
        chunk = self._in_flight.pop(number)
        chunk.span.end()
        self._idle -= not chunk.rows

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
        part = self._finished.take(self._taken)
        self._taken += len(part.table)
        return part

    def close(self) -> None:
        """Drop what waits for its turn."""
        self._finished.close()
