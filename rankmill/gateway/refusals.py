"""Why a request is not answered, in the words of no dialect."""

from __future__ import annotations

from typing import Literal

from jobs.errors import (
    ConfigError,
    InputError,
    RankmillError,
    RunCancelled,
    RunFailed,
    RunTimeout,
    SpecError,
)
from rankmill.gateway.keys.refusals import NoKey, NotAllowed, OverLimit, TooManyPairs

Kind = Literal[
    "invalid", "empty", "too_large", "no_key", "forbidden", "no_model", "not_found", "media_type",
    "gone", "slow", "busy", "overloaded", "unscorable", "backend", "unavailable", "timeout",
]  # fmt: skip
"""What kind of trouble it is.

``gone``: the client has closed the connection; ``slow``: its body does not come. ``busy``: the caller asks
too often; ``overloaded``: all callers do. ``unscorable``: a row has no score; ``backend``: the workers cannot
score the run; ``unavailable``: no worker or no server answers.
"""

STATUS: dict[Kind, int] = {
    "invalid": 400,
    "empty": 400,
    "too_large": 413,
    "no_key": 401,
    "forbidden": 403,
    "no_model": 404,
    "not_found": 404,
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
    ((ConfigError, InputError), "invalid"),
    ((RunTimeout,), "timeout"),
    ((SpecError, RunFailed, RunCancelled), "backend"),
)
"""Errors of each kind; all others are ``unavailable``: no worker, or no server."""


def refusal_of(error: RankmillError) -> Refusal:
    """The refusal for an error of the producer, or of the place that lets requests in."""
    found = [kind for kinds, kind in _KINDS if isinstance(error, kinds)]
    kind: Kind = found[0] if found else "unavailable"
    message = " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())
    return Refusal(kind, message, retry_after=error.retry_after if isinstance(error, OverLimit) else None)
