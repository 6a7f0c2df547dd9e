"""A run that only this process collects. Collected results are deleted from Redis.

A detached run treats its results differently: see `rankmill.producer.collect.detached`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rankmill.jobs.contract.errors import InputError, OutputError, WrongScores
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.keys import ChunkId, job_id
from rankmill.jobs.contract.results import NO_DEVICE, Amounts, BadResult, ChunkResult, ChunkScores, Usage
from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.wire import encode_rows
from rankmill.jobs.protocol.accounts import END
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.system import system
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.collector import Collector, Piece
from rankmill.producer.collect.journal import Account, Journal
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.scored import EarlierScores
from rankmill.producer.collect.sizing import WindowSize

_ENCODERS = 8
"""At most this many threads encode and compress the chunks of a run. Several threads help, because Arrow
encodes without Python's lock.
"""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveRun:
    """A run that only this process collects. Collected results are deleted from Redis.

    Parameters
    ----------
    store, run
        The store of runs in Redis, and the run.
    cleaner
        Removes the run from Redis when it has ended.
    columns
        Names of the query and passage columns of the run's tables, or of the only column.
    row_tokens
        Whether to ask workers how many tokens each row has.
    """

    store: RunStore
    run: Run
    cleaner: RunCleaner
    columns: tuple[str, ...]
    row_tokens: bool = field(default=False, kw_only=True)

    stays: ClassVar = False
    """Whether pairs and results stay in Redis until they expire, so that any process can collect the results.
    """
    is_brief: ClassVar = False
    """Whether the run is stored together with its first chunks, and deleted together with its last results.
    """

    def __post_init__(self) -> None:
        self.folder: Path | None = None
        """Folder for finished chunks that do not fit into memory; ``None`` means the system's temporary
        folder.
        """
        self.made_by = [self.run.id]
        """Ids of all runs whose scores this run returns.

        With a journal, these include the earlier runs whose results the journal has. If one of them has wrong
        scores, this run has wrong scores, too.
        """
        self.used: dict[str, dict[str, Amounts]] = {}
        """Tokens and device time of collected results that are still in Redis, by the id of each result's
        entry in the run's stream.
        """
        self._entries: list[str] = []  # stream entries of collected results that are still in Redis

    def collector(self, window: WindowSize, reuse: EarlierScores | None) -> Collector:
        return Collector(self.run, window, RowCounter(0), reuse=reuse)

    def known(self, chunk: int, rows: int) -> ChunkResult | None:
        """Return the stored result of a chunk from an earlier run. A run without a journal has none."""
        return None

    def restore(self, settled: Settled) -> None:
        """Write the run's record and its stream of results to Redis again if Redis has lost one of them.

        The run's chunks are not written. `settled` may have facts that all chunks must share, such as the
        precision. These replace the facts in Redis.
        """
        self.store.restore(self.run)
        if any(settled):
            self.store.settle(self.run, settled, over=True)

    def settle(self, news: Settled, *, is_last: bool) -> Settled:
        """Store facts that all chunks of the run must share, such as the precision. Returns the facts that
        now hold for the run.

        Parameters
        ----------
        news
            Facts from new results. They do not replace facts that the server already has.
        is_last
            Whether all other chunks already have results. If so, nothing is stored, and `news` is returned.
        """
        return news if is_last else self.store.settle(self.run, news)

    def payloads(self, pieces: Sequence[Piece]) -> dict[ChunkId, Payload]:
        rows = sum(len(piece.table) for piece in pieces)
        return self.store.compute(lambda: self._encode(pieces), rows)

    def enqueue(self, payloads: Mapping[ChunkId, Payload]) -> None:
        self.store.enqueue(self.run, payloads)

    def results(self, block_ms: int) -> list[tuple[str, ChunkResult | BadResult]]:
        """Return the results that have arrived, each with the id of its stream entry. Wait up to `block_ms`
        milliseconds for the first.

        The stream is always read from its beginning. Results that were read are no longer in it, and if the
        server has lost its data, new results may have lower numbers.
        """
        return self.store.results(self.run, after="0", block_ms=block_ms)

    def look_back(self) -> None:
        """Make the next call of `results` begin with the first result in the run's stream. For this class,
        there is nothing to do, because every call begins there.
        """

    def log(self, piece: Piece, result: ChunkResult) -> None:
        """Log a result, but not its error messages, because they may contain text of the input."""
        worker = result.stats.worker if isinstance(result, ChunkScores) else result.worker
        with about(chunk=piece.chunk, job=job_id(self.run.id, piece.id), worker=worker):
            rows = len(piece.table)
            if isinstance(result, ChunkScores):
                logger.debug("collected %d rows, %d without a score", rows, result.scores.null_count)
            elif result.died and rows > 1:
                logger.warning("%d rows whose worker died are tried again in two halves", rows)
            else:
                logger.warning("%d rows are given up after %d attempts", rows, result.attempts)

    def keep(self, results: Mapping[int, tuple[int, ChunkResult]], scored: int) -> None:
        """Store the results of finished chunks if the run has a journal.

        `results` has the number of rows and the result of each chunk, by the chunk's number. `scored` is the
        number of the output's rows that devices have scored.
        """

    def forget(self, entries: Iterable[str], collector: Collector) -> None:
        """Delete collected results from Redis, and write the run's progress there."""
        self._entries += entries
        rows = collector.rows
        self.store.forget(self.run, collector.answered, self._entries, rows.progress, rows.errors, self.used)
        collector.answered, self._entries, rows.errors, self.used = [], [], [], {}

    def check_existence(self) -> None:
        """Raise `RunExpired` if this is a detached run that Redis no longer keeps. For any other run, do
        nothing, because `restore` writes the run to Redis again.
        """

    def cancel(self, chunks: Collection[ChunkId], *, hurry: bool) -> None:
        """Delete the run and its waiting chunks from Redis. With `hurry`, the caller waits for only one
        attempt.
        """
        self.cleaner.remove(self.run, chunks, hurry=hurry, used=self.used)

    def end(self, collector: Collector) -> str | None:
        """Delete the complete run from Redis. If a worker has found that the run's scores are wrong, return
        the reason.
        """
        used = self.used_in_all(collector)
        deleted = self.cleaner.remove(self.run, [], answered=collector.answered, used=used)
        return deleted.wrong if deleted else None

    def used_in_all(self, collector: Collector) -> Mapping[str, Usage]:
        """Return the usage (rows, tokens and device time) to add to the tenant's account when the run is
        complete.

        Rows that no device has scored are part of the usage.
        """
        rest = collector.rest()
        return {**self.used, END: {NO_DEVICE: rest}} if any(rest) else self.used

    def wrong(self, why: str) -> WrongScores:
        return WrongScores(f"scores of run {self.run.id} are wrong: {why}; score it again")

    def _encode(self, pieces: Sequence[Piece]) -> dict[ChunkId, Payload]:
        def encoded(piece: Piece) -> Payload:
            columns = [piece.table[name] for name in self.columns]
            return self._payload(piece, encode_rows(columns, self.run.inputs))

        if len(pieces) == 1:
            return {pieces[0].id: encoded(pieces[0])}
        with system.Executor(min(cores(), _ENCODERS), "rankmill-encode") as threads:
            return dict(zip((piece.id for piece in pieces), threads.map(encoded, pieces), strict=True))

    def _payload(self, piece: Piece, pairs: bytes) -> Payload:
        rows = len(piece.table)
        return Payload(pairs, rows, piece.trace, piece.suspect, self.row_tokens, piece.failed)


class RequestRun(LiveRun):
    """A run with the priority ``request``. Such a run is stored together with its first chunks, and deleted
    together with its last results, because each Redis command costs time.
    """

    is_brief = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_new = True

    def enqueue(self, payloads: Mapping[ChunkId, Payload]) -> None:
        self.store.enqueue(self.run, payloads, new=self._is_new)
        self._is_new = False

    def forget(self, entries: Iterable[str], collector: Collector) -> None:
        """Delete collected results from Redis. `end` deletes the last ones."""
        if collector.complete:
            self._entries += entries
        else:
            super().forget(entries, collector)


@dataclass(eq=False)
class JournaledRun(LiveRun):
    """A run whose results are written to a journal before they are deleted from Redis. A later run may
    continue the journal.

    Parameters
    ----------
    store, run, cleaner, columns, row_tokens
        As in `LiveRun`.
    journal
        The journal that stores results; chunks whose results it has are not submitted.
    """

    journal: Journal = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folder, self.made_by = self.journal.folder, [*self.journal.runs, self.run.id]

    def collector(self, window: WindowSize, reuse: EarlierScores | None) -> Collector:
        journal, finished = self.journal, self.journal.finished
        return Collector(
            self.run,
            window,
            RowCounter(journal.rows, finished.row_errors),
            first=journal.first,
            start=finished.rows,
            reuse=reuse,
            scored=journal.account.scored,
        )

    def known(self, chunk: int, rows: int) -> ChunkResult | None:
        return self.journal.get(chunk, rows)

    def keep(self, results: Mapping[int, tuple[int, ChunkResult]], scored: int) -> None:
        if results:
            account = Account(scored=scored, used=self.used, rest=self.journal.account.rest)
            self.journal.add(results, account)

    def cancel(self, chunks: Collection[ChunkId], *, hurry: bool) -> None:
        used: Mapping[str, Usage] = self.used
        # If a signal came before results were stored, `self.used` counts results that are not in the journal.
        # The rows of these results are scored again, so only the usage in the journal counts.
        with suppress(InputError, OutputError):  # cancel the run even if the journal cannot be read
            used = self.journal.account.used
        if self.cleaner.remove(self.run, chunks, hurry=hurry, used=used):
            self.journal.is_in_redis = False

    def used_in_all(self, collector: Collector) -> Mapping[str, Usage]:
        """Return the usage (rows, tokens and device time) to add to the tenant's account when the run is
        complete.

        Some rows were scored by no device: their scores came from the cache, or they failed. Such rows count
        only once for an output, so they are left out if an earlier complete run for the output has counted
        them.
        """
        account = self.journal.account
        if account.rest:
            return self.used
        self.journal.keep_account(account.model_copy(update={"rest": collector.rest()}))
        return super().used_in_all(collector)

    def wrong(self, why: str) -> WrongScores:
        """Mark the journal as wrong, so that no run continues it. Returns the error to raise, with the reason
        `why`.
        """
        return self.journal.distrust(why)


def live_run(
    store: RunStore,
    run: Run,
    cleaner: RunCleaner,
    columns: tuple[str, ...],
    journal: Journal | None = None,
    *,
    row_tokens: bool = False,
) -> LiveRun:
    """Make a run that only this process collects.

    If a `journal` is given, it stores the run's results. The other parameters are those of `LiveRun`.
    """
    if journal:
        return JournaledRun(store, run, cleaner, columns, journal=journal, row_tokens=row_tokens)
    kind = RequestRun if run.priority == "request" else LiveRun
    return kind(store, run, cleaner, columns, row_tokens=row_tokens)
