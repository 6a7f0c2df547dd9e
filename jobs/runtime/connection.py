"""Connecting to Redis or Valkey."""

from __future__ import annotations

import re

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from jobs.errors import ConnectionFailed

_RETRIES = 5

_PROBE_SECONDS = 2


def connect(url: str) -> redis.Redis:
    """A client for `url` that has answered once.

    Commands retry dropped connections with exponential backoff and jitter (about 5 s in all).

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user, password and database if any.

    Raises
    ------
    ConnectionFailed
        The URL is malformed, nobody answers there, or the credentials are refused.
    """
    try:
        client = redis.Redis.from_url(
            url,
            retry=Retry(ExponentialWithJitterBackoff(base=0.1, cap=2.0), _RETRIES),
            socket_connect_timeout=5,
            health_check_interval=30,
        )
        probe = redis.Redis.from_url(
            url, retry=Retry(ExponentialWithJitterBackoff(), 0), socket_connect_timeout=5
        )
        probe.ping()
        probe.close()
    except (redis.RedisError, ValueError, OSError) as error:
        reason = mask_passwords(" ".join(str(error).split()))
        raise ConnectionFailed(
            f"no usable Redis at {mask_passwords(url)}: {reason} (check --redis or REDIS_URL)"
        ) from None
    return client


def impatient(client: redis.Redis) -> redis.Redis:
    """A client of the same server whose commands fail at once, or within 2 s, and are not tried again."""
    pool = client.connection_pool
    options = {
        **pool.connection_kwargs,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _PROBE_SECONDS,
        "socket_timeout": _PROBE_SECONDS,
    }
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=pool.connection_class, **options))


def unreachable(client: redis.Redis) -> str | None:
    """Why the server of an `impatient` client does not answer, in one line; ``None`` if it does."""
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return f"Redis does not answer: {mask_passwords(' '.join(str(error).split()))}"
    return None


def mask_passwords(text: str) -> str:
    """Replace the password of every URL in `text` with ``***``.

    >>> mask_passwords("redis://me:secret@host:6379/0")
    'redis://me:***@host:6379/0'
    """
    return re.sub(r"(\w+://[^:@/\s]*):[^@\s]*@", r"\1:***@", text)
