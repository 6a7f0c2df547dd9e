"""Why a request is not answered, in the words of no dialect; what HTTP and gRPC call it."""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

import redis

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
    read_too_long,
)
from rankmill.jobs.runtime.patience import redis_errors

Kind = Literal[
    "invalid", "empty", "too_large", "no_key", "forbidden", "no_model", "not_found", "method", "conflict",
    "media_type", "gone", "slow", "busy", "overloaded", "too_long", "unscorable", "backend",
    "unavailable", "timeout",
]  # fmt: skip
"""What kind of trouble it is.

``method``: the path takes others. ``conflict``: what is there already stands in the way. ``gone``: the client
has closed the connection; ``slow``: its body does not come. ``busy``: the caller asks too often;
``overloaded``: all callers do. ``too_long``: a row has more tokens than are taken; ``unscorable``: it has no
score for another reason; ``backend``: the workers cannot score the run; ``unavailable``: no worker or no
server answers, or the server refuses the gateway.
"""


class Words(NamedTuple):
    """A kind's codes in HTTP and gRPC, and the errors that belong to it."""

    http: int
    grpc: str
    errors: tuple[type[RankmillError], ...] = ()


KINDS: dict[Kind, Words] = {
    "empty": Words(400, "INVALID_ARGUMENT"),
    "too_large": Words(413, "INVALID_ARGUMENT"),
    "no_key": Words(401, "UNAUTHENTICATED"),
    "forbidden": Words(403, "PERMISSION_DENIED"),
    "no_model": Words(404, "NOT_FOUND"),
    "not_found": Words(404, "NOT_FOUND", (NotInRegistry,)),
    "method": Words(405, "UNIMPLEMENTED"),
    "conflict": Words(409, "FAILED_PRECONDITION", (RegistryConflict,)),
    "media_type": Words(415, "INVALID_ARGUMENT"),
    "gone": Words(499, "CANCELLED"),
    "slow": Words(408, "DEADLINE_EXCEEDED"),
    "busy": Words(429, "RESOURCE_EXHAUSTED"),
    "overloaded": Words(429, "RESOURCE_EXHAUSTED"),
    "too_long": Words(422, "INVALID_ARGUMENT"),
    "unscorable": Words(422, "INVALID_ARGUMENT"),
    "invalid": Words(400, "INVALID_ARGUMENT", (ConfigError, InputError)),
    "backend": Words(502, "INTERNAL", (SpecError, RunFailed, RunCancelled)),
    "timeout": Words(504, "DEADLINE_EXCEEDED", (RunTimeout,)),
    "unavailable": Words(503, "UNAVAILABLE", (RankmillError,)),
}
"""HTTP status of each kind, where a dialect has no other; gRPC's, as TEI has it where TEI has one.

An error is of the first kind that names its class.
"""

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
    tokens
        Of a row that is too long: its tokens, and how many are taken.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        retry_after: float | None = None,
        param: str | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.retry_after = retry_after
        self.param = param
        self.tokens = tokens


def wrong(param: str, why: str) -> Refusal:
    """The refusal of a field or parameter."""
    return Refusal("invalid", f"{param}: {why}", param=param)


def unscorable(row: int, reason: str) -> Refusal:
    """The refusal of a request because one row has no score."""
    tokens = read_too_long(reason)
    kind: Kind = "too_long" if tokens else "unscorable"
    return Refusal(kind, f"text {row} cannot be scored: {reason}", tokens=tokens)


EXPECTED = (Refusal, RankmillError, redis.RedisError)
"""What ends a request with an answer that says why. `refusal_of` words it; all else is a bug."""

_RIGHTS = ("NOPERM", "ACL failure")
"""The server's reply to a user without the right, directly or in a script."""


def refusal_of(error: Exception) -> Refusal:
    """The refusal for one of the errors in `EXPECTED`."""
    if isinstance(error, Refusal):
        return error
    try:
        with redis_errors():
            raise error
    except RankmillError as found:
        error = found
    message = " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())
    if isinstance(error, RedisUnavailable):
        message += "; ask again later"
    if isinstance(error, RedisFailed):
        if any(mark in message for mark in _RIGHTS):
            message += "; docs/operations/deploy.md has the rights that the gateway's user needs"
        logger.warning("%s", message)  # it needs the operator, who does not see the answer
    return Refusal(next(kind for kind, words in KINDS.items() if isinstance(error, words.errors)), message)
