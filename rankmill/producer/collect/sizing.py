"""Decides how many chunks of a run may be in Redis without a result (the window), and how many rows each
chunk has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from rankmill.jobs.contract.run import Run
from rankmill.jobs.protocol.queues import QueueCapacity
from rankmill.jobs.system import system
from rankmill.producer.collect.journal import Journal

MIN_CHUNKS = 32
"""With ``window: auto``, the window has at least this many chunks, once the workers' speed is known."""

AT_ONCE = 64
"""At most this many chunks are cut and sent together."""

_FIRST_CHUNKS = 8
"""With ``window: auto``, the window has at least this many chunks before the workers' speed is known. The
number is less than `MIN_CHUNKS`, because the first chunks are small, and each small chunk costs time.
"""

_AHEAD = 2
"""Workers claim some pairs ahead, before they score them. With ``window: auto``, the window has room for this
many times as many pairs.
"""

_REFILL_SHARE = 4
"""More chunks are submitted only when a quarter of the window is free, because sending several chunks
together costs less.
"""

CHUNK_SECONDS = 1.0
"""With ``chunk_size: auto``, a chunk is about this many seconds of work for the slowest worker's device."""

REQUEST_ROWS = 64
"""With ``chunk_size: auto``, a chunk of a request has at least this many rows, because a request with few
chunks takes less time.
"""

MIN_ROWS, MAX_ROWS = 16, 16_384

_GROWTH = 8
"""With ``chunk_size: auto``, the number of rows in a chunk grows at most by this factor for each result."""

_GONE_SECONDS = 30
"""After this many seconds without results, a worker no longer has an effect on the size of chunks."""


class Load(NamedTuple):
    """The part of a run that is in Redis and has no result yet: the number of chunks (or parts of chunks),
    their rows, and the bytes of their payloads.
    """

    pieces: int = 0
    rows: int = 0
    payload: int = 0


class WindowSize:
    """Limits what may be in Redis without a result: the number of a run's pieces (chunks or parts of chunks),
    and the bytes of their payloads.

    Parameters
    ----------
    chunks
        The setting ``window``. With ``auto`` the window is twice what the live workers claim ahead, and at
        least `MIN_CHUNKS`. Until the workers' speed is known, the window is two chunks for each worker, and
        at least 8 chunks. Until the workers are counted, the window is `MIN_CHUNKS`.
    payload_bytes
        Bytes of payload at which the window is full, whatever the workers claim.
    sharers
        Number of runs that share the window equally.
    """

    def __init__(self, chunks: int | Literal["auto"], payload_bytes: int, sharers: int = 1) -> None:
        self.follows_workers = chunks == "auto"
        self._chunks = max((MIN_CHUNKS if chunks == "auto" else chunks) // sharers, 1)
        self._pairs = 0
        self._payload_bytes = payload_bytes // sharers
        self._sharers = sharers

    def follow(self, capacity: QueueCapacity, chunk_rows: int, *, sized: bool) -> None:
        """Set how many rows may be in Redis without a result, from the number of pairs that workers claim
        ahead.

        Workers claim whole chunks, so one more chunk is added for each worker.

        Parameters
        ----------
        capacity
            The number of workers, and the number of pairs that they claim ahead.
        chunk_rows
            The largest number of rows of a chunk.
        sized
            Whether the size of chunks already follows the workers' speed.
        """
        if not sized:
            capacity = QueueCapacity(workers=capacity.workers)
            chunk_rows = max(chunk_rows, MIN_ROWS)
        self._pairs = _AHEAD * (capacity.claim_ahead + capacity.workers * chunk_rows) // self._sharers
        self._chunks = max((MIN_CHUNKS if sized else _FIRST_CHUNKS) // self._sharers, 1)

    def is_full(self, load: Load) -> bool:
        enough = load.pieces >= self._chunks and load.rows >= self._pairs
        return enough or load.payload >= self._payload_bytes

    def wants_more(self, load: Load) -> bool:
        free = max(self._chunks // _REFILL_SHARE, 1)
        few = load.pieces <= self._chunks - free or load.rows < self._pairs * (1 - 1 / _REFILL_SHARE)
        return few and load.payload < self._payload_bytes


class Sizing:
    """Decides how many rows each chunk has. Code that cuts tables asks `rows_at`; runs report their results
    to `see`.

    Parameters
    ----------
    rows
        The setting ``chunk_size``. With ``auto``, a chunk is so large that the slowest worker's device needs
        about a second for it. The device time of the worker's last result tells this. The first sizes come
        from `learnt`.
    learnt
        By model, the last number of rows that ``auto`` has chosen. The runs of one client share these
        numbers.
    journals
        Journals of results. If one of these journals has a result that begins at a chunk's first row, the
        chunk gets as many rows as the result. Any other chunk ends, at the latest, where the next result
        begins.
    part_rows
        Number of rows in each part file of the output. No chunk has rows of two files.
    """

    def __init__(
        self,
        rows: int | Literal["auto"],
        learnt: dict[str, int] | None = None,
        journals: Iterable[Journal] = (),
        part_rows: int | None = None,
    ) -> None:
        self._fixed = None if rows == "auto" else rows
        self._learnt = {} if learnt is None else learnt
        self._journals, self._part_rows = [*journals], part_rows
        self._models: dict[str, int] = {}
        """The models that score the chunks, each with the fewest rows that a chunk may have."""
        self._speeds: dict[tuple[str, str], tuple[float, float]] = {}
        """By model and worker: when the worker's last result came, and how many rows its device scored in a
        second.
        """

    def add(self, run: Run) -> None:
        self._models[run.spec.model] = REQUEST_ROWS if run.priority == "request" else MIN_ROWS

    @property
    def is_known(self) -> bool:
        """Whether the size of chunks is known, because it is a fixed number or already follows the workers'
        speed.
        """
        return bool(self._fixed) or self._models.keys() <= self._learnt.keys()

    def rows_at(self, start: int) -> int:
        """Return the number of rows of the chunk that begins at row `start` of the input. If the texts of
        these rows are long, the caller cuts the rows into several smaller chunks.
        """
        wanted = (max(self._learnt.get(model, MIN_ROWS), least) for model, least in self._models.items())
        rows = self._fixed or min(wanted, default=MIN_ROWS)
        cuts = [cut for journal in self._journals if (cut := journal.next_cut(start))]
        here = [size for first, size in cuts if first == start]
        rows = max(here) if here else min([rows, *(first - start for first, _ in cuts)])
        return min(rows, self._part_rows - start % self._part_rows) if self._part_rows else rows

    def see(self, model: str, worker: str, rows: int, device_seconds: float) -> None:
        """Adapt the size of the model's chunks to a result of `worker`. The result has `rows` rows, and took
        the worker's device `device_seconds`. A result without device time changes nothing.
        """
        if self._fixed or not device_seconds:
            return
        now = system.monotonic()
        self._speeds[model, worker] = now, rows / device_seconds
        slowest = min(
            speed
            for (of, _), (at, speed) in self._speeds.items()
            if of == model and now - at <= _GONE_SECONDS
        )
        most = min(self._learnt.get(model, MIN_ROWS) * _GROWTH, MAX_ROWS)
        self._learnt[model] = max(min(round(slowest * CHUNK_SECONDS), most), MIN_ROWS)
