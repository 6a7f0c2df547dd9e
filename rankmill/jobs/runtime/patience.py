"""Makes the commands of Redis clients wait for a server that cannot serve now.

A failover, a full server, a loading server and a broken connection are handled alike: the command is repeated
until the server has carried it out. `Patience` is the retry policy of every client except `impatient` ones,
so all commands wait in the same way, including RQ's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import ExecAbortError
from redis.retry import Retry

from rankmill.jobs.contract.errors import RedisFailed, RedisUnavailable, ValueRefused
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.system import Backoff, system

AUTH_SECONDS = 60
"""A command waits at most this many seconds while the server refuses the password, because an operator may be
changing the password at this moment.
"""

_CUT_OFF_SECONDS = 0.1
"""A command that has run longer than this (s) when its connection breaks may have been at work in the server.
So the time that it ran does not count as waiting. The pauses between attempts do count, because a proxy whose
server is away may accept each connection and close it later.
"""

_LOOK_SECONDS = 0.5
"""A command that pauses before its next attempt calls `look` (see `waiting`) at least once in this many
seconds.
"""

_LEAST_SECONDS = 0.01

_GRACE_SECONDS = 0.5
"""A connection waits for a reply until this many seconds after the caller's deadline."""

_SMALL_BYTES = 2**20
"""Every server accepts values up to this size (bytes), because proto-max-bulk-len cannot be lower."""

_CUTS = 4
"""If sending a value breaks the connection this many times, and the server answers a PING after each break,
the value counts as refused because of its size.
"""

_BACKOFF = Backoff(first=0.1, longest=1.0, jitter=0.5)

_AUTH = frozenset({"WRONGPASS", "NOAUTH"})

_CODES = _AUTH | {
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "UNBLOCKED",
}
"""Codes of error replies after which the server may carry out the same command later."""

T = TypeVar("T")


class _CutOff(redis.ConnectionError):
    """The connection broke while a command that `blocking` runs waited at the server."""


logger = logging.getLogger(__name__)


def cannot_serve(error: BaseException) -> str | None:
    """Return one line that says why the server cannot serve now, or ``None`` if `error` has another reason.

    >>> cannot_serve(redis.ResponseError("BUSY Redis is busy running a script."))
    'BUSY Redis is busy running a script.'
    >>> cannot_serve(redis.ResponseError("WRONGTYPE Operation against a key"))
    """
    code, text = _reply(error)
    if code in _CODES or isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return text
    return None


def _reply(error: BaseException) -> tuple[str, str]:
    """Return the code of an error reply, and its text without the command that failed."""
    whole = mask_passwords(" ".join(str(error).split()))
    text = whole.rpartition("caused error: ")[2]  # an error in a pipeline begins with the command
    if isinstance(error, ExecAbortError):
        text = text.rpartition("because of: ")[2]
    code = getattr(error, "status_code", None)
    if code and not isinstance(error, ExecAbortError) and not text.startswith(code):
        text = f"{code} {text}"
    return text.partition(" ")[0], text


def _was_cut_off(error: BaseException, seconds: float) -> bool:
    """Return whether a connection broke at a time when the server may have been working on a command.

    `seconds` is the time since the command was sent. A connection that cannot be made is not cut off.
    """
    return seconds > _CUT_OFF_SECONDS and _is_broken(error) and "connecting to" not in str(error)


def _is_broken(error: BaseException) -> bool:
    broken = isinstance(error, redis.ConnectionError) and not isinstance(error, redis.MaxConnectionsError)
    return broken and _reply(error)[0] not in _CODES


@dataclass(frozen=True)
class _Wait:
    """How Redis commands of the current thread wait for the server.

    Attributes
    ----------
    look, most, until
        The parameters of `waiting`.
    value
        Size (bytes) of the largest value in a command that `sending` watches.
    ask
        Sends the server a PING.
    blocks
        Whether `blocking` runs the command.
    """

    look: Callable[[], None] = lambda: None
    most: float = float("inf")
    until: float = float("inf")
    value: int = 0
    ask: Callable[[], object] = lambda: None
    blocks: bool = False


_WAIT: ContextVar[_Wait] = ContextVar("wait", default=_Wait())  # noqa: B039 -- it is frozen


@contextmanager
def waiting(
    *, look: Callable[[], None] = lambda: None, most: float = float("inf"), until: float = float("inf")
) -> Iterator[None]:
    """Set how commands within the ``with`` block wait for the server.

    Parameters
    ----------
    look
        Called at least every half second while a command pauses between two attempts. An exception that it
        raises ends the wait. Redis commands in `look` do not wait.
    most
        Longest wait of each command in seconds. The client and enclosing blocks have limits, too; the
        shortest limit counts.
    until
        The caller's deadline, in `time.monotonic` seconds; of nested blocks, the earliest deadline counts. At
        the deadline, a command that pauses calls `look`, and a command that waits for a reply gives up soon
        after.
    """
    outer = _WAIT.get()
    token = _WAIT.set(_Wait(look, min(most, outer.most), min(until, outer.until)))
    try:
        yield
    finally:
        _WAIT.reset(token)


def blocking(read: Callable[[], T]) -> T | None:
    """Run a command that waits at the server, and return its reply, or ``None`` if its connection broke.

    The caller does other work between two such commands, for instance it searches for lost chunks. If the
    command were repeated until it has a reply, a network that breaks each connection early would keep the
    caller from that work.
    """
    token = _WAIT.set(replace(_WAIT.get(), blocks=True))
    try:
        return read()
    except _CutOff:
        return None
    finally:
        _WAIT.reset(token)


@contextmanager
def sending(client: redis.Redis, pipe: Pipeline) -> Iterator[None]:
    """Raise an error if the server refuses a value of a pipeline that is executed in the ``with`` block.

    A server refuses a value that is too large by breaking the connection. Without this function, the command
    would wait as if the server were away.

    Raises
    ------
    ValueRefused
        The connection breaks each time that the value is sent, and the server answers in between.
    """
    arguments = chain.from_iterable(arguments for arguments, _ in pipe.command_stack)
    largest = max((len(argument) for argument in arguments if isinstance(argument, bytes | str)), default=0)
    token = _WAIT.set(replace(_WAIT.get(), value=largest, ask=client.ping))
    try:
        yield
    finally:
        _WAIT.reset(token)


def end_of_command() -> float:
    """Return when a command that begins now must give up, in `time.monotonic` seconds.

    The limits are `most` and `until` of `waiting`; without them, the result is infinite. ``most=0`` is no
    limit here, because it allows one attempt, of any length.
    """
    wait = _WAIT.get()
    now = system.monotonic()
    return min(max(wait.until, now + _LEAST_SECONDS), now + (wait.most or float("inf")))


class InTime:
    """Base of connections to Redis that stop waiting for a reply soon after the caller's deadline. `waiting`
    sets the deadline.
    """

    _socket_timeout: Any

    @property
    def socket_timeout(self) -> float | None:
        left = max(_WAIT.get().until - system.monotonic(), 0)
        return float(min(self._socket_timeout, left + _GRACE_SECONDS))

    @socket_timeout.setter
    def socket_timeout(self, seconds: float | None) -> None:
        self._socket_timeout = seconds


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn redis-py's errors in the ``with`` block into rankmill's.

    Raises
    ------
    RedisUnavailable
        The server cannot serve now.
    RedisFailed
        The server has refused a command.
    """
    try:
        yield
    except redis.RedisError as error:
        reason = cannot_serve(error)
        if reason:
            raise RedisUnavailable(f"Redis cannot serve: {reason}") from None
        raise RedisFailed(f"Redis has refused a command: {_reply(error)[1]}") from None


def each_reply(client: redis.Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run several commands in one round trip, and return their replies.

    If a command can never succeed, for instance because of a damaged key, its reply is the error. If the
    server cannot serve a command now, the command is sent again alone, and waits as any command does.

    Parameters
    ----------
    client
        The client.
    commands
        For each command, the name of the client's method and the arguments.
    """
    with client.pipeline(transaction=False) as pipe:
        for name, *arguments in commands:
            getattr(pipe, name)(*arguments)
        replies = pipe.execute(raise_on_error=False)
    refused = [isinstance(reply, Exception) and bool(cannot_serve(reply)) for reply in replies]
    return [
        _one_reply(client, *command) if again else reply
        for command, reply, again in zip(commands, replies, refused, strict=True)
    ]


def _one_reply(client: redis.Redis, name: str, *arguments: Any) -> Any:
    try:
        return getattr(client, name)(*arguments)
    except redis.ResponseError as error:
        if cannot_serve(error):
            raise
        return error


def _is_too_large(error: BaseException) -> bool:
    """Return whether the server has replied that a value is too large.

    With most servers, the connection breaks before this reply can be read.
    """
    return _WAIT.get().value > _SMALL_BYTES and "Protocol error: invalid bulk length" in str(error)


def _breaks_at_value(error: BaseException) -> bool:
    """Return whether the connection broke when a large value was sent, although the server answers a PING."""
    wait = _WAIT.get()
    if wait.value > _SMALL_BYTES and _is_broken(error):
        with suppress(redis.RedisError, RedisUnavailable), waiting(most=0):
            wait.ask()
            return True
    return False


def _refuse() -> NoReturn:
    raise ValueRefused(
        f"Redis, or a proxy before it, takes no value of {_WAIT.get().value:,} bytes: raise its limit "
        "(proto-max-bulk-len of Redis), or set a smaller chunk_size (--chunk-size)"
    ) from None


class Patience(Retry):
    """Repeats each command, after growing pauses, while the server cannot serve.

    One object serves all connections of a client, from any thread.

    Parameters
    ----------
    seconds
        Longest wait of a command (``redis_wait_seconds``).
    give_up
        Called with the error when a command gives up, unless `waiting` has made the wait shorter. The
        function may end the process.

    Raises
    ------
    RedisUnavailable
        Raised by any command: the server could not serve during the longest wait.
    """

    __hash__ = Retry.__hash__

    def __init__(
        self, seconds: float, give_up: Callable[[RedisUnavailable], None] = lambda error: None
    ) -> None:
        super().__init__(NoBackoff(), -1, (redis.RedisError,))  # `_pause` makes the pauses
        self.seconds = seconds
        self.has_waited = False
        """Whether a command has ever had to wait for the server."""
        self.most = float("inf")
        """Another limit on the wait of each command, for a process that must end soon (s)."""
        self._give_up = give_up
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = system.Lock()
        self._waiting: dict[int, str] = {}
        self._since = 0.0

    def __deepcopy__(self, memo: object) -> Patience:
        """Return this object itself. redis-py copies the policy for every connection, but all connections
        must share one.
        """
        return self

    def sleep(self, seconds: float) -> None:
        system.sleep(seconds)

    def caller(self) -> int:
        """Return the id of the current thread. A subclass may tell callers apart in another way."""
        return system.thread_id()

    @property
    def trouble(self) -> str | None:
        """Why commands of this client wait for the server now, or ``None`` if no command waits."""
        with self._lock:
            return next(iter(self._waiting.values()), None)

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Call `do` until the server has carried it out. Before each repetition, `fail` closes the
        connection.
        """
        if os.getpid() != self._process:  # after a fork, threads of the parent may hold the lock
            self._begin()
        failures, since, served, cuts = 0, 0.0, False, 0
        # If a command of this thread already waits, this call only makes a new connection for that command.
        inner = bool(self._waiting) and self.caller() in self._waiting
        try:
            while True:
                began = system.monotonic()
                try:
                    done = do()
                    served = True
                    return done
                except redis.RedisError as error:
                    reason = cannot_serve(error)
                    if _is_too_large(error):
                        fail(error, _CUTS) if with_failure_count else fail(error)
                        _refuse()
                    if reason is None or (is_retryable is not None and not is_retryable(error)):
                        raise
                    if cut_off := _was_cut_off(error, seconds := system.monotonic() - began):
                        since = since + seconds if since else system.monotonic()
                    failures += 1
                    since = since or began  # also count the time in which a silent server did not reply
                    try:
                        fail(error, failures) if with_failure_count else fail(error)
                    finally:  # pause even if `fail` raises (for watched keys): the caller tries again
                        if cut_off and _WAIT.get().blocks:
                            raise _CutOff(reason) from error
                        self._pause(error, reason, failures, since)
                    cuts += _breaks_at_value(error)
                    if cuts == _CUTS:
                        _refuse()
        finally:
            if failures and not inner:
                self._end_of_wait(served)

    def _pause(self, error: BaseException, reason: str, failures: int, since: float) -> None:
        wait = _WAIT.get()
        most = min(self.seconds, self.most, wait.most)
        if _reply(error)[0] in _AUTH or isinstance(error, redis.AuthenticationError):
            most = min(most, AUTH_SECONDS)
        now = system.monotonic()
        if now - since >= most:
            self._over(reason, now - since, most, bounded=wait.most < self.seconds)
        end = now
        # no pause after a `MaxConnectionsError`, because the thread has already waited for a free connection
        if not isinstance(error, redis.MaxConnectionsError):
            if now < wait.until:  # otherwise the caller's deadline has passed
                self._note(reason, most)
            end += min(_BACKOFF.pause(failures), since + most - now)
        while True:
            with waiting(most=0):
                wait.look()
            now = system.monotonic()
            if now >= end:
                return
            until = wait.until - now
            self.sleep(min(end - now, _LOOK_SECONDS, until if until > 0 else _LOOK_SECONDS))

    def _over(self, reason: str, seconds: float, most: float, *, bounded: bool) -> None:
        limit = "; redis_wait_seconds is the limit" if most == self.seconds else ""
        waited = f" (waited {seconds:.0f} s{limit})" if seconds >= 1 else ""
        gone = RedisUnavailable(f"Redis cannot serve: {reason}{waited}")
        if not bounded:
            self._give_up(gone)
        raise gone from None

    def _note(self, reason: str, most: float) -> None:
        """Record that this thread waits. Log this if no other thread waits."""
        self.has_waited = True
        with self._lock:
            first = not self._waiting
            self._waiting[self.caller()] = reason
            if first:
                self._since = system.monotonic()
        if first:
            logger.warning("Redis cannot serve, waiting for it (%.0f s at most): %s", most, reason)

    def _end_of_wait(self, served: bool) -> None:
        with self._lock:
            last = self._waiting.pop(self.caller(), None) and not self._waiting
            waited = system.monotonic() - self._since
        if last and served:
            logger.info("Redis serves again, after %.1f s", waited)
