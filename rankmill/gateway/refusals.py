"""Why a request is not answered, in the words of no dialect."""

from __future__ import annotations

import logging
from typing import Literal

import redis

from rankmill.gateway.keys.refusals import NoKey, NotAllowed, OverLimit, TooManyPairs
from rankmill.jobs.contract.errors import (
    ConfigError,
    InputError,
    NotInRegistry,
    RankmillError,
    RedisFailed,
    RedisUnavailable,
    RegistryConflict,
    RunCancelled,
    RunFailed,
    RunTimeout,
    SpecError,
)
from rankmill.jobs.runtime.patience import redis_errors

Kind = Literal[
    "invalid", "empty", "too_large", "no_key", "forbidden", "no_model", "not_found", "method", "conflict",
    "media_type", "gone", "slow", "busy", "overloaded", "unscorable", "backend", "unavailable",
    "timeout",
]  # fmt: skip
"""What kind of trouble it is.

``method``: the path takes others. ``conflict``: what is there already stands in the way. ``gone``: the client
has closed the connection; ``slow``: its body does not come. ``busy``: the caller asks too often;
``overloaded``: all callers do. ``unscorable``: a row has no score; ``backend``: the workers cannot score the
run; ``unavailable``: no worker or no server answers, or the server refuses the gateway.
"""

STATUS: dict[Kind, int] = {
    "invalid": 400,
    "empty": 400,
    "too_large": 413,
    "no_key": 401,
    "forbidden": 403,
    "no_model": 404,
    "not_found": 404,
    "method": 405,
    "conflict": 409,
    "media_type": 415,
    "gone": 400,
    "slow": 408,
    "busy": 429,
    "overloaded": 429,
    "unscorable": 422,
    "backend": 502,
    "unavailable": 503,
    "timeout": 504,
}
"""HTTP status of each kind, where a dialect has no other."""

logger = logging.getLogger(__name__)


class Refusal(Exception):  # it is an answer
    """A request is refused or has failed.

    Parameters
    ----------
    kind, message
        What the trouble is; one line for the caller: what is wrong, and the way out.
    retry_after
        Seconds after which the same request may succeed, if that can be told.
    param
        Name of the field of the body that is wrong, if it is one.
    """

    def __init__(
        self, kind: Kind, message: str, *, retry_after: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.retry_after = retry_after
        self.param = param


_KINDS: tuple[tuple[tuple[type[RankmillError], ...], Kind], ...] = (
    ((NoKey,), "no_key"),
    ((NotAllowed,), "forbidden"),
    ((TooManyPairs,), "too_large"),
    ((OverLimit,), "busy"),
    ((NotInRegistry,), "not_found"),
    ((RegistryConflict,), "conflict"),
    ((ConfigError, InputError), "invalid"),
    ((RunTimeout,), "timeout"),
    ((SpecError, RunFailed, RunCancelled), "backend"),
)
"""Errors of each kind; all others are ``unavailable``: no worker, or no server."""


EXPECTED = (Refusal, RankmillError, redis.RedisError)
"""What ends a request with an answer that says why. `refusal_of` words it; all else is a bug."""

_RIGHTS = ("NOPERM", "ACL failure")
"""What a server says of a user that may not do something, by itself or in a script."""


def refusal_of(error: Exception) -> Refusal:
    """The refusal for one of the errors in `EXPECTED`."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, redis.RedisError):
        error = _ours(error)
    message = " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())
    if isinstance(error, RedisUnavailable):
        message += "; ask again later"
    if isinstance(error, RedisFailed):
        if any(mark in message for mark in _RIGHTS):
            message += "; docs/DEPLOY.md has the rights that the gateway's user needs"
        logger.warning("%s", message)  # it needs the operator, who does not see the answer
    kind: Kind = next((kind for kinds, kind in _KINDS if isinstance(error, kinds)), "unavailable")
    return Refusal(kind, message, retry_after=error.retry_after if isinstance(error, OverLimit) else None)


def _ours(error: redis.RedisError) -> Exception:
    try:
        with redis_errors():
            raise error
    except RankmillError as found:
        return found
