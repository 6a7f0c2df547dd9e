"""Limits of API keys, which all gateways on one server share: pairs a minute, and requests at once."""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import redis
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from limits.typing import RedisClient

from rankmill.gateway.keys.api_keys import ApiKey
from rankmill.gateway.refusals import Refusal
from rankmill.jobs.contract import keys

_MINUTE = 60

_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
"""KEYS: requests. ARGV: most requests, lease (s), request."""

_RENEW = """
local clock = redis.call('TIME')
for place = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', clock[1] + clock[2] / 1000000 + ARGV[1], ARGV[place])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
"""KEYS: requests. ARGV: lease (s), requests."""


@dataclass(frozen=True)
class Lease:
    """A request in progress, which counts among those of its key's name."""

    name: str
    request: str


class Limits:
    """Counts pairs and requests by the name of their key.

    A request holds a lease. The leases of a gateway that dies expire, so its requests count no longer.

    Parameters
    ----------
    client
        The server.
    lease_seconds
        How long a lease lasts unless it is renewed.
    """

    def __init__(self, client: redis.Redis, lease_seconds: int) -> None:
        self._redis: Any = client
        self._lease_seconds = lease_seconds
        self._pairs = SlidingWindowCounterRateLimiter(_Counters(client))
        self._held: set[Lease] = set()

    def begin(self, key: ApiKey) -> Lease | None:
        """Count a request until `end`; ``None`` for a key without such a limit.

        Raises
        ------
        Refusal
            Too many requests with keys of this name are in progress.
        """
        most = key.requests_at_once
        if most is None:
            return None
        lease = Lease(key.name, uuid.uuid4().hex)
        place = keys.api_key_requests(key.name)
        if not self._redis.eval(_TAKE, 1, place, most, self._lease_seconds, lease.request):
            raise Refusal(
                "busy",
                f"API key {key.name!r} may have {most:,} requests at once; try again later",
                retry_after=1,
            )
        self._held.add(lease)
        return lease

    def end(self, lease: Lease | None) -> None:
        """Count a request no longer."""
        if lease:
            self._held.discard(lease)
            self._redis.zrem(keys.api_key_requests(lease.name), lease.request)

    def renew(self) -> None:
        """Renew the leases of the requests in progress; to be called well within `lease_seconds`."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for lease in self._held:
            names[lease.name].append(lease.request)
        for name, requests in names.items():
            self._redis.eval(_RENEW, 1, keys.api_key_requests(name), self._lease_seconds, *requests)

    def take_pairs(self, key: ApiKey, pairs: int) -> None:
        """Count pairs that are to be scored.

        Raises
        ------
        Refusal
            ``busy``: they are too many, after those of the last minute. ``too_large``: they are more than the
            key allows in a minute.
        """
        most = key.pairs_per_minute
        if most is None or not pairs:
            return
        if pairs > most:
            raise Refusal(
                "too_large",
                f"API key {key.name!r} may score {most:,} pairs a minute, and the request has {pairs:,}; "
                "send it in parts, or as a batch",
            )
        item = RateLimitItemPerMinute(most)
        if not self._pairs.hit(item, key.name, cost=pairs):
            before, before_ends, now, now_ends = self._counts(item.key_for(key.name))
            seconds = seconds_until(most - pairs, before, before_ends, now, now_ends - _MINUTE)
            raise Refusal(
                "busy",
                f"API key {key.name!r} may score {most:,} pairs a minute; try again in {seconds} s",
                retry_after=seconds,
            )

    def _counts(self, name: str) -> tuple[int, float, int, float]:
        storage = self._pairs.storage
        assert isinstance(storage, _Counters)
        return storage.get_sliding_window(name, _MINUTE)


class _Counters(RedisStorage):
    """The counters of ``limits``, by way of a client that there is already."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        super().__init__("redis://", connection_pool=client.connection_pool, key_prefix=keys.limits())

    def get_connection(self, readonly: bool = False) -> RedisClient:
        return cast("RedisClient", self._client)


def seconds_until(room: int, before: int, before_ends: float, now: int, now_ends: float) -> int:
    """Whole seconds, at least 1, until the pairs that count are at most `room`.

    ``limits`` counts those of the present minute, and of the minute before a share that falls to none at its
    end.

    Parameters
    ----------
    room
        How many may count.
    before, before_ends
        Pairs of the minute before, and seconds until they count no more.
    now, now_ends
        Pairs of the present minute, and seconds until it ends and becomes the minute before.

    >>> seconds_until(room=50, before=100, before_ends=60, now=0, now_ends=60)
    30
    >>> seconds_until(room=50, before=0, before_ends=0, now=100, now_ends=20)
    50
    """
    if now <= room:  # it is the minute before that must count less
        seconds = before_ends - _MINUTE * (room - now + 1) / before if before else 0.0
    else:
        seconds = now_ends + _MINUTE - _MINUTE * (room + 1) / now
    return max(1, math.ceil(seconds + 1e-3))
