"""Drives the collector of a run: sends its chunks to the server, and brings it what comes back."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice

import pyarrow as pa
from opentelemetry.trace import Span

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import (
    InputError,
    OutputError,
    RedisUnavailable,
    RunCancelled,
    RunExpired,
    RunFailed,
    RunTimeout,
    WrongScores,
)
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.results import BadResult, ChunkResult, ChunkScores
from rankmill.jobs.contract.run import MAX_ROW_ERRORS, Progress, RowError, Run
from rankmill.jobs.contract.usage import NO_DEVICE, Amounts
from rankmill.jobs.contract.wire import decode_rows, encode_rows
from rankmill.jobs.protocol.accounts import END
from rankmill.jobs.protocol.runs import DetachedChunks, RunStore
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.system import system
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.collector import AT_ONCE, Accepted, Collector, Piece
from rankmill.producer.collect.earlier import EarlierScores
from rankmill.producer.collect.journal import Account, Journal
from rankmill.producer.collect.pairs import OpenTables
from rankmill.producer.collect.presence import WorkerPresence
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import ChunkSize, Sizes, WindowSize
from rankmill.producer.collect.spool import Spool

_SWEEP_SECONDS = 10
"""After waiting so long for a chunk, check that the jobs of all chunks in Redis still exist."""

_PATROL_SHARE = 0.1
_LONGEST_PATROL = 1.0
"""A producer that has long heard nothing looks after its run again when it has waited a tenth of that more,
but at least once a second."""

_ENCODERS = 8
"""Most threads that encode and compress chunks; Arrow releases Python's lock meanwhile."""

logger = logging.getLogger(__name__)


class RunDriver:
    """Submits the chunks of a run and yields its scored tables in input order.

    It works while the caller iterates `tables`: it submits chunks when the window has room, so Redis never
    holds more than the window allows. Finished chunks that wait for an earlier one are in memory or on disk.
    It deletes from Redis what it has collected.

    A detached run is in Redis as a whole (`submit_detached`). Any number of processes may collect it, so its
    pairs and results stay there until they expire, and all that is decided of it is decided alike by all.

    Parameters
    ----------
    store, run
        The server, and the run that `begin` stores there.
    cleaner
        Removes the run from Redis when it has ended.
    source, columns
        Tables to score, one chunk each, and the names of their query and passage columns.
    sizes
        How many chunks may be in Redis without a result, and how large the source cuts them.
    journal
        Stores each result before Redis deletes it. Chunks whose result it has are not submitted.
    reuse
        As of `Collector`.
    detached
        The chunks of a detached run; it needs no source.
    row_tokens
        Whether workers are asked for the tokens of each row.
    """

    def __init__(
        self,
        store: RunStore,
        run: Run,
        cleaner: RunCleaner,
        source: Iterator[pa.Table],
        columns: tuple[str, ...],
        sizes: Sizes,
        journal: Journal | None = None,
        reuse: EarlierScores | None = None,
        *,
        detached: DetachedChunks | None = None,
        row_tokens: bool = False,
    ) -> None:
        self.run = run
        self.is_detached = detached is not None
        self.on_wait: Callable[[], None] = lambda: None
        """Called at least every second while waiting; an exception it raises ends the wait."""
        self.deadline = math.inf
        """When to stop waiting, in `time.monotonic` seconds."""
        self.scoring_since = math.inf
        """When the scoring of a chunk began first, with its model loaded, in `time.monotonic` seconds."""
        self.presence: WorkerPresence | None = None
        """Looks for workers; ``None``: no check."""
        self._store, self._cleaner, self._columns = store, cleaner, columns
        self._source = OpenTables(source, source)
        self._journal, self._sizes, self._row_tokens = journal, sizes, row_tokens
        finished = journal.finished if journal else None
        self.collector = Collector(
            run,
            sizes.window,
            RowCounter(
                journal.rows if journal else 0,
                finished.row_errors if finished else 0,
                sys.maxsize if detached else MAX_ROW_ERRORS,
            ),
            first=journal.first if journal else None,
            start=finished.rows if finished else 0,
            reuse=reuse,
            scored=journal.account.scored if journal else 0,
        )
        self._used: dict[str, dict[str, Amounts]] = {}
        """What the collected results have used that are still in Redis, by their entries."""
        self._spool = Spool(journal.folder if journal else None)
        self._span = tracing.begin("run", run=run.id, model=run.spec.model, queue=run.queue)
        self._spans: dict[int, Span] = {}
        self._encoders: ThreadPoolExecutor | None = None
        self._waits_since = self._collected = self._heard = system.monotonic()
        self._is_request = run.priority == "request" and journal is None and not detached
        self._made_by = [*(journal.runs if journal else ()), run.id]
        """The runs that have made the scores, of which none may be wrong."""
        self._new = self._is_request  # until the run is stored, together with its first chunks
        self._looked = self._heard if self._is_request else -math.inf
        self._sized = sizes.chunks.known  # when workers were last looked at
        self._after = "0"  # where a detached run's stream is read on
        self._entries: list[str] = []  # ids of what was collected of the stream and is still in Redis
        self._cancelled = False
        self._accepting = system.RLock()  # held by whoever takes results, or cancels, as another thread may
        self._reading = system.Lock()  # held by whoever reads the source, or closes it
        self._late = False  # whether the caller's time was over, when it was last looked at
        self._chunks = dict(detached.chunks if detached else ())
        if detached:
            self.collector.exhausted = True
            for rows in self._chunks.values():
                self.collector.add(pa.table({"": pa.nulls(rows)}).select([]))

    def begin(self) -> None:
        """Store the run on the server, unless it is a request."""
        if not self._new:
            with self._at_redis():
                self._restore()
                self._store.note(self.run, self.progress)
                self._look_at_workers()

    def tables(self) -> Iterator[ScoredTable]:
        """Yield every table of the source with its scores, in order.

        Raises
        ------
        RunFailed
            The run cannot be scored: for example, its model cannot be loaded. `WrongScores`: a worker that
            has scored some of it computes wrong scores; perhaps after the last table.
        RunCancelled
            `cancel` was called, or another process cancelled the run.
        RunExpired
            The results of a detached run are no longer kept.
        RedisUnavailable, RedisFailed
            The server could not serve during the whole allowed wait, or it refuses a command.
        RunTimeout, NoWorkers
            `deadline` has passed, or there are no workers; call again to go on.
        """
        collector = self.collector
        self._heard = system.monotonic()
        try:
            self.refresh()
            while not collector.done:
                self.fill()
                if collector.ready:
                    if collector.pieces and self._seconds_since(self._collected) > self._patrol_seconds:
                        self._catch_up()
                    yield self._spool.take(collector.take())
                    self._waits_since = system.monotonic()
                elif not collector.done:
                    self._wait()
        except (RunFailed, RunCancelled):
            self._spool.close()
            self._close_source()
            raise
        self._spool.close()
        if not self._is_request:  # of which the next command tells
            with self._at_redis():
                self._check_notes()
        if not self.is_detached:
            used = self._used_in_all()
            deleted = self._cleaner.remove(self.run, [], answered=collector.answered, used=used)
            if deleted and deleted.wrong:
                raise self._wrong(deleted.wrong)
        self._span.end()
        with about(run=self.run.id):
            done = self.progress
            logger.info("run complete: %d rows, %d without a score", done.rows, done.row_errors)

    @property
    def progress(self) -> Progress:
        """The rows done so far, those of unfinished chunks included."""
        return self.collector.rows.progress

    def row_errors(self) -> list[RowError]:
        """The rows of a detached run that have no score so far, in order."""
        self.refresh()
        return sorted(self.collector.rows.errors, key=lambda error: error.row)

    def refresh(self) -> None:
        """Collect the results so far of a detached run, which goes on without a reader."""
        if self.is_detached and not self.collector.complete:
            self._check_cancelled()
            self._catch_up()

    def fill(self) -> None:
        """Submit some chunks if the window has room; between two such steps, results are collected."""
        self._check_cancelled()
        if self._wants_chunks() and (fresh := self._cut()):
            with self._at_redis():
                self._send(fresh)

    def cancel(self) -> None:
        """Cancel the run and remove its waiting chunks from the queue; all who collect it are told."""
        if not self._cancelled:
            self._span.add_event("cancelled")
            self._span.end()
        with self._accepting:  # what is accepted is counted below, and nothing more is accepted
            self._cancelled = True
        chunks = {*self.collector.pieces, *self.collector.answered}
        if self.is_detached:
            with redis_errors():
                self._store.delete(self.run, chunks, tell=True)
        else:
            used = self._used
            if self._journal:  # a signal may come when a result is there, but before this process knows
                with suppress(InputError, OutputError):  # one that cannot be read keeps no run from its end
                    used = self._journal.account.used
            deleted = self._cleaner.remove(self.run, chunks, hurry=self._late, used=used)
            if deleted and self._journal:
                self._journal.is_in_redis = False
        self._close_source()

    def _close_source(self) -> None:
        """Close what the run reads; if another thread reads just now, that one closes it."""
        if self._reading.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._reading.release()

    def _wants_chunks(self) -> bool:
        has_room = not self.collector.ready or self._spool.has_room(self.collector.most_bytes)
        return has_room and not self._spool.full and self.collector.wants_chunks

    def _cut(self) -> list[Piece]:
        """Cut chunks until the window is full, or there are several; return the pieces to send."""
        fresh: list[Piece] = []
        for _ in range(AT_ONCE):
            if self._spool.full or not self.collector.has_room:
                break
            with self._reading:
                table = next(self._source, None)
            if table is None:
                self._check_cancelled()  # another thread has closed the source, of which there may be more
                self.collector.exhausted = True
                self._close_source()
                break
            number = self.collector.cut
            if piece := self.collector.add(table, self._known(number, len(table))):
                fresh.append(piece)
                self._spans[number] = tracing.begin("chunk", self._span, chunk=number, rows=len(table))
            self._keep_finished()
        return fresh

    def _known(self, chunk: int, rows: int) -> ChunkResult | None:
        """The result of a chunk, if an earlier run has left a sound one."""
        if self._journal is None:
            return None
        damaged = self._journal.damaged_rows
        known = self._journal.get(chunk, rows)
        self.collector.rows.lose(self._journal.damaged_rows - damaged)
        return known

    def _wait(self) -> None:
        """Collect results, waiting a little for the first; a fatal failure ends the run."""
        self._look_around()
        with self._at_redis():
            patrol = self._patrol_seconds
            if self.presence and self._seconds_since(self._heard) > patrol:
                self.presence.check(self._heard)
            self._collect(0 if self._wants_chunks() else patrol)
            self._look_at_workers()
            if self._seconds_since(self._waits_since) > _SWEEP_SECONDS:
                self._sweep()
                self._waits_since = system.monotonic()
        if self.collector.fatal:
            if not self.is_detached:
                self.cancel()
            raise RunFailed(self.collector.fatal.message, option=self.collector.fatal.option)

    def _catch_up(self) -> None:
        """Collect what is there, without a wait."""
        with self._at_redis():
            self._collect(0)
            self._look_at_workers()

    def _look_at_workers(self) -> None:
        """Note from time to time how much workers have scored of their chunks, and how much they prefetch.

        Also end the run if they have left a note that scores are wrong.
        """
        now, window = system.monotonic(), self._sizes.window
        sized = self._sizes.chunks.known
        just_known = window.follows_workers and sized and not self._sized
        if now - self._looked < self._patrol_seconds and not just_known:
            return
        self._looked, self._sized = now, sized
        with suppress(RedisUnavailable), waiting(most=0):  # other commands wait for the server
            if window.follows_workers:
                capacity = self._store.capacity(self.run.queue)
                window.follow(capacity, self.collector.chunk_rows, sized=sized)
            if self.collector.see(self._store.scored_rows(self.run), system.now()):
                self._store.note(self.run, self.progress)
            self._check_notes()

    def _check_notes(self) -> None:
        """End the run if a worker has left a note that scores are wrong.

        The note stays, for others who collect the run or continue the file.
        """
        if why := self._store.wrong(self._made_by):
            self._check_existence()  # one that is cancelled meanwhile ends so
            if not self.is_detached:
                self.cancel()
            raise self._wrong(why)

    def _wrong(self, why: str) -> WrongScores:
        """The error for wrong scores; a journal with some is not continued."""
        if self._journal:
            return self._journal.distrust(why)
        return WrongScores(f"scores of run {self.run.id} are wrong: {why}; score it again")

    def _collect(self, seconds: float) -> None:
        """Collect the results that have arrived, waiting up to `seconds` for the first.

        It keeps no position in the stream of a run that is not detached: what it has read it deletes, and a
        server that lost its data may number new results lower than those before.
        """
        self._collected = system.monotonic()
        block = math.ceil(1000 * max(min(seconds, self.deadline - self._collected), 0))
        entries = self._store.results(self.run, after=self._after, block_ms=block)
        if not entries:
            self._check_existence()
            return
        self._heard = system.monotonic()
        self._settle([result for _, result in entries])
        accepted = self._accept(entries)
        if self.is_detached:
            self._after = entries[-1][0]
            is_done = self.collector.complete and not self.collector.fatal
            self._store.note(self.run, self.progress, self._used_in_all() if is_done else self._used)
            self._used = {}
            if accepted.halves or accepted.unusable:
                self._waits_since = -math.inf  # the waiting producer finds out which were never sent
            return
        self._entries += [entry for entry, _ in entries]
        if not (self._is_request and self.collector.complete):  # else all of it is deleted now
            self._forget()
        self._retry({half.number: "it was lost" for half in accepted.halves})
        if accepted.unusable:  # those that have a job will have another result
            why = accepted.unusable
            lost = self._store.missing(self.run, why)
            self._retry({number: f"its result cannot be used: {why[number]}" for number in lost})

    def _accept(self, entries: Sequence[tuple[str, ChunkResult | BadResult]]) -> Accepted:
        with self._accepting:
            self._check_cancelled()
            accepted = self.collector.accept([result for _, result in entries], system.now())
            self._used |= {entries[place][0]: used for place, used in accepted.used.items()}
            for piece, result in accepted.taken:
                if isinstance(result, ChunkScores):
                    stats = result.stats
                    self._sizes.chunks.see(stats.worker, len(result.scores), stats.device_seconds)
                    self.scoring_since = min(self.scoring_since, system.monotonic() - stats.seconds)
                if not self.is_detached:  # whoever collects it again is told of nothing new
                    log_result(piece, result, self.run.id)
            self._keep_finished()
        return accepted

    def _check_existence(self) -> None:
        """Raise an error if the run was cancelled, or is detached and has expired."""
        if self._store.was_cancelled(self.run):
            logger.warning("run cancelled by another process")
            self.cancel()
        self._check_cancelled()
        if self.is_detached and self.collector.pieces and not self._store.exists(self.run.id):
            raise expired(self.run.id, self.run.ttl)

    def _settle(self, results: Sequence[ChunkResult | BadResult]) -> None:
        """Fix what the run is scored with, if these are its first results.

        Nobody need know where no other chunk is to be scored. The first result of a detached run is the same
        in every process.
        """
        if news := self.collector.news(results):
            is_last = self.collector.exhausted and len(self.collector.pieces) == 1
            alone = is_last or self.is_detached
            self.collector.how.settled = news if alone else self._store.settle(self.run, news)

    def _keep_finished(self) -> None:
        """Put finished chunks into the journal, and where they wait for their turn."""
        finished = self.collector.pop_finished()
        results = {each.number: (len(each.part.table), each.result) for each in finished if each.result}
        if self._journal and results:
            account = Account(scored=self.collector.scored, used=self._used, rest=self._journal.account.rest)
            self._journal.add(results, account)
        for chunk in finished:
            self._spool.put(chunk.number, chunk.part)
            if span := self._spans.pop(chunk.number, None):
                span.end()

    def _forget(self) -> None:
        """Delete the collected results from Redis, and write the run's progress there."""
        collector, rows = self.collector, self.collector.rows
        self._store.forget(
            self.run, collector.answered, self._entries, self.progress, rows.errors, self._used
        )
        collector.answered, self._entries, rows.errors, self._used = [], [], [], {}
        if self._cancelled:  # meanwhile, by another thread
            self.cancel()

    def _used_in_all(self) -> dict[str, dict[str, Amounts]]:
        """What is to be counted of the complete run: also its rows that no device has scored."""
        account, rest = self._journal and self._journal.account, self.collector.rest()
        if self._journal and account:
            if account.rest:  # a run that was complete has told of them
                return self._used
            self._journal.keep_account(account.model_copy(update={"rest": rest}))
        return {**self._used, END: {NO_DEVICE: rest}} if any(rest) else self._used

    def _sweep(self) -> None:
        """Store again what Redis has lost of the run; give up chunks without a job and an attempt left."""
        if not self.is_detached or self._store.exists(self.run.id):
            self._restore()  # without its stream, all results are lost, also that a chunk kills its workers
        pieces = list(self.collector.pieces)
        lost = self._store.missing(self.run, pieces)
        if found := self._store.put_back(self.run, [number for number in pieces if number not in {*lost}]):
            logger.warning("Redis has lost lists of the queue: %d chunks are put back", found)
        self._after = "0"  # a server that lost its last entries may give new ones lower numbers
        self._collect(0)  # a missing job may have finished meanwhile; its result came with its end
        if lost := [number for number in lost if number in self.collector.pieces]:
            logger.warning("Redis has lost %d chunks", len(lost))
            self._retry(dict.fromkeys(lost, "it was lost"))

    def _retry(self, reasons: Mapping[int, str]) -> None:
        """Submit pieces (again), by number. A piece without an attempt left fails with its reason."""
        if not reasons:
            return
        again, given_up = self.collector.retry(reasons, self._store.failed_attempts(self.run))
        self._restore()
        for failure in given_up:  # whoever collects the run reads the same
            self._store.write_result(self.run, failure)
        if again:
            mine = self._store.count_attempts(self.run, {piece.number: piece.failed for piece in again})
            if self.is_detached:  # another process may send some
                again = [piece for piece in again if piece.number in mine]
        if again:
            logger.warning("submitting %d chunks again", len(again))
            self._send(again)

    def _restore(self) -> None:
        """Store the run on the server again, with what is settled."""
        self._store.restore(self.run)
        if self.is_detached:
            self._store.unlist(self.run)
        if any(self.collector.how.settled):
            self._store.settle(self.run, self.collector.how.settled, over=True)

    def _send(self, pieces: Sequence[Piece]) -> None:
        if self.is_detached:
            payloads = {piece.number: self._payload(piece, self._stored_pairs(piece)) for piece in pieces}
        else:
            rows = sum(len(piece.table) for piece in pieces)
            payloads = self._store.compute(lambda: self._encode(pieces), rows)
        self.collector.sent({number: len(payload.pairs) for number, payload in payloads.items()})
        try:
            self._store.enqueue(self.run, payloads, new=self._new)
            self._new = False
        finally:
            if self._cancelled:  # meanwhile, by another thread
                self.cancel()
        for piece in pieces:
            with about(chunk=piece.chunk, job=keys.job_id(self.run.id, piece.number)):
                logger.debug("submitted %d rows", len(piece.table))

    def _encode(self, pieces: Sequence[Piece]) -> dict[int, Payload]:
        """The payloads of pieces, by number; several are encoded at once, in threads."""

        def encoded(piece: Piece) -> Payload:
            columns = [piece.table[name] for name in self._columns]
            return self._payload(piece, encode_rows(columns, self.run.inputs))

        if len(pieces) == 1:
            return {pieces[0].number: encoded(pieces[0])}
        if self._encoders is None:
            self._encoders = system.Executor(min(cores(), _ENCODERS), "rankmill-encode")
        payloads = self._encoders.map(encoded, pieces)
        return {piece.number: payload for piece, payload in zip(pieces, payloads, strict=True)}

    def _payload(self, piece: Piece, pairs: bytes) -> Payload:
        span = self._spans.get(piece.chunk)
        return Payload(
            pairs,
            len(piece.table),
            tracing.carrier(span) if span else {},
            suspect=piece.suspect,
            row_tokens=self._row_tokens,
            failed=piece.failed,
        )

    def _stored_pairs(self, piece: Piece) -> bytes:
        """The pairs of a detached run's piece, from those of its chunk."""
        payload = self._store.payload(self.run, piece.chunk)
        if payload is None:
            raise expired(self.run.id, self.run.ttl)
        rows = len(piece.table)
        if rows == self._chunks[piece.chunk]:
            return payload
        sides = (side[piece.start : piece.start + rows] for side in decode_rows(payload, self.run.inputs))
        return encode_rows([pa.array(side, pa.string()) for side in sides], self.run.inputs)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise RunCancelled(f"run {self.run.id} was cancelled")

    @property
    def _patrol_seconds(self) -> float:
        """Until it looks around again; less often when it has long heard nothing, as many may wait."""
        quiet = _PATROL_SHARE * self._seconds_since(self._heard)
        return max(self._store.patrol_seconds, min(quiet, _LONGEST_PATROL))

    def _seconds_since(self, moment: float) -> float:
        return system.monotonic() - moment

    def _look_around(self) -> None:
        self.on_wait()
        self._check_cancelled()
        self._late = system.monotonic() > self.deadline
        if self._late:
            raise RunTimeout(f"run {self.run.id}: {self.progress.rows} rows were done when the time was over")

    @contextmanager
    def _at_redis(self) -> Iterator[None]:
        """Redis commands in the ``with`` block wait for the server; `_look_around` is called meanwhile."""
        with about(run=self.run.id), redis_errors(), waiting(look=self._look_around, until=self.deadline):
            yield


def submit_detached(
    store: RunStore, run: Run, tables: Iterator[pa.Table], columns: tuple[str, ...], most_bytes: int
) -> DetachedChunks:
    """Put all pairs of a run into Redis, `most_bytes` of payload at most.

    Raises
    ------
    InputError
        There are none, or too many.
    """
    chunks: list[tuple[int, int]] = []
    size, start = 0, 0
    with redis_errors():
        try:
            while batch := list(islice(tables, AT_ONCE)):
                is_new, payloads = not chunks, dict[int, Payload]()
                for table in batch:
                    payload = encode_rows([table[name] for name in columns], run.inputs)
                    size += len(payload)
                    if size > most_bytes:
                        raise InputError(
                            f"the pairs need more than {most_bytes >> 20} MiB in Redis (window_mib): write "
                            "them to a file, and hand it to runners with submit_file"
                        )
                    chunks.append((start, len(table)))
                    payloads[start] = Payload(payload, len(table))
                    start += len(table)
                store.enqueue(run, payloads, new=is_new)
            if not chunks:
                raise InputError("there are no pairs to score")
            found = DetachedChunks(chunks=tuple(chunks))
            store.write_chunks(run, found)
            store.unlist(run)  # it would be listed as unfinished until it expires
        except BaseException:
            if chunks:
                store.delete(run, [first for first, _ in chunks])
            raise
        finally:
            OpenTables(tables, tables).close()
    return found


def collect_detached(store: RunStore, run: Run, chunks: DetachedChunks) -> RunDriver:
    """Collects a run that some process has submitted."""
    sizes = Sizes(WindowSize(len(chunks.chunks), 0), ChunkSize(1, run.spec.model, None, {}))
    return RunDriver(store, run, RunCleaner(store), iter(()), ("", ""), sizes, detached=chunks)


def log_result(piece: Piece, result: ChunkResult, run: str) -> None:
    """Log the result of a job, but not its error messages: they may contain text of the input."""
    worker = result.stats.worker if isinstance(result, ChunkScores) else result.worker
    with about(chunk=piece.chunk, job=keys.job_id(run, piece.number), worker=worker):
        rows = len(piece.table)
        if isinstance(result, ChunkScores):
            logger.debug("collected %d rows, %d without a score", rows, result.scores.null_count)
        elif result.died and rows > 1:
            logger.warning("%d rows whose workers died; trying their halves apart", rows)
        else:
            logger.warning("%d rows are given up after %d attempts", rows, result.attempts)


def expired(run_id: str, ttl: int) -> RunExpired:
    """The error for results that are not there (any more)."""
    return RunExpired(
        f"there are no results of run {run_id}: they are kept for {ttl:,} s (run_ttl) after its submission, "
        "unless the run is cancelled or the server loses its data"
    )
