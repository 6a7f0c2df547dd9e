"""Detached runs, which have all of their rows in Redis. Any number of processes may collect the results.

Rows and results stay in Redis until they expire. All processes that collect a detached run read the same
results, and so decide in the same way which results count and which chunks have failed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError, RunExpired
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.results import BadResult, ChunkResult
from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.wire import decode_rows, encode_rows
from rankmill.jobs.protocol.runs import DetachedChunks, RunStore
from rankmill.jobs.runtime.patience import redis_errors
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.collector import Collector, Piece
from rankmill.producer.collect.live import LiveRun
from rankmill.producer.collect.pairs import OpenTables
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.scored import EarlierScores
from rankmill.producer.collect.sizing import AT_ONCE, WindowSize


class DetachedRun(LiveRun):
    """A run that any number of processes may collect, because its rows and results stay in Redis.

    Parameters
    ----------
    store, run
        The store of runs in Redis, and the run.
    chunks
        All chunks of the run, which `submit_detached` has put into the queue.
    """

    stays = True

    def __init__(self, store: RunStore, run: Run, chunks: DetachedChunks) -> None:
        super().__init__(store, run, RunCleaner(store), ())
        self._chunks = dict(chunks.chunks)
        self._after = "0"  # id of the last entry that was read from the stream

    def collector(self, window: WindowSize, reuse: EarlierScores | None) -> Collector:
        """Make the run's collector. It gets all chunks of the run at once. They are tables with rows but
        without columns, because the texts are in Redis.
        """
        collector = Collector(self.run, window, RowCounter(0, most_errors=sys.maxsize), reuse=reuse)
        for rows in self._chunks.values():
            collector.add(pa.table({"": pa.nulls(rows)}).select([]))
        collector.exhausted = True
        return collector

    def restore(self, settled: Settled) -> None:
        """If Redis has lost a part of the run, such as the stream of results, write it again.

        Do nothing if the run's own record is lost: `check_existence` raises `RunExpired` then.
        """
        if self.store.exists(self.run.id):
            super().restore(settled)
            self.store.unlist(self.run)

    def settle(self, news: Settled, *, is_last: bool) -> Settled:
        """Return `news`, and store nothing. `news` has facts that all chunks of the run must share, such as
        the precision.

        Nothing needs to be stored, because each process that collects the run reads the same first result,
        and so finds the same facts.
        """
        return news

    def payloads(self, pieces: Sequence[Piece]) -> dict[ChunkId, Payload]:
        return {piece.id: self._payload(piece, self._stored_pairs(piece)) for piece in pieces}

    def results(self, block_ms: int) -> list[tuple[str, ChunkResult | BadResult]]:
        """Return the results that this process has not read yet, each with the id of its stream entry. Wait
        up to `block_ms` milliseconds for the first.
        """
        entries = self.store.results(self.run, after=self._after, block_ms=block_ms)
        if entries:
            self._after = entries[-1][0]
        return entries

    def log(self, piece: Piece, result: ChunkResult) -> None:
        """Log nothing, because every process that collects the run would log the same."""

    def look_back(self) -> None:
        """Begin again with the first result. If the server has lost its data, new results may have lower
        numbers than those that this process has already read, so reading on would miss them.
        """
        self._after = "0"

    def forget(self, entries: Iterable[str], collector: Collector) -> None:
        """Write the run's progress to Redis, and add the tokens and device time of new results to the
        tenant's account. The results stay in Redis. A result is added to the account only once, even if
        several processes collect it.
        """
        is_done = collector.complete and not collector.fatal
        used = self.used_in_all(collector) if is_done else self.used
        self.store.note(self.run, collector.rows.progress, used)
        self.used = {}

    def check_existence(self) -> None:
        if not self.store.exists(self.run.id):
            raise expired(self.run.id, self.run.ttl)

    def cancel(self, chunks: Collection[ChunkId], *, hurry: bool) -> None:
        """Delete the run and its waiting chunks, and tell all processes that collect the run."""
        with redis_errors():
            self.store.delete(self.run, chunks, tell=True)

    def end(self, collector: Collector) -> str | None:
        """Delete nothing from Redis, because other processes may collect the run."""
        return None

    def _stored_pairs(self, piece: Piece) -> bytes:
        payload = self.store.payload(self.run, piece.chunk)
        if payload is None:
            raise expired(self.run.id, self.run.ttl)
        rows = len(piece.table)
        if rows == self._chunks[piece.chunk]:
            return payload
        sides = (side[piece.start : piece.start + rows] for side in decode_rows(payload, self.run.inputs))
        return encode_rows([pa.array(side, pa.string()) for side in sides], self.run.inputs)


def submit_detached(
    store: RunStore, run: Run, tables: Iterator[pa.Table], columns: tuple[str, ...], most_bytes: int
) -> DetachedChunks:
    """Put all rows of a run into Redis, with at most `most_bytes` of payload.

    Raises
    ------
    InputError
        The run has no rows, or its rows need more than `most_bytes`.
    RedisUnavailable, RedisFailed
        The server could not serve for as long as a command may wait, or it refuses a command.
    """
    chunks: list[tuple[int, int]] = []
    size, start = 0, 0
    with redis_errors():
        try:
            while batch := list(islice(tables, AT_ONCE)):
                is_new, payloads = not chunks, dict[ChunkId, Payload]()
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
            submitted = DetachedChunks(chunks=tuple(chunks))
            store.write_chunks(run, submitted)
            store.unlist(run)  # no producer would remove the run from this list
        except BaseException:
            if chunks:
                RunCleaner(store).remove(run, [first for first, _ in chunks])
            raise
        finally:
            OpenTables(tables, tables).close()
    return submitted


def expired(run_id: str, ttl: int) -> RunExpired:
    """Make the error for a detached run whose results do not exist, or no longer exist."""
    return RunExpired(
        f"there are no results of run {run_id}: they are kept for {ttl:,} s (run_ttl) after its submission, "
        "unless the run is cancelled or the server loses its data"
    )
