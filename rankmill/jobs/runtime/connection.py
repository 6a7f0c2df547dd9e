"""Connects to Redis or Valkey."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError, ConnectionFailed, RedisUnavailable
from rankmill.jobs.runtime.passwords import mask_passwords, mask_url, remember_password, remember_url
from rankmill.jobs.runtime.patience import InTime, Patience, cannot_serve, waiting
from rankmill.jobs.runtime.sentinel import names_sentinels, parse_sentinel_url

_PROBE_SECONDS = 2

_SILENCE_SECONDS = 15
"""A server that sends nothing for this many seconds counts as away. This is much longer than a command may
block, which is a second at most.
"""

_CONNECTIONS = 256
"""One client opens at most this many connections; further threads wait for a free one."""

IN_TIME: dict[Any, Any] = {
    kind: type(kind.__name__, (InTime, kind), {})
    for kind in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
}
"""For each connection class of redis-py, a subclass that stops waiting soon after the caller's deadline."""

_WRONG_SCHEME = {
    "redis": ("Connection (reset|closed)", "; if the server expects TLS, the URL begins with rediss://"),
    "rediss": ("Timeout connecting", "; if the server has no TLS, the URL begins with redis://"),
}
"""By the scheme of a URL: a pattern, and a hint for the message. The pattern matches the error that comes if
the server expects the other scheme.
"""


class WaitingPool(redis.BlockingConnectionPool):
    """A pool of connections to Redis for any number of threads.

    If no connection is free, a thread waits for one as long as the client's commands wait for the server
    (`Patience`).
    """

    def get_connection(self, *args: Any, **options: Any) -> Any:
        retry: Retry = self.connection_kwargs["retry"]
        return retry.call_with_retry(self._take, lambda error: None)

    def set_retry(self, retry: Retry) -> None:
        """Replace the retry policy of all connections. redis-py's own method fails for a blocking pool."""
        self.connection_kwargs["retry"] = retry
        for connection in self._connections:
            connection.retry = retry

    def _take(self) -> Any:
        try:
            connection: Any = super().get_connection()  # type: ignore[no-untyped-call]
        except redis.ConnectionError as error:
            if str(error) != "No connection available.":
                raise
            raise redis.MaxConnectionsError("all connections of this process are in use") from None
        try:
            if connection.should_reconnect():
                connection.disconnect()
                connection.connect()
            connection._sock.settimeout(connection.socket_timeout)
        except BaseException:
            self.release(connection)  # type: ignore[no-untyped-call]
            raise
        return connection


def connect(url: str, wait_seconds: float) -> redis.Redis:
    """Make a Redis client for `url`, and check that a suitable server answers there.

    The parameters are those of `client_for`.

    Raises
    ------
    ConfigError
        The URL is malformed, or has an option that changes replies; or a certificate that the URL names
        cannot be read; or the server is in cluster mode.
    ConnectionFailed
        No server answers at `url`, or the server refuses the credentials.
    """
    client = client_for(url, wait_seconds)
    probe = impatient(client)
    try:
        probe.ping()
        check_mode(probe)
    except (redis.RedisError, OSError) as error:
        if failed := connection_failed(url, error):
            raise failed from None
    finally:
        probe.close()
    return client


def connection_failed(url: str, error: Exception) -> ConnectionFailed | None:
    """Return the error to raise if a client's first command has failed.

    Return ``None`` if the server can serve later, for instance because it still loads its data.
    """
    is_no_reply = isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError)
    if isinstance(error, redis.BusyLoadingError) or (cannot_serve(error) and not is_no_reply):
        return None
    reason = mask_passwords(" ".join(str(error).split())) or "no answer"
    sign, hint = _WRONG_SCHEME.get(urlsplit(url).scheme, ("", ""))
    check = f"check --redis or REDIS_URL{hint if re.search(sign, reason) else ''}"
    return ConnectionFailed(f"no usable Redis at {mask_url(url)}: {reason} ({check})")


def client_for(url: str, wait_seconds: float) -> redis.Redis:
    """Make a Redis client for `url`, without checking that a server answers.

    Parameters
    ----------
    url
        A URL that begins with ``redis://``, ``rediss://`` (TLS) or ``unix://``, and may have user, password
        and database. Or a URL of Sentinels, as `parse_sentinel_url` reads it.
    wait_seconds
        Longest wait of each command, in seconds, while the server cannot serve (`Patience`).

    Raises
    ------
    ConfigError
        The URL is malformed, or has an option that changes replies; or a certificate that the URL names
        cannot be read.
    """
    return redis.Redis.from_pool(pool_for(url, Patience(wait_seconds)))


def pool_for(url: str, patience: Patience) -> WaitingPool:
    """Make the connection pool of a client for `url`. The client's commands wait for the server with
    `patience`.

    Raises as `client_for` does.
    """
    remember_url(url)
    try:
        _check_url(url)
        options = parse_sentinel_url(url) if names_sentinels(url) else parse_url(url)  # type: ignore[no-untyped-call]
        check_options(options)
        kind = options.get("connection_class", redis.Connection)
        pool: WaitingPool = WaitingPool(  # type: ignore[no-untyped-call]
            **{
                "max_connections": _CONNECTIONS,
                "timeout": 1,  # seconds to wait for a free connection; `Patience` repeats this
                "socket_connect_timeout": 5,
                "socket_timeout": _SILENCE_SECONDS,
                "health_check_interval": 30,
                # Do not send the driver's name: Redis before 7.2 may not allow a user that command.
                "driver_info": None,
                **options,
                "connection_class": IN_TIME.get(kind, kind),
                "retry": patience,
            }
        )
        # Making a connection object checks the options, and does not connect.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError):
        # the error is not shown, because it may quote a part of the password
        raise ConfigError(
            f"redis_url: {mask_url(url)} is not like redis://HOST:PORT/DB (or rediss://, unix://, "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB); USER:PASSWORD@ may stand before the host, "
            "with / ? # @ % in them as %2F %3F %23 %40 %25"
        ) from None
    kwargs = pool.connection_kwargs
    remember_password(kwargs.get("password"))
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if option in kwargs and not os.access(kwargs[option], os.R_OK):
            raise ConfigError(f"redis_url: {option}: the file {kwargs[option]} cannot be read")
    return pool


def check_options(options: Mapping[str, object]) -> None:
    """Raise `ConfigError` for an option of a connection that changes the types of replies."""
    for name, usual in (("decode_responses", "False"), ("protocol", "2")):
        if str(options.get(name) or usual) != usual:
            raise ConfigError(f"redis_url: leave out the option {name}: replies would have other types")


def check_mode(client: redis.Redis) -> None:
    """Raise `ConfigError` for a server in cluster mode, where transactions and scripts work in one slot
    only.
    """
    with suppress(redis.RedisError, OSError):  # the server may not tell its mode, or may be away
        if str(client.info("cluster").get("cluster_enabled")) == "1":
            raise ConfigError(
                "redis_url: the server is in cluster mode (cluster-enabled yes), which rankmill does not "
                "work with: name one server, or Sentinels (redis+sentinel://), without it"
            )


def _check_url(url: str) -> None:
    """Raise `ValueError` for a URL that libraries would misread.

    There are three cases. urllib would read a part of the password as host, database or option. The path is
    not a number, and redis-py would use database 0. The host is not a name, as in ``redis://redis..svc``.
    """
    parts = urlsplit(url)
    if parts.scheme in {"redis", "rediss"}:
        (parts.hostname or "").encode("idna")  # raises what a connection would raise
    if parts.scheme in {"redis", "rediss"} and not re.fullmatch(r"/?\d*/?", parts.path):
        raise ValueError("the database is not a number")
    stray = [pair for pair in parts.query.split("&") if "=" not in pair]
    if parts.netloc and any("@" in part for part in (parts.path, parts.fragment, *stray)):
        raise ValueError("@ after the host")


def impatient(client: redis.Redis, seconds: float = _PROBE_SECONDS) -> redis.Redis:
    """Make a client of the same server that tries each command once.

    The client waits `seconds` for a connection, and `seconds` for a reply.
    """
    pool = client.connection_pool
    options = {
        **pool.connection_kwargs,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": seconds,
        "socket_timeout": seconds,
    }
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=pool.connection_class, **options))


def unreachable(client: redis.Redis) -> str | None:
    """Return one line that says why the server does not answer a PING, or ``None`` if it answers.

    The client should be `impatient`.
    """
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return f"Redis does not answer: {mask_passwords(' '.join(str(error).split()))}"
    return None


def refuses_writes(client: redis.Redis) -> str | None:
    """Return one line that says why the server accepts no writes now, or ``None`` if it accepts them.

    The test writes a key that expires after a millisecond. For a user without write permission, the result is
    ``None``, too.
    """
    try:
        with waiting(most=0):
            client.set(keys.probe(), 1, px=1)
    except RedisUnavailable as error:
        return str(error)
    except redis.ResponseError as error:
        return cannot_serve(error)
    return None
