"""Connecting to Redis or Valkey."""

from __future__ import annotations

import re

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from jobs.errors import ConnectionFailed

_RETRIES = 5


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


def mask_passwords(text: str) -> str:
    """Replace the password of every URL in `text` with ``***``.

    >>> mask_passwords("redis://me:secret@host:6379/0")
    'redis://me:***@host:6379/0'
    """
    return re.sub(r"(\w+://[^:@/\s]*):[^@\s]*@", r"\1:***@", text)
