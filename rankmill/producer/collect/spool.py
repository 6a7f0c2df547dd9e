"""The spool: keeps finished chunks that wait for their turn, in memory up to a bound, then in temporary
files.

The files have no names, so nothing of them remains when the process ends, however it ends.
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import IO

import pyarrow as pa

from rankmill.jobs.contract.results import ChunkStats
from rankmill.producer.collect.scored import ScoredTable

MEMORY_BYTES = 64 << 20
"""Most bytes of finished chunks in memory."""

DISK_BYTES = 16 << 30
"""Most bytes of finished chunks on disk; beyond this, the producer submits no further chunks."""

_FILE_BYTES = 256 << 20
"""Size at which the next file begins; a file's space is freed when all of its chunks are taken."""

_ABOUT = b"rankmill.about"
"""Key in a table's metadata for what else is known about the chunk."""

logger = logging.getLogger(__name__)


@dataclass
class _File:
    """A temporary file, with the bytes written so far and the number of its chunks that are not taken."""

    file: IO[bytes]
    size: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class _Place:
    """The place of a chunk in a file."""

    file: _File
    start: int
    size: int


class Spool:
    """Finished chunks by number, each from `put` until `take`.

    Parameters
    ----------
    folder
        Folder for temporary files; ``None`` means the system's.
    memory_bytes, disk_bytes
        Most bytes in memory and on disk.
    """

    def __init__(
        self, folder: Path | None, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES
    ) -> None:
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._in_memory: dict[int, tuple[ScoredTable, int]] = {}
        """Chunks, with their numbers of bytes."""
        self._on_disk: dict[int, _Place] = {}
        self._used = 0
        self._files: list[_File] = []
        self.full = False
        """Whether the disk has no more room; chunks then wait in memory, so no new ones should come."""

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._in_memory or chunk in self._on_disk

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._on_disk)

    @property
    def memory_is_full(self) -> bool:
        """Whether the next chunk goes to disk."""
        return self._used >= self._memory_bytes

    def has_room(self, expected: int) -> bool:
        """Whether `expected` more bytes would stay in memory, or memory is mostly empty."""
        return self._used + expected < self._memory_bytes or self._used < self._memory_bytes // 4

    def put(self, chunk: int, part: ScoredTable) -> None:
        """Keep a finished chunk."""
        if not self.memory_is_full or not self._write(chunk, part):
            size = int(part.table.nbytes + sum(column.nbytes for _, column in _added(part)))
            self._in_memory[chunk] = part, size
            self._used += size

    def take(self, chunk: int) -> ScoredTable:
        """Remove and return a chunk, which must be here."""
        if chunk in self._in_memory:
            part, size = self._in_memory.pop(chunk)
            self._used -= size
        else:
            part = self._read(self._on_disk.pop(chunk))
        self.full = self.full and len(self) > 0
        return part

    def close(self) -> None:
        """Drop all chunks, and the files."""
        self._in_memory.clear()
        self._on_disk.clear()
        while self._files:
            self._files.pop().file.close()

    def _write(self, chunk: int, part: ScoredTable) -> bool:
        """Write a chunk to disk; returns whether it had room."""
        if self.full:
            return False
        written = _to_bytes(part)
        try:
            if sum(file.size for file in self._files) + len(written) > self._disk_bytes:
                raise OSError(f"more than {self._disk_bytes:,} bytes wait on disk")
            file = self._file()
            file.file.seek(file.size)
            file.file.write(written)
            file.file.flush()
        except OSError as error:
            self.full = True
            logger.warning("no more chunks are submitted until the oldest is done: %s", error)
            return False
        self._on_disk[chunk] = _Place(file, file.size, len(written))
        file.size += len(written)
        file.chunks += 1
        return True

    def _file(self) -> _File:
        """The last file if it has room, or else a new one."""
        if not self._files or self._files[-1].size >= _FILE_BYTES:
            self._files.append(_File(tempfile.TemporaryFile(dir=self._folder)))  # noqa: SIM115
        return self._files[-1]

    def _read(self, place: _Place) -> ScoredTable:
        file = place.file
        file.file.seek(place.start)
        part = _from_bytes(file.file.read(place.size))
        file.chunks -= 1
        if not file.chunks:
            self._files.remove(file)
            file.file.close()
        return part


def _added(part: ScoredTable) -> list[tuple[str, pa.Array]]:
    """What is kept of a chunk besides its table."""
    counted = [] if part.tokens is None else [("tokens", part.tokens)]
    return [("score", part.scores), ("error", part.errors), *counted]


def _to_bytes(part: ScoredTable) -> memoryview:
    stats = part.stats and part.stats.model_dump_json()
    about = {"stats": stats, "attempts": part.attempts, "worker": part.worker, "reused": part.reused}
    added = _added(part)
    table = reduce(lambda table, column: table.append_column(*column), added, part.table)
    about["added"] = len(added)
    kept = part.table.schema.metadata or {}
    table = table.replace_schema_metadata({**kept, _ABOUT: json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _from_bytes(written: bytes) -> ScoredTable:
    table = pa.ipc.open_stream(written).read_all()
    kept = dict(table.schema.metadata)
    about = json.loads(kept.pop(_ABOUT))
    stats, own = about.pop("stats"), table.num_columns - about.pop("added")
    scores, errors, *counted = (column.combine_chunks() for column in table.columns[own:])
    return ScoredTable(
        table=table.replace_schema_metadata(kept or None).select(range(own)),
        scores=scores,
        errors=errors,
        tokens=counted[0] if counted else None,
        stats=stats and ChunkStats.read_json(stats, "the statistics of a chunk"),
        **about,
    )
