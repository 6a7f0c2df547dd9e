"""Refusals of runs: which workers refuse a run, why, and until when.

A run that no worker has begun ends as soon as all live workers refuse it. A run that a worker has begun ends
only when all live workers have refused it for the length of a lease. The reason is that the worker that began
it may be missing for a while: the server may have lost that worker's report, or the worker may be starting
again. A worker counts as live while it has a report. It renews its report at least once in the length of a
lease. Drained workers, which take no new chunks, do not count.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.leases import server_time
from rankmill.jobs.protocol.worker_report import queue_workers, taking_workers
from rankmill.jobs.system import system

_REPORT_SECONDS = 1.0
"""A worker records its refusal of a run at most once in this many seconds, because recording also reads the
refusals of all other workers.
"""

_SERIES_SECONDS = 30.0
"""Two refusals of a run count as one continuous refusal if the time between them is shorter than a lease plus
this many seconds. The time may be that long: a busy worker tries a refused run again only after some 10 s,
and only when the worker has scored all that it has claimed.
"""

_REMEMBERED = 1000


class RunRefusals:
    """Records the runs that one worker refuses, and finds out whether all workers refuse them.

    Each live worker renews its report within `lease_seconds`.
    """

    def __init__(self, client: redis.Redis, worker: str, lease_seconds: float) -> None:
        self._client: Any = client
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._looks: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By the run's id, two moments in monotonic seconds. The first is when this worker last read the
        run's refusals. The second is since when all live workers refuse the run (infinity if some do not).
        """

    def refuse(
        self, run_id: str, queue: str, reason: str, *, seconds: float, ttl: int, in_redis: bool = True
    ) -> str | None:
        """Record that this worker cannot score a run. Return why the run must end, or ``None`` if it goes on.

        The run must end if all live workers of its `queue` have refused it for long enough, as the module's
        docstring says. A call within a second after the last call for the same run does nothing. The other
        parameters are those of `record`.
        """
        last, since = self._looks.get(run_id, (-math.inf, math.inf))
        if system.monotonic() - last < _REPORT_SECONDS:
            return None
        self._looks[run_id] = system.monotonic(), math.inf  # set before `record`, whose reply may be lost
        reasons = self.record(run_id, reason, seconds=seconds, ttl=ttl, in_redis=in_redis)
        scoring = queue_workers(self._client, queue).scoring
        live = taking_workers(self._client, scoring) | {self._worker}
        all_refuse, now = live <= reasons.keys(), system.monotonic()
        since = min(since, now) if now - last < self._lease_seconds + _SERIES_SECONDS else now
        self._looks[run_id] = now, since if all_refuse else math.inf
        if len(self._looks) > _REMEMBERED:
            self._looks.popitem(last=False)
        if not all_refuse or (now - since < self._lease_seconds and self._has_begun(run_id)):
            return None
        named: dict[str, list[str]] = {}
        for worker in sorted(live):
            named.setdefault(reasons[worker], []).append(worker)
        if len(named) == 1:
            return reason
        details = "; ".join(f"{', '.join(workers)}: {reason}" for reason, workers in named.items())
        return f"no worker of queue {queue!r} can score it: {details}"

    def record(
        self, run_id: str, reason: str, *, seconds: float, ttl: int, in_redis: bool = True
    ) -> dict[str, str]:
        """Record a refusal. Returns, by the worker's name, why each worker refuses the run now.

        Parameters
        ----------
        run_id
            The run.
        reason
            Why this worker cannot score the run.
        seconds
            How long the refusal counts. After that time, the worker tries the run again.
        ttl
            Redis keeps all refusals of the run until this many seconds after the latest one.
        in_redis
            Whether the run was put into Redis. This is false for a job that contains its pairs. If it is
            true, but the run is gone, for instance because it was cancelled, all refusals of the run are
            deleted.
        """
        key = keys.refusals(run_id)
        now = server_time(self._client)
        with self._client.pipeline() as pipe:
            pipe.hset(key, self._worker, f"{now + seconds:.3f} {reason}")
            pipe.expire(key, ttl)
            pipe.hgetall(key)
            pipe.exists(keys.run(run_id))
            *_, said, run_exists = pipe.execute()
        if in_redis and not run_exists:  # the run was cancelled meanwhile
            self._client.unlink(key)
        reasons = {}
        for name, value in said.items():
            until, _, why = value.partition(b" ")
            if until.replace(b".", b"").isdigit() and float(until) >= now:
                reasons[name.decode(errors="replace")] = why.decode(errors="replace")
        return reasons

    def take_back(self, run_id: str) -> None:
        """Withdraw this worker's refusal, if it has recorded one, because it can score the run now."""
        if self._looks.pop(run_id, None) is not None:
            self._client.hdel(keys.refusals(run_id), self._worker)

    def _has_begun(self, run_id: str) -> bool:
        """Return whether a worker has begun the run. If so, the worker has also settled facts, such as the
        precision.
        """
        return bool(self._client.exists(keys.settled(run_id)))
