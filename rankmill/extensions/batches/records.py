"""Keeps a record of each file and batch in Redis, with its owner."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, TypeVar

import redis
from pydantic import Field

from rankmill.extensions.batches import redis_keys as keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import Count, Seconds, WireModel
from rankmill.jobs.system import system

EVERYBODY = "*"
"""The owner that stands for all owners of files and batches; no API key has this name."""

_MOST = 10_000

_FILE = "file-"
_BATCH = "batch_"

_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Matches the ids of files and batches. An id with a colon would lead to other Redis keys."""


def new_file_id() -> str:
    """A new id for an uploaded file."""
    return _FILE + system.unique_id()


def new_batch_id(run: str) -> str:
    """Return the id of the batch that belongs to the run with the id `run`."""
    return _BATCH + run


def output_id(batch: str) -> str:
    """Return the id of the file with a batch's output."""
    return f"{_FILE}{batch.removeprefix(_BATCH)}-output"


def errors_id(batch: str) -> str:
    """Return the id of the file with a batch's errors."""
    return f"{_FILE}{batch.removeprefix(_BATCH)}-errors"


class _Owned(WireModel):
    """A record with an owner: the name of API keys, or an empty text for all callers without a key."""

    noun: ClassVar[str]
    """The word for a record of this class in messages to callers: ``file`` or ``batch``. A subclass also has
    two functions that make Redis keys: `key` for a record, and `index` for the list of an owner's records.
    """

    id: str
    owner: str
    created: Seconds


class FileRecord(_Owned):
    """The record of a file that was uploaded, or that a batch has made.

    Attributes
    ----------
    name
        Name for callers, such as ``pairs.jsonl`` for an upload of ``data/pairs.jsonl``. A batch's file has a
        name such as ``batch_s12_output.jsonl``.
    place
        Path of the file's bytes, relative to the folder that the setting ``gateway_files`` names.
    """

    noun, key, index = "file", staticmethod(keys.gateway_file), staticmethod(keys.gateway_files)

    name: str
    place: str = Field(pattern=r"^[A-Za-z0-9_-]+/[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    bytes: Count
    expires: Seconds
    purpose: Literal["batch", "batch_output"]


class BatchRecord(_Owned):
    """The record of a batch as it was submitted; the record of its run tells the outcome."""

    noun, key, index = "batch", staticmethod(keys.batch), staticmethod(keys.batches)

    run: str
    file: str
    endpoint: str
    model: str
    metadata: dict[str, str] = Field(default_factory=dict)


class BatchCounts(WireModel):
    """The number of lines in a batch, how many of them have an answer, and how many have an error instead."""

    total: Count
    completed: Count = 0
    failed: Count = 0


R = TypeVar("R", FileRecord, BatchRecord)
T = TypeVar("T", bound=WireModel)


class BatchStore:
    """Reads and writes the records of files and batches on a Redis server.

    Parameters
    ----------
    client
        A client of the Redis server.
    ttl
        Seconds for which the record of a batch is kept after its last change (``file_run_ttl``); a file's
        record is kept until the file expires.
    """

    def __init__(self, client: redis.Redis, ttl: int) -> None:
        self.redis: Any = client
        self.ttl = ttl

    def add(self, record: FileRecord | BatchRecord) -> None:
        ttl = self.ttl
        if isinstance(record, FileRecord):
            ttl = max(int(record.expires - system.now()), 1)
        with self.redis.pipeline() as pipe:
            pipe.set(record.key(record.id), record.written(), ex=ttl)
            for owner in (record.owner, EVERYBODY):
                pipe.zadd(record.index(owner), {record.id: record.created})
                pipe.expire(record.index(owner), max(ttl, self.ttl))
            pipe.execute()

    def renew(self, batch: BatchRecord) -> None:
        """Let the record and the counts of a batch expire `ttl` seconds from now."""
        self.add(batch)
        self.redis.expire(keys.batch_counts(batch.id), self.ttl)

    def find(self, kind: type[R], record_id: str) -> R | None:
        return self._read(kind.key(record_id), kind) if _ID.fullmatch(record_id) else None

    def all(self, kind: type[R], owner: str) -> list[R]:
        """Return the records of up to 10,000 files or batches of an owner, the latest first. Records that
        cannot be read are left out.
        """
        index = kind.index(owner)
        ids = [raw.decode(errors="replace") for raw in self.redis.zrange(index, 0, _MOST - 1, desc=True)]
        texts = self.redis.mget([kind.key(record_id) for record_id in ids]) if ids else []
        records: list[R] = []
        for record_id, raw in zip(ids, texts, strict=True):
            try:
                records += [kind.read_json(raw, record_id)] if raw else []
            except WireError:
                continue
        if gone := [record_id for record_id, raw in zip(ids, texts, strict=True) if not raw]:
            self.redis.zrem(index, *gone)
        return records

    def delete(self, record: FileRecord) -> None:
        with self.redis.pipeline() as pipe:
            pipe.delete(record.key(record.id))
            for owner in (record.owner, EVERYBODY):
                pipe.zrem(record.index(owner), record.id)
            pipe.execute()

    def count(self, batch_id: str, counts: BatchCounts) -> None:
        """Write the counts of a batch. The counts and the batch's record expire `ttl` seconds from now."""
        with self.redis.pipeline() as pipe:
            pipe.set(keys.batch_counts(batch_id), counts.written(), ex=self.ttl)
            pipe.expire(keys.batch(batch_id), self.ttl)
            pipe.execute()

    def counts(self, batch_id: str) -> BatchCounts | None:
        return self._read(keys.batch_counts(batch_id), BatchCounts)

    def _read(self, key: str, kind: type[T]) -> T | None:
        raw = self.redis.get(key)
        return kind.read_json(raw, key) if raw else None
