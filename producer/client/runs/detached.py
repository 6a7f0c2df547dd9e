"""Runs whose results any process can fetch by the run's id, as often as it likes, until they expire."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError, RunCancelled, RunExpired, RunFailed, RunTimeout
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.results import BadResult, ChunkFailure, ChunkResult, ChunkScores
from rankmill.jobs.contract.run import Progress, RowError, Run
from rankmill.jobs.contract.wire import decode_pairs, encode_pairs
from rankmill.jobs.protocol.detached import (
    DetachedChunks,
    begin_submissions,
    read_chunks,
    read_submissions,
    write_chunks,
)
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.producer.client.runs.scores import Scores, as_array
from rankmill.producer.collect.agreed import Agreed
from rankmill.producer.collect.listeners import Listeners
from rankmill.producer.collect.splitting import scores_and_errors
from rankmill.producer.collect.window import FIRST_PIECE

_POLL_SECONDS = 0.5

_SWEEP_SECONDS = 10
"""After so long without a result, check that the jobs of all chunks still exist."""

_AT_ONCE = 64
"""Chunks that are put into Redis at once."""

logger = logging.getLogger(__name__)


class DetachedRun:
    """A run whose pairs and results are in Redis until ``run_ttl`` seconds after its submission.

    Any process that knows the id may fetch the scores. One thread at a time uses an object.

    Parameters
    ----------
    store, run
        The server, and the run there.
    chunks
        First row and number of rows of each of its chunks.
    listeners
        Looks whether there are workers; ``None``: nobody does.
    """

    def __init__(
        self, store: RunStore, run: Run, chunks: DetachedChunks, listeners: Listeners | None = None
    ) -> None:
        self._store = store
        self._run = run
        self._listeners = listeners
        self._chunks = dict(chunks.chunks)
        self._units = {start: (start, rows) for start, rows in chunks.chunks}
        """First row and number of rows of each chunk, or piece of one, without a result, by its number."""
        self._numbers = {*self._units}
        """Numbers of all chunks and pieces, those with a result included."""
        self._results: dict[int, tuple[int, ChunkResult]] = {}
        """Rows and result by first row."""
        self._agreed = Agreed(run.spec, None)  # with the first result, which is the same in every process
        self._last = "0"
        self._deadline = math.inf
        self._heard = time.monotonic()

    @property
    def id(self) -> str:
        """The run's id, with which any process can fetch its scores."""
        return self._run.id

    @property
    def progress(self) -> Progress:
        """The rows that are done now."""
        with self._at_redis():
            self._collect(0)
        return self._progress()

    def scores(self, timeout: float | None = None) -> Scores:
        """Wait for all scores: float32 of shape ``[n]``, NaN for the rows in its ``errors``.

        Parameters
        ----------
        timeout
            Longest time to wait, in seconds.

        Raises
        ------
        RunTimeout, NoWorkers
            Some scores are still missing. The run goes on.
        RunExpired
            The results are no longer kept.
        RunFailed, RunCancelled
            The run has ended without all of its scores.
        """
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        swept = self._heard = time.monotonic()
        with self._at_redis():
            while True:
                split = self._collect(_POLL_SECONDS)
                if not self._units:
                    return self._whole()
                self._look()
                now = time.monotonic()
                if split or now - max(swept, self._heard) > _SWEEP_SECONDS:
                    swept = now
                    self._sweep()
                if self._listeners:
                    self._listeners.check(self._heard)

    def row_errors(self) -> list[RowError]:
        """The rows without a score so far, in order."""
        with self._at_redis():
            self._collect(0)
        found: list[RowError] = []
        for start, (rows, result) in sorted(self._results.items()):
            if isinstance(result, ChunkScores):
                attempts, worker = result.stats.attempt, result.stats.worker
            else:
                attempts, worker = result.attempts, result.worker
            _, reasons = scores_and_errors(result, rows)
            found += [
                RowError(row=row, error=why, attempts=attempts, worker=worker)
                for row, why in enumerate(reasons.to_pylist(), start)
                if why is not None
            ]
        return found

    def cancel(self) -> None:
        """Delete the run with its results: its waiting chunks leave the queue."""
        with redis_errors():
            self._store.delete(self._run, self._numbers, tell=True)

    def _collect(self, seconds: float) -> bool:
        """Read new results, which stay in Redis; return whether chunks have to be split."""
        block = math.ceil(1000 * max(min(seconds, self._deadline - time.monotonic()), 0))
        entries = self._store.results(self._run, after=self._last, block_ms=block)
        if not entries:
            if self._store.was_cancelled(self._run):
                raise RunCancelled(f"run {self.id} was cancelled")
            if self._units and not self._store.exists(self.id):
                raise expired(self.id, self._run.ttl)
            return False
        self._last = entries[-1][0]
        split = [self._accept(result) for _, result in entries]
        self._store.note(self._run, self._progress())
        return any(split)

    def _accept(self, result: ChunkResult | BadResult) -> bool:
        """Take in a result; return whether its rows must be submitted (again)."""
        if result.chunk not in self._units:
            return False
        self._heard = time.monotonic()
        start, rows = self._units[result.chunk]
        if isinstance(result, BadResult) or (isinstance(result, ChunkScores) and len(result.scores) != rows):
            return True
        if isinstance(result, ChunkFailure) and result.fatal:
            raise RunFailed(result.message)
        if isinstance(result, ChunkScores) and self._agreed.objection(result.stats, lambda first: first):
            return True
        del self._units[result.chunk]
        if isinstance(result, ChunkFailure) and result.died and rows > 1:
            depth, half = result.chunk // FIRST_PIECE + 1, rows // 2
            for first, size in ((start, half), (start + half, rows - half)):
                self._units[depth * FIRST_PIECE + first] = (first, size)  # the same numbers in every process
            self._numbers |= self._units.keys()
            return True
        self._results[start] = (rows, result)
        return False

    def _sweep(self) -> None:
        """Submit chunks and pieces that have no job, and no result either.

        Their submissions are counted in Redis, for all processes together: as many as a chunk of a live run
        has. Who gives one up says so in the stream, so that all read the same.
        """
        submitted = read_submissions(self._store.redis, self.id)
        units = list(self._units)
        lost = self._store.missing(self._run, units)
        if found := self._store.put_back(self._run, [number for number in units if number not in {*lost}]):
            logger.warning("Redis has lost lists of the queue: %d chunks are put back", found)
        self._last = "0"  # a server that lost its last entries may give new ones lower numbers
        self._collect(0)  # a missing job may have finished meanwhile
        lost = [number for number in lost if number in self._units]
        if lost:
            self._store.restore(self._run)  # without its stream there would be no results
            self._store.unlist(self._run)
        again: dict[int, Payload] = {}
        for number in lost:
            start, rows = self._units[number]
            submits = submitted[number] + (number < FIRST_PIECE)  # pieces are first submitted here
            if submits > self._run.max_retries:
                message = f"given up after {submits} submissions: it was lost, or its result cannot be used"
                failure = ChunkFailure(chunk=number, message=message, fatal=False, attempts=submits)
                self._store.write_result(self._run, failure)
            else:
                again[number] = Payload(self._pairs(start, rows), rows, suspect=number >= FIRST_PIECE)
        numbers = {number: submitted[number] + 1 for number in again}
        if begun := begin_submissions(self._store.redis, self._run, numbers) if again else []:
            logger.warning("submitting %d chunks", len(begun))
            self._store.enqueue(self._run, {number: again[number] for number in begun})

    def _pairs(self, start: int, rows: int) -> bytes:
        """The payload of some rows, from that of their chunk."""
        chunk = max(first for first in self._chunks if first <= start)
        payload = self._store.payload(self._run, chunk)
        if payload is None:
            raise expired(self.id, self._run.ttl)
        if rows == self._chunks[chunk]:
            return payload
        queries, passages = (side[start - chunk : start - chunk + rows] for side in decode_pairs(payload))
        return encode_pairs(pa.array(queries, pa.string()), pa.array(passages, pa.string()))

    def _progress(self) -> Progress:
        found = [(rows, *scores_and_errors(result, rows)) for rows, result in self._results.values()]
        without = sum(scores.null_count for _, scores, _ in found)
        return Progress(rows=sum(rows for rows, _, _ in found), row_errors=without, at=time.time())

    def _whole(self) -> Scores:
        parts: list[npt.NDArray[np.float32]] = []
        errors: dict[int, str] = {}
        for start, (rows, result) in sorted(self._results.items()):
            scores, reasons = scores_and_errors(result, rows)
            parts.append(as_array(scores))
            errors |= {start + row: why for row, why in enumerate(reasons.to_pylist()) if why is not None}
        stats = [result.stats for _, result in self._results.values() if isinstance(result, ChunkScores)]
        return Scores.of(parts, errors, stats[0].labels if stats else ())

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            done = sum(rows for rows, _ in self._results.values())
            raise RunTimeout(f"run {self.id}: {done} rows were done when the time was over")

    @contextmanager
    def _at_redis(self) -> Iterator[None]:
        with about(run=self.id), redis_errors(), waiting(look=self._look):
            yield


def submit_detached(
    store: RunStore, run: Run, tables: Iterator[pa.Table], columns: tuple[str, str], most_bytes: int
) -> DetachedChunks:
    """Put all pairs of a run into Redis, `most_bytes` of payload at most.

    Raises
    ------
    InputError
        There are none, or too many.
    """
    chunks: list[tuple[int, int]] = []
    size, waiting_payloads = 0, dict[int, Payload]()
    start = 0
    with redis_errors():
        try:
            for table in tables:
                payload = encode_pairs(*(table[name] for name in columns))
                size += len(payload)
                if size > most_bytes:
                    raise InputError(
                        f"the pairs need more than {most_bytes >> 20} MiB in Redis (window_mib): write them "
                        "to a file, and hand it to runners with submit_file"
                    )
                if not chunks:
                    store.restore(run)
                chunks.append((start, len(table)))
                waiting_payloads[start] = Payload(payload, len(table))
                start += len(table)
                if len(waiting_payloads) == _AT_ONCE:
                    _enqueue(store, run, waiting_payloads)
            if not chunks:
                raise InputError("there are no pairs to score")
            _enqueue(store, run, waiting_payloads)
            found = DetachedChunks(chunks=tuple(chunks))
            write_chunks(store.redis, run, found)
            store.unlist(run)
        except BaseException:
            if chunks:
                store.delete(run, [first for first, _ in chunks])
            raise
    return found


def _enqueue(store: RunStore, run: Run, payloads: dict[int, Payload]) -> None:
    sent: Mapping[int, Payload] = dict(payloads)
    payloads.clear()
    store.enqueue(run, sent)


def attach_detached(store: RunStore, run_id: str, ttl: int, listeners: Listeners | None) -> DetachedRun:
    """The detached run with this id.

    Raises
    ------
    RunExpired
        There is none, or not any more.
    """
    with redis_errors():
        run, chunks = store.load(run_id), read_chunks(store.redis, run_id)
    if run is None or chunks is None:
        raise expired(run_id, ttl)
    return DetachedRun(store, run, chunks, listeners)


def expired(run_id: str, ttl: int) -> RunExpired:
    """The error for results that are not there (any more)."""
    return RunExpired(
        f"there are no results of run {run_id}: they are kept for {ttl:,} s (run_ttl) after its submission, "
        "unless the run is cancelled or the server loses its data"
    )
