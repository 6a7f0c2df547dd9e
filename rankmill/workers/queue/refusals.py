"""Remembers which models and runs a worker refuses because it cannot score them, and for how long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.system import Backoff, system

PAUSE = Backoff(first=1.0, longest=60.0)

_FORGET_SECONDS = 600.0
"""Whenever the worker refuses a model or run, it forgets the refusals that ended more than this many seconds
ago.
"""

_REMEMBERED = 1000


class StillRefused(WorkerError):
    """The worker lately failed to score this model or run, and does not try it again yet."""


@dataclass
class _Refused:
    reason: str
    option: str | None
    times: int
    until: float


class Refusals:
    """Remembers each model or run that a worker cannot score, and when the worker may try it again.

    After a refusal, the worker hands back the chunks of the model or run until a pause is over. Then it tries
    the next chunk. If that fails too, the pause is twice as long, up to a minute, but never shorter than the
    failed attempt.
    """

    def __init__(self) -> None:
        self._refused: dict[Hashable, _Refused] = {}

    def why(self, key: Hashable) -> str | None:
        """Return why the model or run `key` is refused now; ``None`` if the worker may try it."""
        refused = self._refused.get(key)
        return refused.reason if refused and system.monotonic() < refused.until else None

    def check(self, key: Hashable) -> None:
        if reason := self.why(key):
            raise StillRefused(reason, option=self._refused[key].option)

    def open(self, key: Hashable, reason: str, option: str | None = None, *, took: float = 0.0) -> bool:
        """Refuse the model or run `key` until a pause is over, and return whether this is its first refusal.

        Parameters
        ----------
        key
            The model or run.
        reason
            Why the worker cannot score it.
        option
            The option of the spec that is the reason, if any.
        took
            Seconds that the attempt took. The pause is at least as long, so that other runs get at least half
            of the worker's time.
        """
        now = system.monotonic()
        self._refused = {
            key: refused for key, refused in self._refused.items() if now < refused.until + _FORGET_SECONDS
        }
        before = self._refused.get(key)
        times = before.times + 1 if before else 1
        self._refused[key] = _Refused(reason, option, times, now + max(PAUSE.pause(times), took))
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return before is None

    def close(self, key: Hashable) -> None:
        """Forget the refusal of the model or run `key`."""
        self._refused.pop(key, None)

    def reasons(self) -> tuple[str, ...]:
        """The reason for each model or run that is refused now."""
        now = system.monotonic()
        return tuple(entry.reason for entry in list(self._refused.values()) if now < entry.until)

    def seconds(self, reason: str) -> float:
        """Return the seconds until the last refusal with this `reason` ends; 0 or less if there is none."""
        now = system.monotonic()
        entries = [entry for entry in list(self._refused.values()) if entry.reason == reason]
        return max((entry.until - now for entry in entries), default=0.0)
