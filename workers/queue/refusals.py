"""Which models and runs a worker refuses, for how long, and how their runs learn of it."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import redis

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.protocol.refusals import refuse, take_back
from rankmill.jobs.protocol.worker_report import taking_workers

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a worker tries again a model or run that it refused; the pause doubles each time."""

FIRST_REST, LONGEST_REST = 0.05, 1.0
"""Seconds in which the worker takes no job, after it has refused all jobs in the queue."""

ROUND = 64
"""Refused jobs that go back to the end of their queue before the worker rests."""

_FORGET_SECONDS = 600.0
"""Time after its pause until a refusal is forgotten that no chunk has tried."""

_REPORT_SECONDS = 1.0
"""Shortest time between two refusals recorded in a run; each also reads who else has refused it."""

_REMEMBERED = 1000
"""Refused models and runs that a worker remembers, at most."""


class StillRefused(WorkerError):
    """The worker has refused the model or run before, and does not try it again yet."""


@dataclass
class _Refused:
    reason: str
    pause: float
    until: float


class Refusals:
    """A circuit breaker for each model or run that a worker cannot score; `key` names it.

    Closed: the worker takes chunks. Open, after a refusal: it puts chunks back until the pause is over;
    the pause doubles each time. Half-open, after the pause: the next chunk closes the breaker or opens it
    again. A breaker that is half-open for long is forgotten.
    """

    def __init__(self) -> None:
        self._refused: dict[Hashable, _Refused] = {}
        self._round: set[str] = set()
        self._rest = FIRST_REST
        self._rests_until = 0.0

    def why(self, key: Hashable) -> str | None:
        """Why `key` is refused now; ``None`` if it may be tried."""
        found = self._refused.get(key)
        return found.reason if found and time.monotonic() < found.until else None

    def check(self, key: Hashable) -> None:
        """Raise `StillRefused` if `key` is refused now."""
        if reason := self.why(key):
            raise StillRefused(reason)

    def open(self, key: Hashable, reason: str) -> bool:
        """Refuse `key` for twice as long as the last time; return whether this is the first time."""
        before = self._refused.get(key)
        now = time.monotonic()
        self._refused = {
            key: each for key, each in self._refused.items() if now < each.until + _FORGET_SECONDS
        }
        pause = min(2 * before.pause, LONGEST_PAUSE) if before else FIRST_PAUSE
        self._refused[key] = _Refused(reason, pause, now + pause)
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return before is None

    def forget(self, key: Hashable) -> None:
        """Refuse `key` no longer: nobody will ask for it."""
        self._refused.pop(key, None)

    def close(self, key: Hashable) -> None:
        """Accept `key` again, and do not rest: the queue has work for this worker."""
        self._refused.pop(key, None)
        self._round.clear()
        self._rest = FIRST_REST

    def sent_back(self, job_id: str) -> None:
        """Note that a job went back; the worker rests when it has seen the whole queue."""
        if job_id not in self._round and len(self._round) < ROUND:
            self._round.add(job_id)
            return
        self._round.clear()
        self._rests_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)

    def reasons(self) -> tuple[str, ...]:
        """Why this worker leaves chunks to others: one reason for each model or run refused now."""
        return tuple(each.reason for each in list(self._refused.values()) if time.monotonic() < each.until)

    def half_open(self) -> tuple[str, ...]:
        """Reasons of earlier refusals whose pause is over; the next chunk shows whether they still hold."""
        now = time.monotonic()
        found = list(self._refused.values())
        return tuple(each.reason for each in found if each.until <= now < each.until + _FORGET_SECONDS)

    def seconds(self, reason: str) -> float:
        """How long the worker goes on refusing for this reason, at most."""
        now = time.monotonic()
        return max(
            (each.until - now for each in list(self._refused.values()) if each.reason == reason), default=0.0
        )

    @property
    def rest(self) -> float:
        """Seconds in which this worker should take no job, so that others get them."""
        return max(self._rests_until - time.monotonic(), 0.0)


class RefusedRuns:
    """Records in each run that this worker refuses it, and finds out whether all workers do.

    Parameters
    ----------
    client
        The server.
    worker
        Name of the RQ worker.
    refusals
        Knows how long each refusal lasts: it counts no longer, as the worker then tries again.
    """

    def __init__(self, client: redis.Redis, worker: str, refusals: Refusals) -> None:
        self._client = client
        self._worker = worker
        self._refusals = refusals
        self._recorded: OrderedDict[str, float] = OrderedDict()

    def refuse(self, run_id: str, queue: str, reason: str, ttl: int, *, in_redis: bool) -> str | None:
        """Record that this worker cannot score a run, for `ttl` seconds at most.

        Returns why no live worker of its queue can, if so. `in_redis` as in `refuse`.
        """
        now = time.monotonic()
        if now - self._recorded.get(run_id, -math.inf) < _REPORT_SECONDS:
            return None
        self._recorded[run_id] = now
        if len(self._recorded) > _REMEMBERED:
            self._recorded.popitem(last=False)
        until = time.time() + self._refusals.seconds(reason)
        client, worker = self._client, self._worker
        reasons = refuse(client, run_id, ttl, worker, reason, until=until, in_redis=in_redis)
        live = taking_workers(client, queue) | {worker}
        if not live <= reasons.keys():
            return None
        named: dict[str, list[str]] = {}
        for name in sorted(live):
            named.setdefault(reasons[name], []).append(name)
        if len(named) == 1:
            return reason
        each = "; ".join(f"{', '.join(workers)}: {reason}" for reason, workers in named.items())
        return f"no worker of queue {queue!r} can score it: {each}"

    def take_back(self, run_id: str) -> None:
        """Withdraw the recorded refusal, if any: this worker can score the run."""
        if self._recorded.pop(run_id, None) is not None:
            take_back(self._client, run_id, self._worker)
