"""Keeps the API keys of the gateway in Redis, with their rights and limits.

A key's text is shown once, when the key is made. Redis has only the text's SHA-256, and nobody can find a
text with 192 random bits by trying.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable
from typing import Annotated, Any

import redis
from pydantic import Field, ValidationError

from rankmill.extensions.gateway import redis_keys as keys
from rankmill.jobs.contract.errors import ConfigError, InputError, WireError
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.contract.schema import Seconds, Weight, WireModel
from rankmill.jobs.runtime.passwords import API_KEY, API_KEY_PREFIX
from rankmill.jobs.system import system

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
logger = logging.getLogger(__name__)

_NEVER = 1e11
"""Expiry of a key that never expires, in seconds since 1970."""

Limit = Annotated[int, Field(ge=1, lt=1 << 31)]


class ApiKey(WireModel):
    """An API key and its rights. All keys of one name share limits, files and batches, so a new key can
    replace an old one of the same name.

    Attributes
    ----------
    digest
        SHA-256 of the key's text, in hexadecimal digits.
    models
        Names of the models that the key may use; ``None`` means all models. A name without ``@`` includes all
        versions and aliases of that model.
    pairs_per_minute, requests_at_once
        Limits; ``None`` means no limit.
    priority
        Priority of the key's requests; with ``None``, those of up to 256 pairs have the priority ``request``,
        others ``bulk``.
    admin
        Whether the key may load and unload models, read metrics and all usage, and use the files and batches
        of all keys.
    manage_models
        Whether the key may read the registry, push models, set aliases, and remove both.
    weight
        Relative share of the workers that the tenant (all keys of this name) gets while several tenants wait:
        2.0 gets twice as much as 1.0.
    """

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    name: Name
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: Seconds
    expires: Seconds
    models: tuple[str, ...] | None = None
    pairs_per_minute: Limit | None = None
    requests_at_once: Limit | None = None
    priority: Priority | None = None
    admin: bool = False
    manage_models: bool = False
    weight: Weight = 1.0

    def may_use(self, *names: str) -> bool:
        """Return whether the key may use the model that has these names.

        A key for the model ``m`` may also use ``m@2`` and ``m@best``.
        """
        allowed = {*names, *(name.partition("@")[0] for name in names)}
        return self.models is None or not allowed.isdisjoint(self.models)


class KeyStore:
    """Makes, finds and deletes the API keys on a Redis server."""

    def __init__(self, client: redis.Redis) -> None:
        self.redis: Any = client

    def create(self, name: str, *, days: float, **allowed: Any) -> tuple[str, ApiKey]:
        """Make a key that expires after `days`; returns the key's text and the key. The text is not stored.

        Raises
        ------
        ConfigError
            The name, or one of the fields of `ApiKey` in `allowed`, is not valid.
        """
        key_id, now = secrets.token_hex(6), system.now()
        text = f"{API_KEY_PREFIX}_{key_id}_{secrets.token_hex(24)}"
        fields: dict[str, Any] = {"id": key_id, "name": name, "digest": _digest(text)}
        try:
            key = ApiKey(**fields, created=now, expires=now + days * 86400, **allowed)
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0])
            raise ConfigError(f"{field}: {first['msg']}, got {allowed.get(field, name)!r:.80}") from None
        with self.redis.pipeline() as pipe:
            pipe.set(keys.api_key(key_id), key.written(), exat=int(key.expires) + 1)
            pipe.zadd(keys.api_keys(), {key_id: key.expires})
            pipe.expireat(keys.api_keys(), int(key.expires) + 1, nx=True)
            pipe.expireat(keys.api_keys(), int(key.expires) + 1, gt=True)
            pipe.execute()
        return text, key

    def find(self, text: str) -> ApiKey | None:
        """Find the API key with this text. Returns ``None`` if the key does not exist or has expired.

        Raises
        ------
        WireError
            The key's record is damaged, or has another format.
        """
        key_id = _id_in(text)
        raw = key_id and self.redis.get(keys.api_key(key_id))
        key = ApiKey.read_json(raw, f"API key {key_id}") if raw else None
        return key if key and is_of(key, text) else None

    def all(self) -> list[ApiKey]:
        """Return all API keys that have not expired, in the order of their names and ages. A key that cannot
        be read is logged, and left out.
        """
        self.redis.zremrangebyscore(keys.api_keys(), 0, system.now())
        ids = [key_id.decode(errors="replace") for key_id in self.redis.zrange(keys.api_keys(), 0, -1)]
        records = self.redis.mget([keys.api_key(key_id) for key_id in ids]) if ids else []
        api_keys = []
        for key_id, raw in zip(ids, records, strict=True):
            try:
                api_keys += [ApiKey.read_json(raw, f"API key {key_id}")] if raw else []
            except WireError as error:
                logger.warning("%s; it cannot be used; rankmill keys revoke deletes it", error)
        return sorted(api_keys, key=lambda key: (key.name, key.created))

    def revoke(self, wanted: Iterable[str]) -> list[str]:
        """Delete API keys, and return their ids. Requests in progress continue.

        Parameters
        ----------
        wanted
            The ids of keys, or names. A name deletes all keys of this name.

        Raises
        ------
        InputError
            A key does not exist; nothing was deleted.
        """
        every = self.all()
        chosen: dict[str, None] = {}
        for name in wanted:
            ids = [key.id for key in every if key.name == name]
            ids += [name] if self.redis.zscore(keys.api_keys(), name) is not None else []
            if not ids:
                raise InputError(f"there is no API key with id or name {name}; rankmill keys list shows them")
            chosen |= dict.fromkeys(ids)
        with self.redis.pipeline() as pipe:
            for key_id in chosen:
                pipe.delete(keys.api_key(key_id))
                pipe.zrem(keys.api_keys(), key_id)
            pipe.execute()
        return list(chosen)

    def any(self) -> bool:
        return bool(self.redis.zcount(keys.api_keys(), system.now(), "+inf"))


FIXED = "gateway_api_key"
"""The name of the key whose text is the setting ``gateway_api_key``."""


def fixed_key(given: str, text: str) -> ApiKey | None:
    """If `given` equals `text`, the text of the setting ``gateway_api_key``, return this API key, else
    ``None``. The key may score with all models, and has no other right.

    The time that the comparison takes does not tell an attacker where a wrong text differs.
    """
    if not hmac.compare_digest(given.encode(), text.encode()):
        return None
    return ApiKey(id="0" * 12, name=FIXED, digest=_digest(text), created=0.0, expires=_NEVER)


def is_of(key: ApiKey, text: str) -> bool:
    """Return whether an API key has this text and has not expired. The time that the comparison takes does
    not tell an attacker where a wrong text differs.
    """
    is_text = key.id == _id_in(text) and hmac.compare_digest(key.digest, _digest(text))
    return is_text and key.expires > system.now()


def _id_in(text: str) -> str | None:
    key = API_KEY.fullmatch(text)
    return key[1] if key else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
