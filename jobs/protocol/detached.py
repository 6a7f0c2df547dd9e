"""Runs that need no producer: which rows each of their chunks has, so that any process can collect them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, cast

import redis
from pydantic import Field

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.schema import FORMAT, Count, WireModel


class DetachedChunks(WireModel):
    """First row and number of rows of each chunk of a run, in order."""

    chunks: tuple[tuple[Count, Annotated[int, Field(ge=1)]], ...]


def write_chunks(client: redis.Redis, run: Run, chunks: DetachedChunks) -> None:
    """Write the chunks of a run; they expire as its results do."""
    text = DetachedChunks.model_dump_json(chunks)
    client.set(keys.detached(run.id), f'{{"format": {FORMAT}, {text[1:]}', ex=run.ttl)


def begin_submissions(client: redis.Redis, run: Run, numbers: Mapping[int, int]) -> list[int]:
    """Note the next further submission of chunks, by number; those that no other process has begun."""
    key = keys.submissions(run.id)
    with client.pipeline() as pipe:
        for chunk, number in numbers.items():
            pipe.sadd(key, f"{chunk}:{number}")
        pipe.expire(key, run.ttl)
        *begun, _ = pipe.execute()
    return [chunk for chunk, is_new in zip(numbers, begun, strict=True) if is_new]


def read_submissions(client: redis.Redis, run_id: str) -> Counter[int]:
    """How often each chunk was submitted again, by any process; what cannot be read is left out."""
    noted = cast("set[bytes]", client.smembers(keys.submissions(run_id)))
    chunks = (chunk for chunk, _, _ in (each.partition(b":") for each in noted))
    return Counter(int(chunk) for chunk in chunks if chunk.isdigit() and len(chunk) < 19)


def read_chunks(client: redis.Redis, run_id: str) -> DetachedChunks | None:
    """The chunks of a run; ``None`` if it has expired, or is not detached.

    Raises
    ------
    WireError
        They are damaged, or of another release.
    """
    raw = cast("bytes | None", client.get(keys.detached(run_id)))
    return None if raw is None else DetachedChunks.read_json(raw, f"the chunks of run {run_id}")
