"""Reads a cluster from Redis with many commands in one round trip; damaged keys are left out and listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import redis
from rq.utils import str_to_date

from rankmill.jobs.runtime.patience import each_reply
from rankmill.jobs.system import system

MAX_DAMAGED = 100

_REASON_CHARS = 300

Item = TypeVar("Item")


class Look:
    """Reads keys of a Redis server, many in one round trip, and lists those that are damaged.

    Attributes
    ----------
    now
        When the object was made, in seconds since 1970. Ages are counted until then.

    Parameters
    ----------
    client
        A client of the server, whose responses are bytes.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.now = system.now()
        self.damaged: dict[str, str] = {}
        """The first `MAX_DAMAGED` keys in Redis that could not be read completely, each with the reason."""

    def replies(
        self, items: Sequence[Item], commands: Callable[[Item], list[tuple[Any, ...]]]
    ) -> list[list[Any]]:
        """Send the commands for all items in one round trip, and return a list of replies for each item.

        Parameters
        ----------
        items
            The items.
        commands
            Returns the commands for an item; they must only read. A command is a tuple of its name, its key,
            a default, and its other arguments. The default is the reply if the key has a value of another
            type.
        """
        reads = [commands(item) for item in items]
        sent = [(name, key, *arguments) for of_item in reads for name, key, _, *arguments in of_item]
        replies = iter(each_reply(self._client, sent) if sent else ())
        return [
            [self._checked(next(replies), key, default) for _, key, default, *_ in of_item]
            for of_item in reads
        ]

    def _checked(self, reply: Any, key: str, default: Any) -> Any:
        if isinstance(reply, redis.ResponseError) and "WRONGTYPE" in str(reply):
            self.note(key, "holds a value of another type")
            return default
        if isinstance(reply, Exception):
            raise reply
        return reply

    def note(self, key: str, reason: object) -> None:
        if len(self.damaged) < MAX_DAMAGED:
            self.damaged.setdefault(key, " ".join(str(reason).split())[:_REASON_CHARS])

    def text(self, raw: bytes, key: str) -> str | None:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.note(key, f"{raw[:40]!r} is not UTF-8")
            return None

    def texts(self, raws: Iterable[bytes], key: str) -> list[str]:
        return [text for text in (self.text(raw, key) for raw in raws) if text is not None]

    def time(self, raw: bytes | None, key: str) -> float | None:
        """Convert a time in RQ's format to seconds since 1970. If `raw` is not a time, list `key` as damaged.

        The result is ``None`` for ``None``, and for damaged times.
        """
        try:
            return None if raw is None else str_to_date(raw).timestamp()
        except (ValueError, ArithmeticError):
            self.note(key, f"{raw!r:.60} is not a time")
            return None

    def number(self, raw: bytes | None, key: str) -> int:
        """Convert a count to a number. If `raw` is not a number, list `key` as damaged.

        The result is 0 for ``None``, and for empty, negative and damaged counts.
        """
        try:
            return max(int(raw or 0), 0)
        except ValueError:
            self.note(key, f"{raw!r:.60} is not a number")
            return 0

    def age(self, at: float | None) -> float | None:
        return None if at is None else max(self.now - at, 0.0)
