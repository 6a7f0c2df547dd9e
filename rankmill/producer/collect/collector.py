"""Decides which chunks of a run are sent, what their results mean, and which chunks are sent again or split.

The collector reads no clock, disk or server. Chunks, results and the time go in, and decisions come out. The
driver (`rankmill.producer.collect.driver`) carries out the decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from rankmill.jobs.contract.keys import ChunkId, PieceId, parent_of
from rankmill.jobs.contract.results import (
    Amounts,
    BadResult,
    ChunkFailure,
    ChunkResult,
    ChunkScores,
    ChunkStats,
    joined_usage,
    used_by,
)
from rankmill.jobs.contract.run import Run, Settled, settled_by
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.logs import about
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.scored import (
    ChunkPairs,
    EarlierScores,
    ScoredTable,
    distinct_pairs,
    join_results,
    row_results,
    scored_table,
)
from rankmill.producer.collect.sizing import Load, WindowSize

logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """The rows that one job scores: all rows of a chunk, or a part of them.

    ``failed`` counts the failed attempts. ``suspect`` means that the piece may kill its worker, because the
    piece is half of a larger one whose worker died. ``trace`` is the OpenTelemetry context of the chunk.
    """

    id: ChunkId
    table: pa.Table
    failed: int = 0
    suspect: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        return parent_of(self.id)

    @property
    def start(self) -> int:
        """Index of the piece's first row in its chunk. Rows that are not sent to workers do not count."""
        return self.id.start if isinstance(self.id, PieceId) else 0

    @cached_property
    def table_bytes(self) -> int:
        return int(self.table.nbytes)

    def halves(self) -> list[Piece]:
        """Split the piece, which must have at least two rows, into two."""
        middle = len(self.table) // 2
        cuts = ((0, middle), (middle, len(self.table) - middle))
        return [
            Piece(PieceId(self.chunk, self.start + at, rows), self.table.slice(at, rows), 0, True, self.trace)
            for at, rows in cuts
        ]


@dataclass
class UnfinishedChunk:
    """A chunk without a result, and the results that some of its pieces already have."""

    table: pa.Table
    pairs: ChunkPairs | None = None
    """The chunk's distinct pairs, if only these are sent to workers. ``None`` if all rows are sent."""
    results: list[tuple[Piece, ChunkResult]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of the chunk's rows that are sent to workers."""
        return len(self.pairs.rows) if self.pairs else len(self.table)


class FinishedChunk(NamedTuple):
    """A chunk with its scores, and the ``result`` to write to the journal.

    ``result`` is ``None`` in three cases, in which nothing is written:

    - The journal already has the result.
    - All scores come from an earlier output.
    - The chunk failed, and only some of its rows were sent to workers. A resumed run tries the chunk again.
    """

    number: int
    part: ScoredTable
    result: ChunkResult | None


class Accepted(NamedTuple):
    """Results that `Collector.accept` has accepted, and the chunks or parts of chunks to send next.

    Attributes
    ----------
    taken
        The results, each with its piece (a chunk or a part of one).
    jobless
        Chunks, or parts of chunks, that may have no job in Redis, each with the reason. A chunk or part is
        here if its result cannot be used, or if it is one half of a chunk whose worker died.
    used
        Tokens and device time of each finished chunk, by the index of the result that finished the chunk.
    """

    taken: list[tuple[Piece, ChunkResult]]
    jobless: dict[ChunkId, str]
    used: dict[int, dict[str, Amounts]]


class HowScored:
    """Checks that all chunks of a run are scored in the same way as its first scored chunk.

    All chunks must have the same precision, the same labels, and a model with the same content. In a
    deterministic run, the device and versions (`ChunkStats.kind`) must be the same, too.

    Parameters
    ----------
    spec
        The spec of the run.
    first
        Statistics of a chunk that is already scored; ``None`` if there is none.
    """

    def __init__(self, spec: ScoreSpec, first: ChunkStats | None) -> None:
        self._spec = spec
        self.settled = self._of(first) if first else Settled(None, None)
        self._labels = first.labels if first else None

    def news(self, stats: Iterable[ChunkStats]) -> Settled | None:
        """Return the facts that all chunks must share, such as the precision. Facts that are not known yet
        are taken from the statistics of new chunks (`stats`).

        Returns ``None`` if `stats` add no fact.
        """
        settled = self.settled
        for own in map(self._of, stats):
            settled = Settled(*(before or new for before, new in zip(settled, own, strict=True)))
        return settled if settled != self.settled else None

    def objection(self, stats: ChunkStats) -> str | None:
        """Return why a chunk with these statistics does not fit the run, or ``None`` if it fits."""
        mine = self._of(stats)
        if mine.precision != self.settled.precision:
            return f"it is in {mine.precision}, and the run in {self.settled.precision}"
        if mine.revision != self.settled.revision:
            return f"its model has content {mine.revision!s:.12}, and the run's {self.settled.revision!s:.12}"
        if mine.kind != self.settled.kind:
            return f"its bits are those of {mine.kind}, and the run's those of {self.settled.kind}"
        if self._labels is None:
            self._labels = stats.labels if self._spec.all_labels else ()
        if stats.labels != self._labels:
            return f"its labels are {stats.labels}, and the run's are {self._labels}"
        return None

    def _of(self, stats: ChunkStats) -> Settled:
        return settled_by(self._spec, stats.precision, stats.revision, stats.kind)


class Collector:
    """Holds each chunk of a run from the time when it is cut until the caller takes its scores.

    The number of a chunk is the number of its first row in the input. The window limits how many pieces
    (chunks or parts of chunks) wait for a result at the same time. Chunks may finish in any order, so a late
    chunk does not keep others from being scored. The caller takes chunks in input order.

    Parameters
    ----------
    run
        The run to which the chunks belong.
    window
        Limits the number of pieces without a result, and the bytes of their payloads.
    rows
        Counts the rows that are done.
    first
        Statistics of a chunk that an earlier run has scored.
    start
        The first row of the first chunk.
    reuse
        Scores of an earlier output, perhaps none. Two kinds of rows are not sent to workers: rows whose score
        is known, and rows that repeat an earlier row of the same chunk. With ``None``, all rows are sent.
    scored
        Number of the output's rows that devices have scored in earlier runs.
    """

    def __init__(
        self,
        run: Run,
        window: WindowSize,
        rows: RowCounter,
        *,
        first: ChunkStats | None = None,
        start: int = 0,
        reuse: EarlierScores | None = None,
        scored: int = 0,
    ) -> None:
        self.rows = rows
        self.scored = scored
        """Number of rows that devices have scored, in all finished chunks of the output. These chunks may be
        of several runs.
        """
        self.how = HowScored(run.spec, first)
        self.cut = self.taken = start
        """Row numbers in the input. `cut` is the first row that is not in a chunk yet. `taken` is the first
        row whose scores the caller has not taken yet.
        """
        self.exhausted = False
        """Whether the whole input is cut into chunks. The code that cuts the input sets this."""
        self.chunk_rows = 0
        self.pieces: dict[ChunkId, Piece] = {}
        """The chunks, or parts of chunks, that have no result yet, by id."""
        self.answered: list[ChunkId] = []
        """Ids of chunks, or of parts of chunks, that have a result, but may still have pairs in Redis.
        `LiveRun.forget` deletes these pairs, and empties this list.
        """
        self.fatal: ChunkFailure | None = None
        """The failure that makes it impossible to score the run, if there is one."""
        self._run, self._window = run, window
        self._unfinished: dict[int, UnfinishedChunk] = {}
        self._finished: list[FinishedChunk] = []
        self._waiting: dict[int, int] = {}
        """For each finished chunk that the caller has not taken yet, its number of rows, by the chunk's
        number.
        """
        self._reuse = reuse
        self._load = Load()
        self._payloads: dict[ChunkId, int] = {}
        self._payload_share = 1.0
        """Size of an encoded payload divided by the size of its table, in the chunks that were sent last."""

    @property
    def ready(self) -> bool:
        """Whether the caller can take the next chunk in input order, because the chunk has its result."""
        return self.taken in self._waiting

    @property
    def done(self) -> bool:
        return self.exhausted and self.taken == self.cut

    @property
    def complete(self) -> bool:
        """Whether all chunks have their results. The caller may not have taken all chunks yet."""
        return self.exhausted and not self.pieces

    @property
    def wants_chunks(self) -> bool:
        """Whether the input has rows left and a quarter of the window is free, so that more chunks can be
        cut.
        """
        return not self.exhausted and self._window.wants_more(self._load)

    @property
    def has_room(self) -> bool:
        return not self._window.is_full(self._load)

    def add(self, table: pa.Table, result: ChunkResult | None = None) -> Piece | None:
        """Add the next chunk of the input. Returns its rows to send, or ``None`` if no row must be sent.

        No row is sent if the chunk has a `result` of an earlier run, or if all its scores are known.
        """
        number = self.cut
        self.cut += len(table)
        self.chunk_rows = max(self.chunk_rows, len(table))
        if result:
            part = scored_table(table, result, row_results(result, len(table)))
            self._finish(number, part, None, fresh=False)
            return None
        pairs = None
        if self._reuse is not None:
            known = self._reuse.known(self._reuse.digests(table)) if len(self._reuse) else None
            pairs = distinct_pairs(table, self._reuse.columns, known)
            if pairs and not len(pairs.rows):
                self._finish(number, pairs.table(table, None), None)
                return None
        chunk = self._unfinished[number] = UnfinishedChunk(table, pairs)
        piece = Piece(PieceId(number, 0, chunk.rows), pairs.select(table)) if pairs else Piece(number, table)
        self.pieces[piece.id] = piece
        self._enter(piece, int(piece.table_bytes * self._payload_share))
        return piece

    def sent(self, sizes: Mapping[ChunkId, int]) -> None:
        """Record that chunks, or parts of them, were sent to Redis. `sizes` has the bytes of each payload."""
        for chunk, size in sizes.items():
            self._leave(self.pieces[chunk])
            self._enter(self.pieces[chunk], size)
        tables = sum(self.pieces[chunk].table_bytes for chunk in sizes)
        self._payload_share = sum(sizes.values()) / max(tables, 1)

    def news(self, results: Iterable[ChunkResult | BadResult]) -> Settled | None:
        """Return the facts that all chunks must share, such as the precision. Facts that are not known yet
        are taken from `results`, which are not accepted yet.

        Returns ``None`` if `results` add no fact.
        """
        scored = (result for result in results if isinstance(result, ChunkScores))
        return self.how.news(result.stats for result in scored if self._fits(result))

    def accept(self, results: Iterable[ChunkResult | BadResult], now: float) -> Accepted:
        """Accept results that came at `now` (s since 1970), and finish the chunks that have all results."""
        taken: list[tuple[Piece, ChunkResult]] = []
        jobless: dict[ChunkId, str] = {}
        used: dict[int, dict[str, Amounts]] = {}
        for place, result in enumerate(results):
            bad = self._objection(result)
            if bad is not None or isinstance(result, BadResult):
                with about(chunk="unknown" if result.chunk is None else str(result.chunk)):
                    logger.warning("a result cannot be used: %s", bad)
                if result.chunk in self.pieces:
                    jobless[result.chunk] = f"its result cannot be used: {bad}"
                continue
            piece = self.pieces.pop(result.chunk, None)
            if piece is None:
                continue  # the piece has a result already, or is not of this run
            self._leave(piece)
            self.answered.append(piece.id)
            if isinstance(result, ChunkFailure) and result.fatal:
                self.fatal = result
                continue
            taken.append((piece, result))
            if isinstance(result, ChunkFailure) and result.died and len(piece.table) > 1:
                self.pieces |= (halves := {half.id: half for half in piece.halves()})
                jobless |= dict.fromkeys(halves, "it was lost")
                continue
            chunk = self._unfinished[piece.chunk]
            chunk.results.append((piece, result))
            if sum(len(done.table) for done, _ in chunk.results) == chunk.rows:
                ordered = sorted(chunk.results, key=lambda answer: answer[0].start)
                whole = join_results(piece.chunk, [(len(done.table), answer) for done, answer in ordered])
                if of_chunk := self._count(chunk):
                    used[place] = of_chunk
                self._has_answer(piece.chunk, whole)
        self.rows.see(now)
        return Accepted(taken, jobless, used)

    def retry(
        self, reasons: Mapping[ChunkId, str], failed: Mapping[ChunkId, int]
    ) -> tuple[list[Piece], list[ChunkFailure]]:
        """Decide which chunks, or parts of chunks, are sent again and which are given up.

        Parameters
        ----------
        reasons
            For each chunk or part, why it must be sent again. If the chunk or part is given up, its failure
            states this reason.
        failed
            For each chunk or part that has failed before, the number of failed attempts, not counting the
            last one.

        Returns
        -------
        The chunks or parts to send, and the failures of those that have no attempt left.
        """
        again: list[Piece] = []
        given_up: list[ChunkFailure] = []
        for chunk, reason in reasons.items():
            # A suspect piece is half of a chunk whose worker died. It comes here before it is sent for the
            # first time, so no attempt at it has failed yet.
            begun = -1 if self.pieces[chunk].suspect else 0
            attempts = failed.get(chunk, begun) + 1
            if attempts > self._run.max_retries:
                message = f"given up after attempt {attempts}: {reason}"
                given_up.append(ChunkFailure(chunk=chunk, message=message, fatal=False, attempts=attempts))
            else:
                self.pieces[chunk].failed = attempts
                again.append(self.pieces[chunk])
        return again, given_up

    def pop_finished(self) -> list[FinishedChunk]:
        finished, self._finished = self._finished, []
        return finished

    def take(self) -> int:
        """Take the next chunk, which must have its result. Returns the chunk's number."""
        number = self.taken
        self.taken += self._waiting.pop(number)
        return number

    def _fits(self, result: ChunkScores) -> bool:
        piece = self.pieces.get(result.chunk)
        return piece is not None and len(result.scores) == len(piece.table)

    def _objection(self, result: ChunkResult | BadResult) -> str | None:
        """Return why a result cannot be used. Return ``None`` if it can be used, or if the run does not wait
        for it.

        A result cannot be used if it is unreadable, or if it does not fit the run or the rows that were sent.
        """
        if isinstance(result, BadResult):
            return result.reason
        if result.chunk not in self.pieces or isinstance(result, ChunkFailure):
            return None
        if not self._fits(result):
            rows = len(self.pieces[result.chunk].table)
            return f"it has {len(result.scores)} scores for {rows} pairs"
        return self.how.objection(result.stats)

    def _has_answer(self, number: int, whole: ChunkResult) -> None:
        """Finish the chunk `number`, whose rows all have results. `whole` is the result of all its rows."""
        chunk = self._unfinished.pop(number)
        if chunk.pairs is None:
            part = scored_table(chunk.table, whole, row_results(whole, len(chunk.table)))
            self._finish(number, part, whole)
        else:
            self._finish(number, chunk.pairs.table(chunk.table, whole), chunk.pairs.whole(number, whole))

    def _finish(
        self, number: int, part: ScoredTable, result: ChunkResult | None, *, fresh: bool = True
    ) -> None:
        self.rows.add(number, part, fresh=fresh)
        self._waiting[number] = len(part.table)
        self._finished.append(FinishedChunk(number, part, result))

    def _count(self, chunk: UnfinishedChunk) -> dict[str, Amounts]:
        """Count the scored rows of a chunk. Returns the tokens and device time of its results, by device."""
        used: dict[str, Amounts] = {}
        for _, result in chunk.results:
            if isinstance(result, ChunkScores):
                used = joined_usage(used, used_by(result))
                self.scored += len(result.scores) - result.scores.null_count
        return used

    def rest(self) -> Amounts:
        """Count the rows of the complete run that no device has scored. ``failed`` is the number of rows
        without a score. ``cached`` is the number of rows whose score comes from an earlier output or from an
        equal row.
        """
        failed = self.rows.progress.row_errors
        return Amounts(cached=max(self.cut - self.scored - failed, 0), failed=failed)

    def _enter(self, piece: Piece, payload: int) -> None:
        self._payloads[piece.id] = payload
        pieces, rows, load = self._load
        self._load = Load(pieces + 1, rows + len(piece.table), load + payload)

    def _leave(self, piece: Piece) -> None:
        payload = self._payloads.pop(piece.id, None)
        if payload is not None:
            pieces, rows, load = self._load
            self._load = Load(pieces - 1, rows - len(piece.table), load - payload)
