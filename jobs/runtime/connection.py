"""Connecting to Redis or Valkey."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import keys
from jobs.errors import ConfigError, ConnectionFailed, RedisUnavailable
from jobs.runtime.passwords import mask_passwords, mask_url, remember_password, remember_url
from jobs.runtime.patience import Patience, cannot_serve, waiting

_PROBE_SECONDS = 2

_SILENCE_SECONDS = 15
"""A server that answers nothing for so long is taken to be away; the longest command blocks for a second."""

_CONNECTIONS = 256
"""Connections of one client, at most; more threads than that take turns."""


class WaitingPool(redis.BlockingConnectionPool):
    """Connections for any number of threads: those that find none free wait for one, as for the server."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        """A connection that is free, or will be."""
        retry: Retry = self.connection_kwargs["retry"]
        return retry.call_with_retry(self._take, lambda error: None)

    def _take(self) -> Any:
        try:
            return super().get_connection()  # type: ignore[no-untyped-call]
        except redis.ConnectionError as error:
            if str(error) != "No connection available.":
                raise
            raise redis.MaxConnectionsError("all connections of this process are in use") from None


def connect(url: str, wait_seconds: float) -> redis.Redis:
    """A client for `url`, where a server has answered; parameters as `client_for`.

    Raises
    ------
    ConfigError
        The URL is malformed.
    ConnectionFailed
        Nobody answers there, or the credentials are refused.
    """
    client = client_for(url, wait_seconds)
    probe = impatient(client)
    try:
        probe.ping()
    except (redis.RedisError, OSError) as error:
        if not (cannot_serve(error) and _is_a_reply(error)):  # else it is there, and will serve: loading, say
            reason = mask_passwords(" ".join(str(error).split()))
            raise ConnectionFailed(
                f"no usable Redis at {mask_url(url)}: {reason} (check --redis or REDIS_URL)"
            ) from None
    finally:
        probe.close()
    return client


def client_for(url: str, wait_seconds: float) -> redis.Redis:
    """A client for `url`, whoever answers there.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user, password and database if any.
    wait_seconds
        How long each command waits, at most, while the server cannot serve (`Patience`).

    Raises
    ------
    ConfigError
        The URL is malformed.
    """
    remember_url(url)
    try:
        _check_url(url)
        pool = WaitingPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=1,  # seconds; then it looks around, and waits on
            retry=Patience(wait_seconds),
            socket_connect_timeout=5,
            socket_timeout=_SILENCE_SECONDS,
            health_check_interval=30,
        )
        pool.connection_class(**pool.connection_kwargs)  # refuses options that there are not; reaches nobody
    except (ValueError, TypeError):  # which may quote a part of the password
        raise ConfigError(
            f"redis_url: {mask_url(url)} is not like redis://HOST:PORT/DB (or rediss://, unix://); "
            "USER:PASSWORD@ may stand before the host, with / ? # @ % in them as %2F %3F %23 %40 %25"
        ) from None
    remember_password(pool.connection_kwargs.get("password"))
    return redis.Redis.from_pool(pool)


def _check_url(url: str) -> None:
    """Raise `ValueError` if a part of the password would be taken for the host, the database or an option."""
    parts = urlsplit(url)
    stray = [pair for pair in parts.query.split("&") if "=" not in pair]
    if parts.netloc and any("@" in part for part in (parts.path, parts.fragment, *stray)):
        raise ValueError("@ after the host")


def _is_a_reply(error: BaseException) -> bool:
    """Whether a server has said so, and not about the credentials."""
    if isinstance(error, redis.BusyLoadingError):
        return True
    return not isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError)


def impatient(client: redis.Redis, seconds: float = _PROBE_SECONDS) -> redis.Redis:
    """A client of the same server whose commands fail at once, or within `seconds`, and are tried once."""
    pool = client.connection_pool
    options = {
        **pool.connection_kwargs,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": seconds,
        "socket_timeout": seconds,
    }
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=pool.connection_class, **options))


def unreachable(client: redis.Redis) -> str | None:
    """Why the server of an `impatient` client does not answer, in one line; ``None`` if it does."""
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return f"Redis does not answer: {mask_passwords(' '.join(str(error).split()))}"
    return None


def refuses_writes(client: redis.Redis) -> str | None:
    """Why a server that answers takes no writes just now, in one line; ``None`` if it does.

    It is asked to write a key that expires at once; a user who may only read learns nothing.
    """
    try:
        with waiting(most=0):
            client.set(keys.probe(), 1, px=1)
    except RedisUnavailable as error:
        return str(error)
    except redis.ResponseError as error:
        return cannot_serve(error)
    return None
