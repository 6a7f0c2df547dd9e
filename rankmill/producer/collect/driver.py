"""Drives the collector of a run: sends its chunks to the server, and gives it the results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import pyarrow as pa
from opentelemetry.trace import Span

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import InputError, RedisUnavailable, RunCancelled, RunFailed, RunTimeout
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.results import BadResult, ChunkResult, ChunkScores
from rankmill.jobs.contract.run import Progress, RowError, Run
from rankmill.jobs.protocol.runs import DetachedChunks, RunStore
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.system import system
from rankmill.producer.collect.collector import Accepted, Piece
from rankmill.producer.collect.detached import DetachedRun
from rankmill.producer.collect.live import LiveRun
from rankmill.producer.collect.pairs import OpenTables
from rankmill.producer.collect.presence import WorkerPresence
from rankmill.producer.collect.scored import EarlierScores, ScoredTable
from rankmill.producer.collect.sizing import AT_ONCE, Sizing, WindowSize
from rankmill.producer.collect.spool import Spool

_SWEEP_SECONDS = 10
"""After this many seconds of waiting for a chunk, the driver checks that the jobs of all chunks in Redis
still exist.
"""

_PATROL_SHARE = 0.1
_LONGEST_PATROL = 1.0
"""While a producer waits, it checks its run again and again. The pause between two checks is the share
`_PATROL_SHARE` of the time since the last result. It is at most `_LONGEST_PATROL` seconds, but never shorter
than `RunStore.patrol_seconds`.
"""

logger = logging.getLogger(__name__)


class RunDriver:
    """Submits the chunks of a run and yields its scored tables in input order.

    The driver works only while the caller iterates `tables`. It submits chunks only when the window has room,
    which bounds what Redis holds. Finished chunks that wait for an earlier one are in memory or on disk.

    Parameters
    ----------
    kept
        The run. Its class decides what becomes of results in Redis.
    source
        Yields the tables to score, one for each chunk.
    sizing
        The sizes by which the source cuts the tables.
    window
        Limits how many chunks may be in Redis without a result.
    reuse
        Scores of an earlier output. Pairs that have a score there are not sent to workers.
    """

    def __init__(
        self,
        kept: LiveRun,
        source: Iterator[pa.Table],
        sizing: Sizing,
        window: WindowSize,
        reuse: EarlierScores | None = None,
    ) -> None:
        self.run = kept.run
        self.on_wait: Callable[[], None] = lambda: None
        """Called again and again while waiting for results or for the server. An exception that it raises
        ends the wait.
        """
        self.on_show: Callable[[], None] = lambda: None
        """Called after `on_wait`, to show progress to the caller."""
        self.deadline = math.inf
        """When to stop waiting for results or for the server, in `time.monotonic` seconds."""
        self.scoring_since = math.inf
        """When the first worker had loaded the model and began to score a chunk (`time.monotonic` seconds);
        infinite until a result has come.
        """
        self.presence: WorkerPresence | None = None
        """Checks that the queue has workers while the run waits for results; ``None`` means no check."""
        self.is_detached = kept.stays
        """Whether the run continues without this process."""
        self.is_cancelled = False
        self._kept, self._store, self._sizing, self._window = kept, kept.store, sizing, window
        sizing.add(self.run)
        self._source = OpenTables(source, source)
        self.collector = kept.collector(window, reuse)
        self._spool = Spool(kept.folder)
        self._span = tracing.begin("run", run=self.run.id, model=self.run.spec.model, queue=self.run.queue)
        self._spans: dict[int, Span] = {}
        self._waits_since = self._collected = self._heard = system.monotonic()
        self._looked = -math.inf
        self._sized = sizing.is_known
        self._is_handed_out = False  # whether the reader has a table, and has not asked for the next one yet
        self._has_ended = False  # whether all tables were read, and the run was ended on the server
        # Held while results are accepted: another thread may call `cancel`, which must wait meanwhile.
        self._accepting = system.RLock()
        self._reading = system.Lock()  # held to read or close the source
        self._unsent: list[Piece] = []
        """Chunks, or parts of chunks, to send. After an interruption, the next call of `fill` sends them."""
        self._jobless: dict[ChunkId, str] = {}
        """Chunks, or parts of chunks, that may have no job in Redis, each with the reason (see `Accepted`).
        If a chunk or part is given up, the errors of its rows state the reason.
        """

    def begin(self) -> None:
        """Store the run on the server, unless it is stored together with its first chunks."""
        if self._kept.is_brief:
            # Put off the first call of `_look_at_workers`, because each Redis command costs time.
            self._looked = system.monotonic()
            return
        with self._at_redis():
            self._kept.restore(self.collector.how.settled)
            self._store.note(self.run, self.progress)
            self._look_at_workers()

    def tables(self) -> Iterator[ScoredTable]:
        """Yield every table of the source with its scores, in order.

        Raises
        ------
        RunFailed
            The run cannot be scored; for example, its model cannot be loaded. The subclass `WrongScores` is
            raised if a worker that has scored some of the rows computes wrong scores. This error may come
            after the last table.
        RunCancelled
            `cancel` was called, or another process cancelled the run.
        RunExpired
            The results of a detached run are no longer kept.
        RedisUnavailable, RedisFailed
            The server could not serve for as long as a command may wait, or it refuses a command.
        RunTimeout, NoWorkers
            `deadline` has passed, or no worker listens; call again to continue.
        InputError, OutputError
            The source cannot be read, or results cannot be written to the journal. Or an earlier reader has
            left a table unread.
        """
        collector = self.collector
        if self._has_ended:
            return
        self._heard = system.monotonic()
        try:
            self.refresh()
            if self._is_handed_out and not collector.done:
                self._check_cancelled()
                again = "attach to" if self.is_detached else "submit"
                raise InputError(
                    f"run {self.run.id} was read in part, and gives each row only once: {again} it again"
                )
            while not collector.done:
                self.fill()
                if collector.ready:
                    if collector.pieces and self._seconds_since(self._collected) > self._patrol_seconds:
                        self._catch_up()
                    part = self._spool.take(collector.taken)
                    collector.take()
                    self._is_handed_out = True
                    yield part
                    self._is_handed_out = False
                    self._waits_since = system.monotonic()
                elif not collector.done:
                    self._wait()
            # If scores are wrong, a worker leaves a note. A brief run needs no separate look for the note:
            # `end` reads it in the same command that deletes the run.
            if not self._kept.is_brief:
                with self._at_redis():
                    self._check_notes()
        except (RunFailed, RunCancelled):
            # Do not cancel a detached run: each process that collects it must be able to see the reason.
            if not (self.is_detached or self.is_cancelled):
                self.cancel()
            if self.is_cancelled:
                self._spool.close()
                self._close_source()
            raise
        self._spool.close()
        if why := self._kept.end(collector):
            raise self._kept.wrong(why)
        self._has_ended = True
        self._span.end()
        with about(run=self.run.id):
            done = self.progress
            logger.info("run complete: %d rows, %d without a score", done.rows, done.row_errors)

    @property
    def progress(self) -> Progress:
        return self.collector.rows.progress

    def row_errors(self) -> list[RowError]:
        """Collect the results that a detached run has so far, and return the errors of its rows without a
        score, in row order.
        """
        self.refresh()
        return sorted(self.collector.rows.errors, key=lambda error: error.row)

    def refresh(self) -> None:
        """Collect the results that a detached run has so far. Do nothing for other runs, because other runs
        only continue while the caller reads them.
        """
        if self.is_detached and not self.collector.complete:
            self._check_cancelled()
            self._catch_up()

    def fill(self) -> None:
        """Submit chunks if the window has room, but at most `AT_ONCE` chunks.

        Because of this limit, a call does not take long, and the caller can soon collect results again.
        """
        self._check_cancelled()
        if not self._unsent and self._wants_chunks():
            self._cut()
        if self._unsent:
            with self._at_redis():
                self._send()

    def cancel(self) -> None:
        """Cancel the run and remove its waiting chunks from the queue. If the run is detached, tell all
        processes that collect the run.
        """
        if not self.is_cancelled:
            self._span.add_event("cancelled")
            self._span.end()
        # After this, no result is accepted. `LiveRun.cancel` counts the usage of the accepted results.
        with self._accepting:
            self.is_cancelled = True
        late = system.monotonic() > self.deadline
        self._kept.cancel({*self.collector.pieces, *self.collector.answered}, hurry=late)
        self._close_source()

    def _close_source(self) -> None:
        """Close the run's source. If another thread is reading the source now, that thread closes it."""
        if self._reading.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._reading.release()

    def _wants_chunks(self) -> bool:
        has_room = self._spool.has_room or not self.collector.ready
        return has_room and not self._spool.full and self.collector.wants_chunks

    def _cut(self) -> None:
        """Cut chunks from the input until the window is full, but at most `AT_ONCE` chunks.

        Add a piece to `_unsent` for each chunk that has rows to send to workers.
        """
        for _ in range(AT_ONCE):
            if self._spool.full or not self.collector.has_room:
                break
            try:
                with self._reading:
                    table = next(self._source, None)
            except BaseException:
                self.cancel()  # a source that has failed would look complete
                raise
            if table is None:
                self._check_cancelled()  # the source also ends if another thread has cancelled the run
                self.collector.exhausted = True
                self._close_source()
                break
            number = self.collector.cut
            result = self._kept.known(number, len(table))
            if piece := self.collector.add(table, result):
                self._unsent.append(piece)
                self._spans[number] = tracing.begin("chunk", self._span, chunk=number, rows=len(table))
                piece.trace = tracing.carrier(self._spans[number])
            self._keep_finished()

    def _wait(self) -> None:
        """Collect results, waiting briefly for the first; a fatal failure ends the run."""
        self._look_around()
        with self._at_redis():
            patrol = self._patrol_seconds
            if self.presence and self._seconds_since(self._heard) > patrol:
                self.presence.check(self._heard)
            self._collect(0 if self._wants_chunks() else patrol)
            self._look_at_workers()
            if self._jobless or self._seconds_since(self._waits_since) > _SWEEP_SECONDS:
                self._waits_since = system.monotonic()
                self._sweep()
        if self.collector.fatal:
            raise RunFailed(self.collector.fatal.message, option=self.collector.fatal.option)

    def _catch_up(self) -> None:
        with self._at_redis():
            self._collect(0)
            self._look_at_workers()

    def _look_at_workers(self) -> None:
        """From time to time, adapt the window to the workers, report the progress, and check for wrong
        scores.
        """
        now, window, sized = system.monotonic(), self._window, self._sizing.is_known
        just_known = window.follows_workers and sized and not self._sized
        if now - self._looked < self._patrol_seconds and not just_known:
            return
        self._looked, self._sized = now, sized
        with suppress(RedisUnavailable), waiting(most=0):  # if the server cannot serve, ask it next time
            if window.follows_workers:
                capacity = self._store.capacity(self.run.queue)
                window.follow(capacity, self.collector.chunk_rows, sized=sized)
            if self.collector.rows.see(system.now()):
                self._store.note(self.run, self.progress)
            self._check_notes()

    def _check_notes(self) -> None:
        """End the run if a worker has left a note that scores are wrong.

        The note stays on the server, for other processes that collect the run or continue the run's output
        file.
        """
        if why := self._store.wrong(self._kept.made_by):
            self._check_existence()  # if the run was cancelled, raises RunCancelled instead
            raise self._kept.wrong(why)

    def _collect(self, seconds: float) -> None:
        """Collect the results that have arrived, waiting up to `seconds` for the first."""
        self._collected = system.monotonic()
        block = math.ceil(1000 * max(min(seconds, self.deadline - self._collected), 0))
        entries = self._kept.results(block)
        if not entries:
            self._check_existence()
            return
        self._heard = system.monotonic()
        if news := self.collector.news([result for _, result in entries]):
            is_last = self.collector.exhausted and len(self.collector.pieces) == 1
            self.collector.how.settled = self._kept.settle(news, is_last=is_last)
        accepted = self._accept(entries)
        self._kept.forget([entry for entry, _ in entries], self.collector)
        if self.is_cancelled:  # by another thread: delete what this one has written since
            self.cancel()
        self._jobless |= accepted.jobless

    def _accept(self, entries: Sequence[tuple[str, ChunkResult | BadResult]]) -> Accepted:
        with self._accepting:
            self._check_cancelled()
            accepted = self.collector.accept([result for _, result in entries], system.now())
            self._kept.used |= {entries[place][0]: used for place, used in accepted.used.items()}
            for piece, result in accepted.taken:
                if isinstance(result, ChunkScores):
                    stats = result.stats
                    rows, model = len(result.scores), self.run.spec.model
                    self._sizing.see(model, stats.worker, rows, stats.device_seconds)
                    self.scoring_since = min(self.scoring_since, system.monotonic() - stats.seconds)
                self._kept.log(piece, result)
            self._keep_finished()
        return accepted

    def _check_existence(self) -> None:
        """Raise an error if the run was cancelled, or its results are no longer kept."""
        if self._store.was_cancelled(self.run):
            logger.warning("run cancelled by another process")
            self.cancel()
        self._check_cancelled()
        if self.collector.pieces:
            self._kept.check_existence()

    def _keep_finished(self) -> None:
        finished = self.collector.pop_finished()
        results = {chunk.number: (len(chunk.part.table), chunk.result) for chunk in finished if chunk.result}
        self._kept.keep(results, self.collector.scored)
        for chunk in finished:
            self._spool.put(chunk.number, chunk.part)
            if span := self._spans.pop(chunk.number, None):
                span.end()

    def _sweep(self) -> None:
        """If Redis has lost a part of the run, write it again. Also send the chunks that have no job."""
        self._kept.restore(self.collector.how.settled)
        reasons, self._jobless = self._jobless, {}
        # Read this before looking for the jobs. Otherwise, if another process sends a lost chunk of a
        # detached run in between, the new attempt would count as a failed one.
        failed = self._store.failed_attempts(self.run)
        pieces = list(self.collector.pieces)
        missing = self._store.missing(self.run, pieces)
        if count := self._store.put_back(self.run, [piece for piece in pieces if piece not in {*missing}]):
            logger.warning("Redis has lost lists of the queue: %d chunks are put back", count)
        self._kept.look_back()
        self._collect(0)  # the job of a missing chunk may have just written a result
        missing = [piece for piece in missing if piece in self.collector.pieces]
        if lost := [piece for piece in missing if piece not in reasons]:
            logger.warning("Redis has lost %d chunks", len(lost))
        self._retry({piece: reasons.get(piece, "it was lost") for piece in missing}, failed)

    def _retry(self, reasons: Mapping[ChunkId, str], failed: Mapping[ChunkId, int]) -> None:
        """Submit the chunks in `reasons` again, because they have no job in Redis. A chunk without an attempt
        left fails.

        `reasons` has, for each chunk or part of a chunk, the reason to state if that chunk or part fails.
        `failed` has the numbers of failed attempts.
        """
        if not reasons:
            return
        self._unsent, given_up = self.collector.retry(reasons, failed)
        # A failure is written to Redis like a worker's result, so that all processes that collect the run
        # read it.
        for failure in given_up:
            self._store.write_result(self.run, failure)
        if self._unsent:
            logger.warning("submitting %d chunks again", len(self._unsent))
            self._send()

    def _send(self) -> None:
        pieces = self._unsent = [piece for piece in self._unsent if piece.id in self.collector.pieces]
        if not pieces:
            return
        payloads = self._kept.payloads(pieces)
        self.collector.sent({chunk: len(payload.pairs) for chunk, payload in payloads.items()})
        try:
            self._kept.enqueue(payloads)
        finally:
            if self.is_cancelled:  # by another thread: delete what this one has written since
                self.cancel()
        self._unsent = []
        for piece in pieces:
            with about(chunk=piece.chunk, job=keys.job_id(self.run.id, piece.id)):
                logger.debug("submitted %d rows", len(piece.table))

    def _check_cancelled(self) -> None:
        if self.is_cancelled:
            raise RunCancelled(f"run {self.run.id} was cancelled")

    @property
    def _patrol_seconds(self) -> float:
        """Seconds from one check of the run to the next. While no result comes, this time grows, so that many
        waiting producers do not burden the server.
        """
        quiet = _PATROL_SHARE * self._seconds_since(self._heard)
        return max(self._store.patrol_seconds, min(quiet, _LONGEST_PATROL))

    def _seconds_since(self, moment: float) -> float:
        return system.monotonic() - moment

    def _look_around(self) -> None:
        self.on_wait()
        self.on_show()
        self._check_cancelled()
        if system.monotonic() > self.deadline:
            raise RunTimeout(f"run {self.run.id}: {self.progress.rows} rows were done when the time was over")

    @contextmanager
    def _at_redis(self) -> Iterator[None]:
        """Let Redis commands in the ``with`` block wait while the server cannot serve. Call `_look_around`
        during the wait.
        """
        with about(run=self.run.id), redis_errors(), waiting(look=self._look_around, until=self.deadline):
            yield


def collect_detached(store: RunStore, run: Run, chunks: DetachedChunks) -> RunDriver:
    """Make a driver that collects a detached run, which any process may have submitted."""
    window = WindowSize(len(chunks.chunks), 0)
    return RunDriver(DetachedRun(store, run, chunks), iter(()), Sizing(1), window)
