"""What Redis knows of files and batches: whose they are, and where their bytes lie."""

from __future__ import annotations

import time
from typing import Any, Literal, TypeVar

import redis
from pydantic import Field

from rankmill.gateway.batches.ids import can_be_id
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import FORMAT, Count, Seconds, WireModel

EVERYBODY = "*"
"""The owner that stands for all of them; no key has this name."""

_MOST = 10_000
"""Records of an owner that are read, at most; the latest."""


class FileRecord(WireModel):
    """A file: one that was uploaded, or what a batch has made.

    Attributes
    ----------
    owner
        Name of the API keys whose file it is; empty without keys.
    name
        Its name, as its uploader said.
    place
        Where its bytes lie, below the gateway's folder.
    """

    id: str
    owner: str
    name: str
    place: str = Field(pattern=r"^[A-Za-z0-9_-]+/[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    bytes: Count
    created: Seconds
    expires: Seconds
    purpose: Literal["batch", "batch_output"]


class BatchRecord(WireModel):
    """A batch as it was submitted; what has become of it is in the record of its run."""

    id: str
    owner: str
    run: str
    file: str
    endpoint: str
    model: str
    created: Seconds
    metadata: dict[str, str] = Field(default_factory=dict)


class BatchCounts(WireModel):
    """Lines of a batch, those with an answer, and those with an error instead."""

    total: Count
    completed: Count = 0
    failed: Count = 0


R = TypeVar("R", FileRecord, BatchRecord)
T = TypeVar("T", bound=WireModel)


class BatchStore:
    """The records of files and batches on a server.

    Parameters
    ----------
    client
        The server.
    ttl
        Seconds for which a record is kept after its last change (``file_run_ttl``).
    """

    def __init__(self, client: redis.Redis, ttl: int) -> None:
        self.redis: Any = client
        self.ttl = ttl

    def add_file(self, file: FileRecord) -> None:
        """Write the record of a file."""
        ttl = max(int(file.expires - time.time()), 1)
        self._add(keys.gateway_file(file.id), keys.gateway_files, file, ttl)

    def add_batch(self, batch: BatchRecord) -> None:
        """Write the record of a batch."""
        self._add(keys.batch(batch.id), keys.batches, batch, self.ttl)

    def file(self, file_id: str) -> FileRecord | None:
        """The record of a file, if there is one."""
        return self._read(keys.gateway_file(file_id), FileRecord) if can_be_id(file_id) else None

    def batch(self, batch_id: str) -> BatchRecord | None:
        """The record of a batch, if there is one."""
        return self._read(keys.batch(batch_id), BatchRecord) if can_be_id(batch_id) else None

    def files(self, owner: str) -> list[FileRecord]:
        """An owner's files, the latest first; those that cannot be read are left out."""
        return self._all(keys.gateway_files(owner), keys.gateway_file, FileRecord)

    def batches(self, owner: str) -> list[BatchRecord]:
        """An owner's batches, the latest first; those that cannot be read are left out."""
        return self._all(keys.batches(owner), keys.batch, BatchRecord)

    def delete_file(self, file: FileRecord) -> None:
        """Forget a file."""
        with self.redis.pipeline() as pipe:
            pipe.delete(keys.gateway_file(file.id))
            for owner in (file.owner, EVERYBODY):
                pipe.zrem(keys.gateway_files(owner), file.id)
            pipe.execute()

    def count(self, batch_id: str, counts: BatchCounts) -> None:
        """Note how far a batch is; its record is kept for as long as this."""
        with self.redis.pipeline() as pipe:
            pipe.set(keys.batch_counts(batch_id), _written(counts), ex=self.ttl)
            pipe.expire(keys.batch(batch_id), self.ttl)
            pipe.execute()

    def counts(self, batch_id: str) -> BatchCounts | None:
        """How far a batch is; ``None`` until that is known."""
        return self._read(keys.batch_counts(batch_id), BatchCounts)

    def _add(self, key: str, index: Any, record: FileRecord | BatchRecord, ttl: int) -> None:
        with self.redis.pipeline() as pipe:
            pipe.set(key, _written(record), ex=ttl)
            for owner in (record.owner, EVERYBODY):
                pipe.zadd(index(owner), {record.id: record.created})
                pipe.expire(index(owner), max(ttl, self.ttl))
            pipe.execute()

    def _read(self, key: str, kind: type[T]) -> T | None:
        raw = self.redis.get(key)
        return kind.read_json(raw, key) if raw else None

    def _all(self, index: str, key: Any, kind: type[R]) -> list[R]:
        ids = [each.decode(errors="replace") for each in self.redis.zrange(index, 0, _MOST - 1, desc=True)]
        found: list[R] = []
        gone: list[str] = []
        for record_id, raw in zip(
            ids, self.redis.mget([key(each) for each in ids]) if ids else [], strict=True
        ):
            try:
                found += [kind.read_json(raw, record_id)] if raw else []
                gone += [] if raw else [record_id]
            except WireError:
                continue
        if gone:
            self.redis.zrem(index, *gone)
        return found


def _written(record: WireModel) -> str:
    return f'{{"format": {FORMAT}, {record.model_dump_json()[1:]}'
