"""Names of the Redis keys of batches and their files; each key has an expiry."""

from __future__ import annotations

from rankmill.jobs.contract.keys import PREFIX


def gateway_file(file_id: str) -> str:
    """String: the record of a file that the gateway keeps, as JSON."""
    return f"{PREFIX}:gateway-file:{file_id}"


def gateway_files(owner: str) -> str:
    """Sorted set: ids of an owner's files (or of all: ``*``), ordered by the time when each was made."""
    return f"{PREFIX}:gateway-files:{owner}"


def batch(batch_id: str) -> str:
    """String: the record of a batch, as JSON."""
    return f"{PREFIX}:batch:{batch_id}"


def batch_counts(batch_id: str) -> str:
    """String: how many lines a batch has, how many have an answer, and how many have an error, as JSON."""
    return f"{PREFIX}:batch:{batch_id}:counts"


def batches(owner: str) -> str:
    """Sorted set: ids of an owner's batches (or of all: ``*``), ordered by the time when each was made."""
    return f"{PREFIX}:batches:{owner}"
