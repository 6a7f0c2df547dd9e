"""Reading ahead, in a thread, while the producer submits and collects."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

_BYTES = 16 << 20
_BATCHES = 64
"""Most bytes and batches that are read before they are asked for; one batch always is."""


def read_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield `batches`, which a thread reads before they are asked for; Arrow decodes without Python's lock.

    An exception comes when the batch is asked for whose reading has raised it.
    """
    thread = ThreadPoolExecutor(1, "rankmill-ahead")
    pending: deque[Future[pa.RecordBatch | None]] = deque([thread.submit(next, batches, None)])
    try:
        while (batch := pending.popleft().result()) is not None:
            most = min(_BYTES // max(batch.nbytes, 1), _BATCHES)
            while len(pending) < max(most, 1):
                pending.append(thread.submit(next, batches, None))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)
