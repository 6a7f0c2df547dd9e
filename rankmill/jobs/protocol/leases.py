"""Leases: who holds something, and until when. The holder renews its lease again and again; a lease that is
not renewed lapses.

A lease is an entry of a sorted set in Redis, with the time at which it lapses. This time is by the server's
clock, so the clocks of hosts need not agree. There are two kinds. `Leases` are deleted when they lapse.
Leases of chunks and submitted runs are in RQ's registries of started jobs, and stay there until another
process takes the work. `rankmill.workers.queue.heartbeat` renews the leases of a worker's chunks.

The server's clock may jump when another host takes over. A jump ahead makes all leases lapse together: see
`Renewals`. After a jump back, leases of dead processes would last longer by the jump: see `BOUND`.
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

BOUND = Script("jobs/protocol/lua/bound.lua")
"""A Lua function for other scripts, which shortens leases of which too much time is left. Too much is more
than the length of a lease, and also more than `UNRENEWED_SECONDS`.
"""

_BOUND_LEASES = Script("jobs/protocol/lua/bound_leases.lua", BOUND)
_TAKE = Script("jobs/protocol/lua/take_lease.lua", BOUND)
_RENEW = Script("jobs/protocol/lua/renew_leases.lua")
_HOLDERS = Script("jobs/protocol/lua/lease_holders.lua", BOUND)
_HOLD = Script("jobs/protocol/lua/hold.lua")


def hold(pipe: Any, key: str, holder: str, seconds: float, *, only_renew: bool) -> None:
    """Begin or renew a lease of the kind that stays in Redis when it lapses, until another process takes the
    work.

    With `only_renew`, an existing lease is renewed, and no lease is begun.
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
    """Move a job between lists of Redis, and delete the entry of the job's lease or pause, in one
    transaction. `do` adds the commands that move the job.

    Returns whether the server has confirmed the transaction. If the entry is gone, the job is not moved:
    another process may have moved the job, or an earlier transaction whose reply was lost.

    Parameters
    ----------
    client, key, holder
        The server, the key of the sorted set of leases or pauses, and the job's entry in this sorted set.
    job
        The job's key, which the commands change.
    do
        Adds the commands to a pipeline.
    until
        The job is not moved if the entry ends later than this (s since 1970), because the lease was renewed
        meanwhile.
    """
    connection: Any = client
    wanted = connection.pipeline()
    # `do` may use a dead connection, and wait for the timeout of that connection. So `do` is called before
    # another connection begins to watch the job.
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
                if not pipe.watching:  # before WATCH, the client itself has waited for the server
                    raise
                # The connection and its WATCH are lost, and redis-py has tried only once to connect again.
                pipe.watching = False


def bound_leases(client: redis.Redis, key: str, seconds: float) -> None:
    """Shorten the leases under `key` that end too late, as `BOUND` does. The leases must be of the kind that
    stays in Redis when a lease lapses.
    """
    _BOUND_LEASES.run(client, [key], seconds)


def server_time(client: redis.Redis) -> float:
    """Return the time by the Redis server's clock, in seconds since 1970. This clock is the same for all
    hosts.
    """
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
        """Renew the holder's lease, or begin one if fewer than `most` leases exist. Returns whether the
        holder has a lease now.
        """
        limit = int(min(most, 1 << 53))
        return bool(_TAKE.run(self._redis, [self._key], limit, self._seconds, holder))

    def renew(self, holders: Iterable[str]) -> None:
        """Renew the leases of `holders`; a lease that was given up or forgotten is not begun again."""
        _RENEW.run(self._redis, [self._key], self._seconds, *holders)

    def release(self, holder: str) -> None:
        self._redis.zrem(self._key, holder)

    def holders(self) -> list[str]:
        """The present holders, in the order in which their leases lapse."""
        names = _HOLDERS.run(self._redis, [self._key], self._seconds)
        return [name.decode(errors="replace") for name in names]


class Renewals:
    """Knows when this process renewed its leases, and whether it may take work from processes whose leases
    have lapsed.

    Parameters
    ----------
    beat_seconds, lease_seconds
        Seconds between two renewals, and seconds that a lease lasts.
    """

    def __init__(self, beat_seconds: float, lease_seconds: float) -> None:
        self._beat, self._lease = beat_seconds, lease_seconds
        self._last = system.monotonic()
        self._ahead = math.nan
        self._trusted_from = 0.0

    @property
    def age(self) -> float:
        """Seconds since this process last renewed its leases on the server."""
        return system.monotonic() - self._last

    def renewed(self, server_now: float) -> None:
        """Note that this process has renewed its leases, and the time of the server's clock after the
        renewal.

        After an outage of Redis, or a jump of the server's clock, this process takes over no lapsed lease for
        the length of a lease. Leases of live processes may have lapsed too, and live processes can renew
        their leases meanwhile. An outage is detected by the long time since the last renewal.
        """
        now = system.monotonic()
        ahead = server_now - now
        if now - self._last > 2 * self._beat or abs(ahead - self._ahead) > self._beat:
            self._trusted_from = now + self._lease
        self._last, self._ahead = now, ahead

    @property
    def others_have_lapsed(self) -> bool:
        """Whether this process may take the work of another process whose lease has lapsed by the server's
        clock.
        """
        return system.monotonic() >= self._trusted_from
