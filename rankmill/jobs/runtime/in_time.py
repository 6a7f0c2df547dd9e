"""Connections to Redis that stop waiting for a reply soon after the caller's deadline."""

from __future__ import annotations

from typing import Any

import redis

from rankmill.jobs.runtime.patience import seconds_left

_GRACE_SECONDS = 0.5
"""A connection waits for a reply until this many seconds after the caller's deadline."""


class InTime:
    """Base of connections to Redis that stop waiting for a reply soon after the caller's deadline."""

    _socket_timeout: Any

    @property
    def socket_timeout(self) -> float | None:
        return float(min(self._socket_timeout, seconds_left() + _GRACE_SECONDS))

    @socket_timeout.setter
    def socket_timeout(self, seconds: float | None) -> None:
        self._socket_timeout = seconds


class TcpConnection(InTime, redis.Connection):
    """A connection over TCP."""


class TlsConnection(InTime, redis.SSLConnection):
    """A connection over TLS."""


class UnixConnection(InTime, redis.UnixDomainSocketConnection):
    """A connection over a Unix domain socket."""


KINDS: dict[Any, Any] = {
    redis.Connection: TcpConnection,
    redis.SSLConnection: TlsConnection,
    redis.UnixDomainSocketConnection: UnixConnection,
}
