"""Judges whether a batch fits into memory, by what earlier batches needed and what is free now."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from rankmill.jobs.runtime.limits import free_memory
from rankmill.jobs.system import system
from rankmill.workers.backends.base import Backend, Logits, Pending
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.host import metrics

_SHARE = 0.9
"""A batch may take this share of the free memory, because its need is only an estimate."""

_QUADRATIC = 512
"""In rows of this many tokens, attention needs as much memory as the rest of the model's states. In longer
rows it needs more.
"""

_LEAST = 512
"""Batches in progress count with at least this weight (in padded tokens), because even a small batch needs a
fixed amount of memory.
"""

_KEPT_SECONDS = 0.2
"""The used and the free memory are read at most once in this many seconds. Reading takes up to 2 ms, as long
as a batch of a small model.
"""

_SAY_SECONDS = 60
"""At most one log line in this many seconds says that a batch is cut because memory is short."""

logger = logging.getLogger(__name__)


class Memory(Protocol):
    """The memory that a device's forwards use, in bytes."""

    def used(self) -> int: ...

    def free(self) -> int:
        """Return how much memory this process may still take."""
        ...

    def peak(self) -> int:
        """Return the largest amount of memory that was in use at any time since the last call of `begin`."""
        ...

    def begin(self) -> None:
        """Forget the peak so far, and begin to measure another one."""
        ...


class HostMemory:
    """The memory of a process that computes on the CPU, within its container's limits."""

    _STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._process = psutil.Process()

    def used(self) -> int:
        return int(self._process.memory_info().rss)

    def free(self) -> int:
        return free_memory()

    def peak(self) -> int:
        with suppress(OSError):
            for line in self._STATUS.read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self.used()

    def begin(self) -> None:
        with suppress(OSError):
            self._RESET.write_text("5", encoding="utf-8")  # 5 resets VmHWM; the file exists only on Linux


class CudaMemory:
    """The memory of a GPU, as PyTorch's allocator sees it. Unused memory of the allocator counts as free."""

    def used(self) -> int:
        return self._bytes("allocated_bytes", "current")

    def free(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[0] + self._bytes("reserved_bytes", "current") - self.used()

    def peak(self) -> int:
        return self._bytes("allocated_bytes", "peak")

    @staticmethod
    def _bytes(which: str, when: str) -> int:
        """Return one figure of PyTorch's allocator, in bytes. PyTorch's functions for single figures are not
        used, because they sort all figures first.
        """
        import torch

        figures = torch.cuda.memory_stats_as_nested_dict()  # the figures are empty before the device is used
        return int(figures[which]["all"][when]) if figures else 0

    def begin(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()


def memory_of(device: str) -> Memory | None:
    """Return an object that measures the memory of a device; ``None`` if it cannot be measured (MPS)."""
    if device == "cpu":
        return HostMemory()
    return CudaMemory() if device == "cuda" else None


class Headroom:
    """Learns how much memory the batches of a model need, and tells which batch fits.

    The weight of a batch is its number of padded tokens, times a factor for long rows. The need for memory is
    estimated in proportion to the weight. Only the thread that runs forwards may use this object.

    Parameters
    ----------
    memory
        The device's memory; if it is ``None``, every batch is expected to fit.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory
        self._floor = 0
        """Bytes in use while no batch is in progress, such as those of the model."""
        self._weight = self._heaviest = 0.0
        """The sum of the weights of the batches in progress, and the highest value of this sum since it was
        last 0.
        """
        self._known_weight, self._known_bytes = 0.0, 0
        """The largest sum of weights of batches that were in progress at the same time, and the bytes that
        these batches needed. If batches with a smaller sum need more bytes, both numbers become theirs.
        """
        self._said = self._read_at = float("-inf")
        self._used = self._free = 0

    def submit(self, backend: Backend, batch: Batch) -> Pending:
        """Begin the forward of a batch with `backend`, and learn how much memory it needs."""
        if self._memory is None:
            return backend.submit(batch)
        weight = _weight(*batch.shape)
        self._begin(self._memory, weight)
        try:
            return _Measured(backend.submit(batch), partial(self._end, self._memory, weight))
        except Exception:
            self._end(self._memory, weight)
            raise

    def most_rows(self, length: int) -> int:
        """Return how many rows of `length` tokens should fit into memory in one batch, and at least 1."""
        if self._memory is None or self._known_bytes <= 0:
            return sys.maxsize
        if system.monotonic() - self._read_at >= _KEPT_SECONDS:
            self._used, self._free = self._memory.used(), self._memory.free()
            self._read_at = system.monotonic()
        room = self._used - self._floor + _SHARE * self._free
        weight = room / self._known_bytes * self._known_weight - self._weight
        return max(int(weight / _weight(1, length)), 1)

    def pieces(self, rows: int, length: int) -> Iterator[tuple[int, int]]:
        """Cut a batch into pieces that should fit into memory.

        Yields the index of each piece's first row, and the index after its last row.

        Parameters
        ----------
        rows
            Rows in the batch.
        length
            Tokens of the longest row.
        """
        metrics.cut_batches.inc()
        if system.monotonic() - self._said >= _SAY_SECONDS:
            self._said, free = system.monotonic(), f"{self._free / 2**20:.0f} MiB of memory are free"
            logger.warning("%s: cut a batch of %d rows of %d tokens", free, rows, length)
        done = 0
        while done < rows:
            end = min(done + self.most_rows(length), rows)
            yield done, end
            done = end

    def _begin(self, memory: Memory, weight: float) -> None:
        if not self._weight:
            used = memory.used()
            # Memory of earlier batches may still count as used, but no more than they needed: `_known_bytes`.
            self._floor = max(min(used, self._floor or used), used - self._known_bytes)
            memory.begin()
            self._heaviest = 0.0
        self._weight += weight
        self._heaviest = max(self._heaviest, self._weight)

    def _end(self, memory: Memory, weight: float) -> None:
        self._weight = max(self._weight - weight, 0.0)
        needed = memory.peak() - self._floor
        heaviest = max(self._heaviest, _LEAST)
        if heaviest > self._known_weight or needed > self._known_bytes:
            self._known_weight, self._known_bytes = heaviest, needed


class _Measured:
    """A forward in progress; `result` calls `end` when the forward has ended."""

    def __init__(self, pending: Pending, end: Callable[[], None]) -> None:
        self._pending, self._end = pending, end

    def result(self) -> Logits:
        try:
            return self._pending.result()
        finally:
            self._end()


def _weight(rows: int, length: int) -> float:
    return rows * length * (1 + length / _QUADRATIC)
