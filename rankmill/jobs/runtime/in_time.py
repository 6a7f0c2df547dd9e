"""Connections to Redis that give up on a silent server when their caller's time (`seconds_left`) ends."""

from __future__ import annotations

from typing import Any

import redis

from rankmill.jobs.runtime.patience import seconds_left

_GRACE_SECONDS = 0.5
"""A connection waits for a reply for this many seconds more when its caller's time has ended."""


class InTime:
    """Base of connections to Redis whose sockets wait for a reply no longer than their caller has time
    (`seconds_left`), plus `_GRACE_SECONDS`.
    """

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
