"""Lists in Redis with the latest entries of a kind, which operators read and clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
from redis.client import Pipeline

from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import WireModel

MAX_LISTED = 100
"""A list has at most this many entries; the oldest are dropped."""

_TTL = 7 * 86400
"""A list expires this many seconds after its latest entry."""

E = TypeVar("E", bound=WireModel)


@dataclass(frozen=True)
class LatestEntries(Generic[E]):
    """The latest entries of type `kind` in the list at `key`; damaged entries are left out."""

    key: str
    kind: type[E]

    def add(self, pipe: Pipeline, entry: E) -> None:
        pipe.lpush(self.key, entry.written())
        pipe.ltrim(self.key, 0, MAX_LISTED - 1)
        pipe.expire(self.key, _TTL)

    def read(self, client: redis.Redis) -> list[E]:
        return [entry for _, entry in self._entries(client)]

    def forget(self, client: redis.Redis, meant: Callable[[E], bool]) -> None:
        for raw, entry in self._entries(client):
            if meant(entry):
                client.lrem(self.key, 0, raw)

    def _entries(self, client: redis.Redis) -> Iterator[tuple[str, E]]:
        connection: Any = client
        try:
            written = connection.lrange(self.key, 0, MAX_LISTED - 1)
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return
        for raw in written:
            with suppress(WireError):
                yield raw, self.kind.read_json(raw, self.key)
