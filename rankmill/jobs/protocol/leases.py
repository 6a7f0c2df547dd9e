"""Leases, which say who holds something and until when. A lease lapses unless its holder keeps renewing it.

A lease is an entry of a sorted set in Redis, with the time at which the lease lapses. Times are by the
server's clock, so the clocks of hosts need not agree. There are two kinds of leases. Leases of the class
`Leases` are deleted when they lapse. Leases of chunks and submitted runs are in RQ's registries of started
jobs, and stay there until another process takes the work; see `RQ_DELAY`. `rankmill.workers.queue.heartbeat`
renews the leases of a worker's chunks.

The server's clock may jump when another host takes over. A jump ahead makes all leases lapse together, which
`Renewals` handles. After a jump back, leases of dead processes would last longer, which `BOUND` prevents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import redis
from redis.client import Pipeline

from rankmill.jobs.protocol.script import Script
from rankmill.jobs.system import system

UNRENEWED_SECONDS = 120
"""Each live process renews its leases within this time (s), because ``heartbeat_seconds`` is a minute at
most.
"""

RQ_DELAY = 365 * 86400
"""RQ's registries store, for each lease, a time that is this many seconds after the lease's end. RQ's own
code, such as ``rq info`` or a dashboard, takes from a registry all jobs whose time is over. That code would
drop a submitted run, and would not record that a chunk may have killed its worker.
"""

OURS = RQ_DELAY / 2
"""If the time of an entry in RQ's registries is more than this many seconds from now, the entry is a lease of
rankmill. Any other entry belongs to a plain RQ worker, or is a lease that was ended.
"""

BOUND = Script("jobs/protocol/lua/bound.lua")
"""A Lua function that shortens each lease that lasts longer than a new lease, and longer than
`UNRENEWED_SECONDS`.
"""

_BOUND_LEASES = Script("jobs/protocol/lua/bound_leases.lua", BOUND)
_TAKE = Script("jobs/protocol/lua/take_lease.lua", BOUND)
_RENEW = Script("jobs/protocol/lua/renew_leases.lua")
_HOLDERS = Script("jobs/protocol/lua/lease_holders.lua", BOUND)
_HOLD = Script("jobs/protocol/lua/hold.lua")


def hold(pipe: Any, key: str, holder: str, seconds: float, *, only_renew: bool) -> None:
    """Begin or renew a lease that stays in Redis when it lapses, until another process takes the work.

    With `only_renew`, no lease is begun.
    """
    _HOLD.run(pipe, [key], holder, seconds, int(only_renew))


def move(
    client: redis.Redis,
    key: str,
    holder: str | bytes,
    job: str,
    do: Callable[[Pipeline], object],
    until: float = math.inf,
) -> bool:
    """Move a job between lists of Redis, and end its lease or pause, in one transaction.

    Returns whether the server has confirmed the transaction. If the lease or pause is gone, nothing is moved:
    either another process has moved the job, or this call has, in a transaction whose reply was lost.

    Parameters
    ----------
    client, key, holder
        The server, the key of the sorted set of leases or pauses, and the job's entry in this sorted set.
    job
        The job's key, which the commands change.
    do
        Adds to a pipeline the commands that move the job.
    until
        The job is not moved if its lease ends later than this (s since 1970), because the holder has then
        renewed the lease.
    """
    connection: Any = client
    wanted = connection.pipeline()
    # Call `do` before WATCH, because `do` may use a dead connection and wait for its timeout.
    do(wanted)
    wanted.zrem(key, holder)
    while True:
        with connection.pipeline() as pipe:
            try:
                pipe.watch(job)
                end = pipe.zscore(key, holder)
                if end is None or end > until:
                    return False
                pipe.multi()
                pipe.command_stack += wanted.command_stack
                pipe.execute()
                return True
            except redis.WatchError:
                pass
            except (redis.ConnectionError, redis.TimeoutError):
                if not pipe.watching:  # the error came from WATCH, for which the client has already waited
                    raise
                # The connection and its WATCH are lost, and redis-py has tried only once to connect again.
                pipe.watching = False


def bound_leases(client: redis.Redis, key: str, seconds: float) -> None:
    """Shorten the leases in one of RQ's registries that last too long, because the server's clock has jumped
    back.

    Parameters
    ----------
    client, key
        The server, and the key of the registry.
    seconds
        How long a new lease lasts.
    """
    _BOUND_LEASES.run(client, [key], max(seconds, UNRENEWED_SECONDS) + RQ_DELAY)


def server_time(client: redis.Redis) -> float:
    """Return the time of the Redis server's clock, which all hosts share, in seconds since 1970."""
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


class Leases:
    """The leases under one key of Redis.

    Parameters
    ----------
    client, key
        The server, and the key of the sorted set.
    seconds
        How long a lease lasts unless it is renewed.
    """

    def __init__(self, client: redis.Redis, key: str, seconds: float) -> None:
        self._redis: Any = client
        self._key = key
        self._seconds = seconds

    def take(self, holder: str, most: float = math.inf) -> bool:
        """Renew the holder's lease, or begin one if fewer than `most` leases exist.

        Returns whether the holder has a lease now.
        """
        limit = int(min(most, 1 << 53))
        return bool(_TAKE.run(self._redis, [self._key], limit, self._seconds, holder))

    def renew(self, holders: Iterable[str]) -> None:
        """Renew the leases of `holders`. A holder without a lease does not get one."""
        _RENEW.run(self._redis, [self._key], self._seconds, *holders)

    def release(self, holder: str) -> None:
        self._redis.zrem(self._key, holder)

    def holders(self) -> list[str]:
        """The present holders, in the order in which their leases lapse."""
        names = _HOLDERS.run(self._redis, [self._key], self._seconds)
        return [name.decode(errors="replace") for name in names]


class Renewals:
    """Knows when this process last renewed its leases, and whether it may take over lapsed leases of other
    processes.

    Parameters
    ----------
    beat_seconds
        Seconds between two renewals.
    lease_seconds
        Seconds that a lease lasts.
    after_outage
        Whether this process has begun while Redis was away.
    """

    def __init__(self, beat_seconds: float, lease_seconds: float, *, after_outage: bool = False) -> None:
        self._beat, self._lease = beat_seconds, lease_seconds
        self._last = system.monotonic()
        self._ahead = math.nan
        self._trusted_from = self._last + lease_seconds if after_outage else 0.0

    @property
    def age(self) -> float:
        """Seconds since this process last renewed its leases on the server."""
        return system.monotonic() - self._last

    def renewed(self, server_now: float) -> None:
        """Record that this process has just renewed its leases.

        If Redis was away or the server's clock has jumped, this process waits for the length of a lease
        before it takes over lapsed leases. Live processes whose leases have lapsed renew them in that time.

        Parameters
        ----------
        server_now
            Time of the server's clock after the renewal.
        """
        now = system.monotonic()
        ahead = server_now - now
        if now - self._last > 2 * self._beat or abs(ahead - self._ahead) > self._beat:
            self._trusted_from = now + self._lease
        self._last, self._ahead = now, ahead

    @property
    def others_have_lapsed(self) -> bool:
        """Whether a lapsed lease means that its holder is dead, so that this process may take the holder's
        work.
        """
        return system.monotonic() >= self._trusted_from
