"""Admits requests by their API keys, for HTTP and gRPC."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Literal, ParamSpec, TypeVar

import redis

from rankmill.extensions.gateway.keys.api_keys import ApiKey, KeyStore, fixed_key, is_of
from rankmill.extensions.gateway.keys.limits import Limits
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.protocol.leases import UNRENEWED_SECONDS
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.system import system
from rankmill.producer.client.aio import bridge

P = ParamSpec("P")
T = TypeVar("T")
KeysNeeded = Literal["always", "if there are any", "never"]

MOST_WAIT = 5.0
"""If the Redis server cannot serve, a request is refused after this number of seconds."""

FOR_ADMINS = "this needs a key for admins"

_LOOK_SECONDS = 5.0
"""Seconds between two reads of all API keys from Redis. By these keys, the gateway knows who may read
metrics.
"""

_LOOK_AGAIN_SECONDS = 1.0
"""If a caller with an unknown key wants metrics, all keys are read again, but at most once in this number of
seconds.
"""

logger = logging.getLogger(__name__)


class Admission:
    """Admits requests by their API keys. Use an `Admission` in one event loop only.

    `identify`, `admitted`, `take`, `identify_scraper` and `look` raise `RedisUnavailable` if the Redis server
    does not answer within a few seconds.

    Parameters
    ----------
    client
        A client whose commands wait in the event loop (`LoopRedis`).
    lease_seconds
        Seconds after which the requests of a dead gateway no longer count.
    needed
        When requests need an API key: ``always``, only ``if there are any`` keys, or ``never``. A request
        with a valid key has this key's rights and limits in any case.
    fixed
        The text of a key that is not on the server (the setting ``gateway_api_key``).
    """

    def __init__(
        self, client: redis.Redis, *, lease_seconds: int, needed: KeysNeeded, fixed: str | None = None
    ) -> None:
        self._keys = KeyStore(client)
        self._fixed = fixed
        self._limits = Limits(client, lease_seconds)
        self._seconds = min(lease_seconds, UNRENEWED_SECONDS) / 3
        self._needed = needed
        self._known: list[ApiKey] | None = None
        """All API keys on the Redis server, as `look` has last read them; ``None`` before the first read."""
        self._looked = -math.inf

    async def identify(self, text: str | None) -> ApiKey | None:
        """Find the valid API key with this text.

        Returns ``None`` if there is no such key, and requests need none.

        Raises
        ------
        Refusal
            There is no such key, and requests need one.
        """
        key = self._fixed_key(text) or (await _asked(self._keys.find, text) if text else None)
        if key or self._needed == "never":
            return key
        if self._needed != "always" and not self._fixed and not await _asked(self._keys.any):
            return None
        if text:
            raise Refusal("no_key", "the API key is unknown, revoked or expired")
        raise Refusal("no_key", "give an API key: Authorization: Bearer KEY, or x-api-key: KEY")

    @asynccontextmanager
    async def admitted(self, key: ApiKey | None) -> AsyncIterator[None]:
        """Admit a request before its body is read. The request is in progress until the ``with`` block ends.

        Raises
        ------
        Refusal
            The key already has as many requests in progress as it may have.
        """
        if key is None or key.requests_at_once is None:
            yield
            return
        request = system.unique_id()
        try:
            await _asked(self._limits.begin, key.name, request, key.requests_at_once)
        except asyncio.CancelledError:  # the server may have counted the request already
            await asyncio.shield(self._end(key.name, request))
            raise
        try:
            yield
        finally:
            await asyncio.shield(self._end(key.name, request))

    async def take(self, key: ApiKey | None, model: tuple[str, ...], pairs: int) -> None:
        """Check that a key may use a model, and count a request's pairs against the key's limit of pairs a
        minute.

        Parameters
        ----------
        key
            The request's key; ``None`` allows everything.
        model
            All names of the model that scores the pairs.
        pairs
            The number of pairs.

        Raises
        ------
        Refusal
            The key may not use the model, or may not score this number of pairs now.
        """
        check_model(key, model)
        if key:
            await _asked(self._limits.take_pairs, key, pairs)

    async def identify_scraper(self, text: str | None) -> ApiKey | None:
        """Check that a caller may read metrics, and return its API key.

        - If the Redis server has API keys, only an admin's key may read metrics, because metrics name the
          holders of all keys.
        - If the server has no keys, the caller needs the key in the setting ``gateway_api_key`` if requests
          for scores need it. Otherwise the caller needs no key; without a key, ``None`` is returned.

        An admin can read metrics even while the server does not answer, with a key that the gateway has read
        before.

        Raises
        ------
        Refusal
            The caller may not read metrics.
        """
        if not self._may_scrape(text) and system.monotonic() - self._looked > _LOOK_AGAIN_SECONDS:
            await self.look()
        key = self._find(text)
        if self._may_scrape(text):
            return key
        if key:
            raise Refusal("forbidden", f"API key {key.name!r} may not read metrics: {FOR_ADMINS}")
        raise Refusal("no_key", f"metrics name the holders of all keys: {FOR_ADMINS}")

    def _may_scrape(self, text: str | None) -> bool:
        key = self._find(text)
        if self._known or self._known is None:
            return key is not None and key.admin
        needs_fixed = self._needed == "always" or (self._fixed and self._needed != "never")
        return key is not None or not needs_fixed

    def _find(self, text: str | None) -> ApiKey | None:
        known = (key for key in self._known or () if text and is_of(key, text))
        return self._fixed_key(text) or next(known, None)

    def _fixed_key(self, text: str | None) -> ApiKey | None:
        return fixed_key(text, self._fixed) if text and self._fixed else None

    async def look(self) -> None:
        self._looked = system.monotonic()
        self._known = await _asked(self._keys.all)

    async def watch(self) -> None:
        while True:
            try:
                await self.look()
            except (RankmillError, OSError) as error:
                logger.debug("the keys cannot be looked at: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _end(self, name: str, request: str) -> None:
        try:
            await _asked(self._limits.end, name, request)
        except Exception as error:
            # The request's lease expires by itself.
            logger.warning("a request of key %s counts for a while longer: %s", name, error)

    async def renew(self) -> None:
        """Renew the leases of this gateway's requests in progress, again and again. Never returns."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await bridge.run(self._limits.renew)
            except Exception as error:
                logger.warning("the leases of requests are not renewed: %s", error)


async def _asked(ask: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call `ask` without blocking the event loop. `ask` waits at most `MOST_WAIT` seconds for Redis."""

    def within() -> T:
        with redis_errors(), waiting(most=MOST_WAIT):
            return ask(*args, **options)

    return await bridge.run(within)


def check_model(key: ApiKey | None, names: tuple[str, ...]) -> None:
    """Raise `Refusal` if the key may not use the model that has these names."""
    if key and not key.may_use(*names):
        allowed = ", ".join(key.models or ())
        why = f"may not use the model {names[0]!r:.100}; it may use {allowed}"
        raise Refusal("forbidden", f"API key {key.name!r} {why}")


def key_text(headers: Mapping[str, str]) -> str | None:
    """Return the text of the API key in a request's headers, or ``None`` if there is none.

    ``Authorization: KEY`` is accepted, too, because some clients leave out ``Bearer``.

    Parameters
    ----------
    headers
        The headers, with names in lower case.
    """
    given = headers.get("x-api-key") or headers.get("authorization", "")
    scheme, _, rest = given.strip().partition(" ")
    return (rest.strip() if scheme.lower() == "bearer" else given.strip()) or None
