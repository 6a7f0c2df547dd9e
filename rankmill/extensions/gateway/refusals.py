"""Refusals of requests, independent of dialects, and their codes in HTTP and gRPC."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import redis

from rankmill.jobs.contract.errors import (
    ConfigError,
    ConnectionFailed,
    InputError,
    NotInRegistry,
    NoWorkers,
    RankmillError,
    RedisFailed,
    RedisUnavailable,
    RegistryAway,
    RegistryConflict,
    RegistryError,
    RunCancelled,
    RunFailed,
    RunTimeout,
    SpecError,
    WrongScores,
    read_too_long,
)
from rankmill.jobs.runtime.patience import redis_errors

Kind = Literal[
    "invalid", "empty", "too_large", "no_key", "forbidden", "no_model", "not_found", "method", "conflict",
    "media_type", "gone", "slow", "busy", "overloaded", "too_long", "unscorable", "backend",
    "unavailable", "timeout",
]  # fmt: skip
"""The kind of a refusal. Some kinds are not obvious:

- ``method``: the path does not take this HTTP method.
- ``conflict``: the change is not possible, because of something that exists already.
- ``gone``: the client has closed the connection.
- ``slow``: the body does not arrive in time.
- ``busy``: the caller has reached a limit of its key.
- ``overloaded``: all callers together send too much.
- ``too_long``: a row has too many tokens.
- ``unscorable``: a row has no score for another reason.
- ``backend``: the workers cannot score the run, or the gateway itself fails.
- ``unavailable``: workers or Redis do not answer, or Redis refuses the gateway's commands.
"""


class Words(NamedTuple):
    """The HTTP and gRPC status of a kind of refusal, and the classes of errors that are of this kind."""

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
"""For each kind of refusal: its HTTP status, its gRPC status, and the classes of errors that become it.

Do not change the order: an error gets the first kind that lists its class or a base class. Dialects may
replace the HTTP status. The gRPC status is the one that TEI uses, if TEI has this kind of error.
"""

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """Raised if a request is refused or has failed; becomes the answer to the caller.

    Parameters
    ----------
    kind, message
        The kind of refusal, and one line for the caller that says what is wrong and how to fix it.
    retry_after
        Seconds after which the same request may succeed, if known.
    param
        Name of the wrong field of the body, if a field is wrong.
    tokens
        If a row is too long: its number of tokens, and the most that are allowed.
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
    """Make the refusal of a request whose field or parameter `param` is wrong."""
    return Refusal("invalid", f"{param}: {why}", param=param)


def overloaded(why: str, way_out: str = "send it again later", *, seconds: float = 1) -> Refusal:
    """Make the refusal of a request that the gateway may take after this number of seconds."""
    return Refusal("overloaded", f"{why}; {way_out}", retry_after=seconds)


class WrongFile(InputError):
    """Raised if a file that a caller has uploaded is wrong. The caller gets the message as it is."""


def unscorable(row: int, reason: str) -> Refusal:
    """Make the refusal of a request whose row number `row` has no score, for this `reason`."""
    tokens = read_too_long(reason)
    kind: Kind = "too_long" if tokens else "unscorable"
    return Refusal(kind, f"text {row} cannot be scored: {row_reason(reason)}", tokens=tokens)


def row_reason(reason: str) -> str:
    """Return the reason why a row has no score, in words for callers. A reason with details about a worker's
    host is shortened.

    The whole reason is logged only at the level ``debug``, because it may quote the row's text.
    """
    kind, _, rest = reason.partition(": ")
    is_of_worker = kind.startswith("given up after attempt") and rest != "its worker died"
    if not is_of_worker and not _PRIVATE.search(reason) and not _CODE.search(reason):
        return reason
    logger.debug("a text has no score: %s", reason)
    known = kind if is_of_worker or kind in {"tokenizer", "model"} else "the worker fails with it"
    logger.warning("a text has no score: %s; debug lines have the details", known)
    return known


EXPECTED = (Refusal, RankmillError, redis.RedisError)
"""Errors that `refusal_of` turns into answers to callers. Any other error is a bug."""

_RIGHTS = ("NOPERM", "ACL failure")
"""Redis's replies contain one of these texts if the gateway's Redis user may not run a command or script."""

_SAID: tuple[tuple[type[RankmillError], str], ...] = (
    (NoWorkers, "no worker is there that could do it: ask again later"),
    (RedisUnavailable, "the gateway's Redis cannot serve now: ask again later"),
    (ConnectionFailed, "the gateway's Redis cannot serve now: ask again later"),
    (RedisFailed, "the gateway's Redis refuses a command, which its operator must mend"),
    (RunCancelled, "the run was cancelled"),
    (SpecError, "the workers cannot score it with this model"),
    (WrongScores, "a worker computes wrong scores, and has stopped: ask again"),
    (RunFailed, "the workers cannot score it with this model"),
)
"""Messages to callers about errors that callers cannot correct. The first class that fits an error counts."""

_OF_CALLERS = (ConfigError, InputError, RegistryError, RunTimeout)
"""Errors whose own messages callers may see, unless the messages contain private details."""

_PRIVATE = re.compile(
    r"""\w+://\S  # a URL
    | (?:^|[\s'"`(\[{<=:,;])~?/[^\s/]  # a path
    | \bRANKMILL_[A-Z]
    | \b(?:rankmill|score-workers|score-file|rq|pip)\s+[a-z]  # a command
    """,
    re.VERBOSE,
)

_CODE = re.compile(r"\.(?:py|cc|cpp|cu|hpp|so)\b")


def refusal_of(error: Exception, names: Mapping[str, str] | None = None) -> Refusal:
    """Make the refusal that a caller gets for one of the errors in `EXPECTED`.

    If the caller can correct the error, the message describes it. Any other error is logged for the operator.

    Parameters
    ----------
    error
        The error.
    names
        Private paths and URLs, each with the text that the message shows in its place.
    """
    if isinstance(error, Refusal):
        return error
    error = _ours(error)
    return Refusal(_kind(error), told(error, names or {}))


def kind_of(error: Exception) -> Kind:
    """Return the kind of refusal for an error. An error not in `EXPECTED` has the kind ``backend``."""
    if isinstance(error, Refusal):
        return error.kind
    return _kind(_ours(error)) if isinstance(error, EXPECTED) else "backend"


def _ours(error: Exception) -> RankmillError:
    try:
        with redis_errors():
            raise error
    except RankmillError as found:
        return found


def _kind(error: RankmillError) -> Kind:
    return next(kind for kind, words in KINDS.items() if isinstance(error, words.errors))


def hide(names: Mapping[str, str], message: str) -> str:
    """Replace each private path and URL in a message by the text that `names` has for it."""
    for private in sorted(names, key=len, reverse=True):
        message = message.replace(private, names[private])
    return message


def told(error: Exception, names: Mapping[str, str]) -> str:
    """Return the message that a caller gets about an error.

    If callers may not see the error's own message, they get a general sentence, and the message is logged.

    Parameters
    ----------
    error
        The error.
    names
        Private paths and URLs, each with the text that the caller sees in its place.
    """
    whole = message = " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())
    if isinstance(error, WrongFile):
        return message
    if isinstance(error, _OF_CALLERS) and not isinstance(error, RegistryAway):
        message = hide(names, message)
        if not _PRIVATE.search(message):
            return message
    if isinstance(error, RedisFailed) and any(mark in message for mark in _RIGHTS):
        whole += "; docs/operations/deploy.md has the rights that the gateway's user needs"
    logger.warning("%s", whole)
    said = next((text for kind, text in _SAID if isinstance(error, kind)), "it cannot be done here now")
    return said if said.endswith("later") else f"{said}; the log says why"
