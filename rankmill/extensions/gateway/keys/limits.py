"""Limits the pairs per minute and the requests in progress of API keys. The gateways on one Redis server
count together.
"""

from __future__ import annotations

from collections import defaultdict

import redis

from rankmill.extensions.gateway import redis_keys as keys
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.jobs.protocol.leases import Leases
from rankmill.jobs.protocol.script import Script

_TAKE = Script("extensions/gateway/keys/lua/take_pairs.lua")


class Limits:
    """Counts pairs and requests in progress, together for all API keys that have the same name.

    Pairs are taken from a token bucket, which fills within a minute. A full bucket has as many pairs as the
    key may score in a minute, and one request may take all of them. Each counted request in progress
    holds a lease. The leases of a dead gateway expire, and then the dead gateway's requests no longer count.

    Parameters
    ----------
    client
        A client of the Redis server.
    lease_seconds
        How long a lease lasts unless it is renewed.
    """

    def __init__(self, client: redis.Redis, lease_seconds: int) -> None:
        self._client = client
        self._lease_seconds = lease_seconds
        self._counted: defaultdict[str, set[str]] = defaultdict(set)
        """For each name of API keys, the ids of this gateway's requests in progress."""

    def begin(self, name: str, request: str, most: int) -> None:
        """Count the request with the id `request` as in progress, until `end` is called. The request's API
        key is called `name`.

        Raises
        ------
        Refusal
            Already `most` requests with keys of this name are in progress.
        """
        if not self._leases(name).take(request, most):
            why = f"API key {name!r} may have {most:,} requests at once; try again later"
            raise Refusal("busy", why, retry_after=1)
        self._counted[name].add(request)

    def end(self, name: str, request: str) -> None:
        self._counted[name].discard(request)
        self._leases(name).release(request)

    def renew(self) -> None:
        """Renew the leases of this gateway's requests in progress; call this at shorter intervals than
        ``lease_seconds``.
        """
        for name, requests in list(self._counted.items()):
            if requests:
                self._leases(name).renew(list(requests))

    def _leases(self, name: str) -> Leases:
        return Leases(self._client, keys.api_key_requests(name), self._lease_seconds)

    def take_pairs(self, key: ApiKey, pairs: int) -> None:
        """Take the pairs of a request from the token bucket of a key. Keys with the same name share a bucket.

        Raises
        ------
        Refusal
            The bucket now has fewer pairs than the request (``busy``). Or the request has more pairs than a
            full bucket (``too_large``).
        """
        most = key.pairs_per_minute
        if most is None:
            return
        limit = f"API key {key.name!r} may score {most:,} pairs a minute"
        if pairs > most:
            why = f"{limit}, and the request has {pairs:,}; send it in parts, or as a batch"
            raise Refusal("too_large", why)
        seconds = _TAKE.run(self._client, [keys.api_key_pairs(key.name)], most, pairs)
        if seconds:
            raise Refusal("busy", f"{limit}; try again in {seconds} s", retry_after=seconds)
