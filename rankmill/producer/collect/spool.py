"""The spool, which keeps finished chunks until the caller takes them. It keeps them in memory; when they
exceed a bound, it keeps further chunks in a temporary file.

The file has no name, so nothing of it remains when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from functools import reduce
from pathlib import Path
from typing import IO

import pyarrow as pa

from rankmill.jobs.contract.results import ChunkStats
from rankmill.producer.collect.scored import ScoredTable

MEMORY_BYTES = 64 << 20
"""When finished chunks in memory have this many bytes, further chunks go to disk."""

DISK_BYTES = 16 << 30
"""The temporary file of finished chunks has at most this many bytes. When it is full, the producer submits no
further chunks.
"""

_ABOUT = b"rankmill.about"
"""Key in the metadata of a chunk's table on disk. The value, in JSON, has further facts about the chunk, such
as the statistics and the worker.
"""

logger = logging.getLogger(__name__)


class Spool:
    """Keeps the finished chunks of a run, by number, until the caller takes them.

    Parameters
    ----------
    folder
        Folder for the temporary file; ``None`` means the system's.
    memory_bytes, disk_bytes
        As `MEMORY_BYTES` and `DISK_BYTES`.
    """

    def __init__(
        self, folder: Path | None, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES
    ) -> None:
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._in_memory: dict[int, tuple[ScoredTable, int]] = {}
        self._on_disk: dict[int, tuple[int, int]] = {}
        """By the chunk's number: the position of the chunk in the temporary file, and its number of bytes."""
        self._used = 0
        self._file: IO[bytes] | None = None
        self.full = False
        """Whether the last write to disk has failed, for example because the disk or the temporary file is
        full.

        While this is true, finished chunks wait in memory, and no new chunks should be submitted. It becomes
        false when all chunks are taken.
        """

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._on_disk)

    @property
    def has_room(self) -> bool:
        """Whether the chunks in memory take less than a quarter of `memory_bytes`."""
        return self._used < self._memory_bytes // 4

    def put(self, chunk: int, part: ScoredTable) -> None:
        if self._used < self._memory_bytes or not self._write(chunk, part):
            size = int(part.table.nbytes + sum(column.nbytes for _, column in _added(part)))
            self._in_memory[chunk] = part, size
            self._used += size

    def take(self, chunk: int) -> ScoredTable:
        """Remove and return the chunk with this number, which must be in the spool."""
        if chunk in self._in_memory:
            part, size = self._in_memory.pop(chunk)
            self._used -= size
        else:
            part = self._read(*self._on_disk.pop(chunk))
        self.full = self.full and len(self) > 0
        return part

    def close(self) -> None:
        self._in_memory.clear()
        self._on_disk.clear()
        if self._file:
            self._file.close()
            self._file = None

    def _write(self, chunk: int, part: ScoredTable) -> bool:
        """Write a chunk to disk; returns whether the disk had room."""
        if self.full:
            return False
        written = _to_bytes(part)
        try:
            if self._file is None:
                # Do not buffer: a buffer would keep bytes that a full disk has refused, and later calls would
                # fail.
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            start = 0  # the loop moves `start` to the first gap that is large enough
            for place, size in sorted(self._on_disk.values()):
                if start + len(written) <= place:
                    break
                start = place + size
            if start + len(written) > self._disk_bytes:
                raise OSError(f"more than {self._disk_bytes:,} bytes wait on disk")
            self._file.seek(start)
            if self._file.write(written) < len(written):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.full = True
            logger.warning("no more chunks are submitted until the oldest is done: %s", error)
            return False
        self._on_disk[chunk] = start, len(written)
        return True

    def _read(self, start: int, size: int) -> ScoredTable:
        """Read a chunk from the file; after the last chunk, empty the file."""
        assert self._file
        self._file.seek(start)
        part = _from_bytes(self._file.read(size))
        if not self._on_disk:
            self._file.truncate(0)
        return part


def _added(part: ScoredTable) -> list[tuple[str, pa.Array]]:
    counted = [] if part.tokens is None else [("tokens", part.tokens)]
    return [("score", part.scores), ("error", part.errors), *counted]


def _to_bytes(part: ScoredTable) -> memoryview:
    stats = part.stats and part.stats.model_dump_json()
    facts = {"stats": stats, "attempts": part.attempts, "worker": part.worker, "reused": part.reused}
    added = _added(part)
    table = reduce(lambda table, column: table.append_column(*column), added, part.table)
    facts["added"] = len(added)
    kept = part.table.schema.metadata or {}
    table = table.replace_schema_metadata({**kept, _ABOUT: json.dumps(facts)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _from_bytes(written: bytes) -> ScoredTable:
    table = pa.ipc.open_stream(written).read_all()
    kept = dict(table.schema.metadata)
    facts = json.loads(kept.pop(_ABOUT))
    stats, own = facts.pop("stats"), table.num_columns - facts.pop("added")
    scores, errors, *counted = (column.combine_chunks() for column in table.columns[own:])
    return ScoredTable(
        table=table.replace_schema_metadata(kept or None).select(range(own)),
        scores=scores,
        errors=errors,
        tokens=counted[0] if counted else None,
        stats=stats and ChunkStats.read_json(stats, "the statistics of a chunk"),
        **facts,
    )
