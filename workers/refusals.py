"""What a worker leaves to other workers, for how long, and what it tells the runs."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.results import ChunkFailure
from jobs.runs import RunStore
from jobs.worker_report import queue_workers

if TYPE_CHECKING:
    from workers.claims import Claim

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a worker tries again what it has refused; the pause doubles with each refusal."""

FIRST_REST, LONGEST_REST = 0.05, 1.0
"""Seconds without taking a job, when all that the queue had was refused."""

ROUND = 64
"""So many refused jobs go back to the end of their queue before the worker rests."""

_TELL_SECONDS = 1.0
"""A run is told that often that it is refused, at most, and asked who else has refused it."""

_RUNS = 1000
"""Runs that a worker remembers to have refused."""

_TTL = 86400
"""Expiry (s) of what a run is told, where its job does not say it."""


@dataclass
class _Refused:
    reason: str
    pause: float
    until: float


class Refusals:
    """A circuit breaker for each model, or whatever else keeps a worker from scoring.

    Closed: chunks are taken. Open, after a refusal: they go back, for a pause that doubles. Then one
    chunk is tried, which closes it or opens it again.
    """

    def __init__(self) -> None:
        self._refused: dict[Hashable, _Refused] = {}
        self._round: set[str] = set()
        self._rest = FIRST_REST
        self._rests_until = 0.0

    def why(self, key: Hashable) -> str | None:
        """Why `key` is left alone now; ``None`` if it may be tried."""
        found = self._refused.get(key)
        return found.reason if found and time.monotonic() < found.until else None

    def open(self, key: Hashable, reason: str) -> bool:
        """Leave `key` alone, for twice as long as the last time; whether it is the first time."""
        before = self._refused.get(key)
        pause = min(2 * before.pause, LONGEST_PAUSE) if before else FIRST_PAUSE
        self._refused[key] = _Refused(reason, pause, time.monotonic() + pause)
        return before is None

    def close(self, key: Hashable) -> None:
        """`key` can be scored; what comes next is work, and no time to rest."""
        self._refused.pop(key, None)
        self._round.clear()
        self._rest = FIRST_REST

    def sent_back(self, job_id: str) -> None:
        """Note that a job went back; the worker rests once it has seen what the queue holds."""
        if job_id not in self._round and len(self._round) < ROUND:
            self._round.add(job_id)
            return
        self._round.clear()
        self._rests_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)

    def reasons(self) -> tuple[str, ...]:
        """Why this worker leaves chunks to others, a reason for each thing it leaves alone now."""
        found = list(self._refused.values())
        return tuple(each.reason for each in found if time.monotonic() < each.until)

    @property
    def rest(self) -> float:
        """Seconds in which no job should be taken, so that others get them."""
        return max(self._rests_until - time.monotonic(), 0.0)


class RefusedRuns:
    """What a worker tells the runs that it refuses.

    Parameters
    ----------
    store
        Where runs live.
    worker
        Name of the RQ worker.
    """

    def __init__(self, store: RunStore, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._told: OrderedDict[str, float] = OrderedDict()

    def refuse(self, claim: Claim, reason: str) -> ChunkFailure | None:
        """Tell the run that this worker cannot score it; a fatal failure, if no live worker can."""
        run_id, chunk = claim.job.chunk
        queue, now = claim.queue.name, time.monotonic()
        if now - self._told.get(run_id, -math.inf) < _TELL_SECONDS:
            return None
        self._told[run_id] = now
        if len(self._told) > _RUNS:
            self._told.popitem(last=False)
        said = self._store.refuse(run_id, claim.job.run_ttl or _TTL, self._worker, reason)
        live = queue_workers(self._store.redis, queue).scoring | {self._worker}
        if not live <= said.keys():
            return None
        if len(live) > 1:
            each = "; ".join(f"{worker}: {said[worker]}" for worker in sorted(live))
            reason = f"no worker of queue {queue!r} can score it: {each}"
        return ChunkFailure(chunk=chunk, message=reason, fatal=True)

    def take_back(self, run_id: str) -> None:
        """Tell the run that this worker can score it, if it was told otherwise."""
        if self._told.pop(run_id, None) is not None:
            self._store.take_back(run_id, self._worker)
