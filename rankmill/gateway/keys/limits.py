"""Limits of API keys, which all gateways on one server share: pairs a minute, and requests at once."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

import redis
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from limits.typing import RedisClient

from rankmill.gateway.keys.api_keys import ApiKey
from rankmill.gateway.refusals import Refusal
from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.leases import Leases
from rankmill.jobs.system import system

_MINUTE = 60


@dataclass(frozen=True)
class CountedRequest:
    """A request in progress, which counts among those of its key's name."""

    name: str
    id: str


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
        self._client = client
        self._lease_seconds = lease_seconds
        self._pairs = SlidingWindowCounterRateLimiter(_Counters(client))
        self._counted: set[CountedRequest] = set()

    def begin(self, key: ApiKey) -> CountedRequest | None:
        """Count a request until `end`; ``None`` for a key without such a limit.

        Raises
        ------
        Refusal
            Too many requests with keys of this name are in progress.
        """
        most = key.requests_at_once
        if most is None:
            return None
        request = CountedRequest(key.name, system.unique_id())
        if not self._leases(key.name).take(request.id, most):
            raise Refusal(
                "busy",
                f"API key {key.name!r} may have {most:,} requests at once; try again later",
                retry_after=1,
            )
        self._counted.add(request)
        return request

    def end(self, request: CountedRequest | None) -> None:
        """Count a request no longer."""
        if request:
            self._counted.discard(request)
            self._leases(request.name).release(request.id)

    def renew(self) -> None:
        """Renew the leases of the requests in progress; to be called well within `lease_seconds`."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for request in self._counted:
            names[request.name].append(request.id)
        for name, requests in names.items():
            self._leases(name).renew(requests)

    def _leases(self, name: str) -> Leases:
        return Leases(self._client, keys.api_key_requests(name), self._lease_seconds)

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
