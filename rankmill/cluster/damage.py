"""Damaged keys in Redis: they are listed with a reason, and all other keys are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict
from redis.client import Pipeline
from rq.utils import str_to_date

MAX_DAMAGED = 100
"""Most damaged keys that a snapshot lists."""

_REASON_CHARS = 300


class Damaged(BaseModel):
    """A key that cannot be read, or only in part, and the reason."""

    model_config = ConfigDict(frozen=True)

    key: str
    reason: str


class Damage:
    """Collects the keys that cannot be read for a snapshot."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def note(self, key: str, reason: object) -> None:
        """Add a key; only its first reason is stored."""
        if len(self._reasons) < MAX_DAMAGED:
            self._reasons.setdefault(key, " ".join(str(reason).split())[:_REASON_CHARS])

    def found(self) -> tuple[Damaged, ...]:
        """The damaged keys found so far."""
        return tuple(Damaged(key=key, reason=reason) for key, reason in self._reasons.items())

    def replies(self, pipe: Pipeline, expected: Sequence[tuple[str, Any]]) -> list[Any]:
        """Run the commands in `pipe`, and return their replies.

        Parameters
        ----------
        pipe
            Commands that only read.
        expected
            For each command its key, and the reply to use if the key holds a value of another type.

        Raises
        ------
        redis.RedisError
            The server cannot serve.
        """
        replies = []
        for (key, default), reply in zip(expected, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(reply, redis.ResponseError) and "WRONGTYPE" in str(reply):
                self.note(key, "holds a value of another type")
                replies.append(default)
            elif isinstance(reply, Exception):
                raise reply
            else:
                replies.append(reply)
        return replies

    def text(self, raw: bytes, key: str) -> str | None:
        """A value or member as text; ``None`` if it is not UTF-8."""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.note(key, f"{raw[:40]!r} is not UTF-8")
            return None

    def texts(self, raws: Iterable[bytes], key: str) -> list[str]:
        """The values that are UTF-8, as texts."""
        return [text for text in (self.text(raw, key) for raw in raws) if text is not None]

    def seconds(self, raw: bytes | None, key: str) -> float | None:
        """A time in RQ's format, in seconds since 1970; ``None`` if the value is absent or not a time."""
        try:
            return None if raw is None else str_to_date(raw).timestamp()
        except (ValueError, ArithmeticError):
            self.note(key, f"{raw!r:.60} is not a time")
            return None
