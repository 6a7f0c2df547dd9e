"""Scored rows of chunks that have no result yet: workers count them into the run, the producer reads them.

A chunk has one field, and the worker that has the chunk writes it: so a chunk that moves from a dead worker
to another is not counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.run import Run
from rankmill.jobs.runtime.patience import cannot_serve

_EXPIRY_SECONDS = 60
"""Expiry of the key; workers renew it every second."""


def write_scored_rows(client: redis.Redis, counts: Mapping[str, Mapping[int, int]]) -> None:
    """Write the number of scored rows by run and chunk; a run that is gone gets no key."""
    connection: Any = client
    with connection.pipeline() as pipe:
        for run, rows in counts.items():
            pipe.hset(keys.scored_rows(run), mapping={str(chunk): count for chunk, count in rows.items()})
            pipe.expire(keys.scored_rows(run), _EXPIRY_SECONDS)
            pipe.exists(keys.run(run))
        there = pipe.execute()[2::3]
    gone = [keys.scored_rows(run) for run, exists in zip(counts, there, strict=True) if not exists]
    if gone:
        connection.unlink(*gone)


def read_scored_rows(client: redis.Redis, run: Run) -> dict[int, int]:
    """The number of scored rows by chunk; what is damaged is left out."""
    connection: Any = client
    try:
        found = connection.hgetall(keys.scored_rows(run.id))
    except redis.ResponseError as error:
        if cannot_serve(error):
            raise
        return {}  # the key is no hash: progress is worth no run
    return {
        int(chunk): int(rows)
        for chunk, rows in found.items()
        if chunk.isdigit() and rows.isdigit() and max(len(chunk), len(rows)) < 19
    }
