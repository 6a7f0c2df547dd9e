"""Detached runs: all of their pairs are in Redis, so that any process may collect them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.wire import encode_rows
from rankmill.jobs.protocol.runs import DetachedChunks, RunStore
from rankmill.jobs.runtime.patience import redis_errors
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.collector import AT_ONCE
from rankmill.producer.collect.driver import RunDriver
from rankmill.producer.collect.sizing import ChunkSize, Sizes, WindowSize


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
    return found


def collect_detached(store: RunStore, run: Run, chunks: DetachedChunks) -> RunDriver:
    """Collects a run that some process has submitted."""
    sizes = Sizes(WindowSize(len(chunks.chunks), 0), ChunkSize(1, run.spec.model, None, {}))
    return RunDriver(store, run, RunCleaner(store), iter(()), ("", ""), sizes, detached=chunks)
