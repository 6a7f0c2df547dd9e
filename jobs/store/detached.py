"""Runs that need no producer: which rows each of their chunks has, so that any process can collect them."""

from __future__ import annotations

from typing import Annotated, cast

import redis
from pydantic import Field

from jobs import keys
from jobs.run import Run
from jobs.schema import FORMAT, Count, WireModel


class DetachedChunks(WireModel):
    """First row and number of rows of each chunk of a run, in order."""

    chunks: tuple[tuple[Count, Annotated[int, Field(ge=1)]], ...]


def write_chunks(client: redis.Redis, run: Run, chunks: DetachedChunks) -> None:
    """Write the chunks of a run; they expire as its results do."""
    text = DetachedChunks.model_dump_json(chunks)
    client.set(keys.detached(run.id), f'{{"format": {FORMAT}, {text[1:]}', ex=run.ttl)


def read_chunks(client: redis.Redis, run_id: str) -> DetachedChunks | None:
    """The chunks of a run; ``None`` if it has expired, or is not detached.

    Raises
    ------
    WireError
        They are damaged, or of another release.
    """
    raw = cast("bytes | None", client.get(keys.detached(run_id)))
    return None if raw is None else DetachedChunks.read_json(raw, f"the chunks of run {run_id}")
