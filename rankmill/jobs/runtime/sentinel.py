"""URLs that name Sentinels of Redis, and connections to the master that the Sentinels name.

This module replaces redis-py's own code for Sentinels, for two reasons. redis-py sends ``SENTINEL MASTERS``,
for which a user may lack the right. After a failover, redis-py stays connected to the old master until that
refuses a write; all earlier writes to it are lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry

from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.patience import InTime
from rankmill.jobs.system import system

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""By the scheme of a URL that names Sentinels, the scheme for the servers that the Sentinels name."""

_PORT = 26379

_SENTINEL_SECONDS = 1.0
"""Seconds that a Sentinel may take to answer before the next one is asked."""

_LOOK_SECONDS = 1.0
"""A connection asks at most once in this many seconds whether its server is still the master."""

_SENTINELS_OWN = {"sentinel_username", "sentinel_password"}

Address = tuple[str, int]


def names_sentinels(url: str) -> bool:
    """Whether the URL names Sentinels instead of a server."""
    return url.partition("://")[0].lower() in _SCHEMES


def parse_sentinel_url(url: str) -> dict[str, Any]:
    """Read a URL that names Sentinels, and return options for a pool of connections to the current master.

    Parameters
    ----------
    url
        ``redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST…]/SERVICE[/DB][?OPTIONS]``; ``rediss+sentinel``
        for TLS. User, password, database and most options are for the servers. The options
        ``sentinel_username`` and ``sentinel_password`` are for the Sentinels. TLS options are for the servers
        and the Sentinels.

    Raises
    ------
    ValueError
        The URL is malformed.
    """
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    sentinels = tuple(_address(host) for host in hosts.split(","))
    service, _, db = unquote(parts.path).removeprefix("/").partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError("no service, or a database that is not a number")
    scheme = _SCHEMES[parts.scheme.lower()]
    tls = scheme == "rediss"
    options = parse_url(f"{scheme}://{user}{at}{hosts.split(',')[0]}/{db}?{parts.query}")  # type: ignore[no-untyped-call]
    own = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINELS_OWN & options.keys()}
    own |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    return {
        **options,
        "connection_class": TlsMasterConnection if tls else MasterConnection,
        "finder": MasterFinder(sentinels, service, tls=tls, options=own),
    }


def _address(host: str) -> Address:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or parts.path:
        raise ValueError("a Sentinel without a host")
    parts.hostname.encode("idna")  # raises what a connection would raise
    return parts.hostname, parts.port or _PORT


class MasterFinder:
    """Asks the Sentinels for the master of a service; threads may share the object.

    Parameters
    ----------
    sentinels
        Host and port of each Sentinel.
    service
        The master's name in the Sentinels' configuration.
    tls
        Whether the Sentinels speak TLS.
    options
        Options of connections to the Sentinels.
    """

    def __init__(
        self, sentinels: Sequence[Address], service: str, *, tls: bool, options: Mapping[str, Any]
    ) -> None:
        self._sentinels, self._service, self._options = list(sentinels), service, options
        self._kind = SSLConnection if tls else redis.Connection
        self._lock = system.Lock()
        self._found: Address | None = None
        self._asked = float("-inf")

    def find(self) -> Address:
        """Return host and port of the current master. Raises redis-py's errors if no Sentinel reports one."""
        failures: list[str] = []
        refused = False
        for sentinel in list(self._sentinels):
            place = f"{sentinel[0]}:{sentinel[1]}"
            try:
                master = self._ask(*sentinel)
            except redis.RedisError as error:
                refused |= isinstance(error, redis.AuthenticationError)
                failures.append(f"{place}: {error}")
            else:
                if master:
                    self._note(sentinel, master)
                    return master
                failures.append(f"{place} knows no service {self._service!r}")
        kind = redis.AuthenticationError if refused else redis.ConnectionError
        raise kind(mask_passwords(f"no Sentinel names a master ({'; '.join(failures)})"))

    @property
    def is_due(self) -> bool:
        """Whether `has_moved` would ask the Sentinels now."""
        return system.monotonic() - self._asked > _LOOK_SECONDS

    def has_moved(self, address: Address) -> bool:
        """Return whether the master is no longer at `address`. This asks the Sentinels at most once a
        second.
        """
        if self.is_due and self._lock.acquire(blocking=False):
            try:
                self._asked = system.monotonic()
                self.find()
            except redis.RedisError:
                pass  # without an answer of the Sentinels, the present connection stays in use
            finally:
                self._lock.release()
        return self._found not in {None, address}

    def _note(self, sentinel: Address, master: Address) -> None:
        self._found, self._asked = master, system.monotonic()
        others = [other for other in self._sentinels if other != sentinel]
        self._sentinels = [sentinel, *others]  # the Sentinel that has answered is asked first

    def _ask(self, host: str, port: int) -> Address | None:
        options = {
            "socket_connect_timeout": _SENTINEL_SECONDS,
            "socket_timeout": _SENTINEL_SECONDS,
            **self._options,
        }
        connection: Any = self._kind(host=host, port=port, retry=Retry(NoBackoff(), 0), **options)
        try:
            connection.connect()
            connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            reply = connection.read_response()
        finally:
            connection.disconnect()
        return (reply[0].decode(), int(reply[1])) if reply else None


class MasterConnection(InTime, redis.Connection):
    """A connection that asks `finder` for the master whenever it connects.

    If the master has moved, the connection is closed between two commands, because the old master may still
    accept writes for some seconds. These writes would be lost.
    """

    def __init__(self, *, finder: MasterFinder, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._finder = finder

    def should_reconnect(self) -> bool:
        closing = super().should_reconnect()  # type: ignore[no-untyped-call]
        return bool(closing) or self._finder.has_moved((self.host, self.port))

    def _connect(self) -> Any:
        self.host, self.port = self._finder.find()
        return super()._connect()  # type: ignore[no-untyped-call]


class TlsMasterConnection(MasterConnection, SSLConnection):
    """A `MasterConnection` over TLS."""
