"""Remembers which models and runs a worker refuses because it cannot score them, and for how long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.system import Backoff, system

PAUSE = Backoff(first=1.0, longest=60.0)

_FORGET_SECONDS = 600.0
"""A worker forgets that it has refused a model or run, if no chunk needs it for this many seconds after the
pause of the refusal.
"""

_REMEMBERED = 1000


class StillRefused(WorkerError):
    """The worker has refused a chunk's model or run before, and does not try it again yet."""


@dataclass
class _Refused:
    reason: str
    option: str | None
    times: int
    until: float


class Refusals:
    """A circuit breaker for each model or run that a worker cannot score, named by `key`.

    While a breaker is closed, the worker takes chunks. A refusal opens the breaker, and the worker puts
    chunks back until a pause is over. Each pause is twice as long as the last, up to a minute, but not
    shorter than the attempt. After the pause, the next chunk closes the breaker or opens it again. A breaker
    that no chunk has tested for long is forgotten.
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
        """Refuse the model or run `key` until its next pause is over; returns whether this is its first
        refusal.

        `option` is the option that a `SpecError` names. `took` is how long the attempt took in seconds; the
        refusal lasts at least as long, so that other runs get at least half of the worker's time.
        """
        before = self._refused.get(key)
        now = system.monotonic()
        self._refused = {
            key: refused for key, refused in self._refused.items() if now < refused.until + _FORGET_SECONDS
        }
        times = before.times + 1 if before else 1
        self._refused[key] = _Refused(reason, option, times, now + max(PAUSE.pause(times), took))
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return before is None

    def close(self, key: Hashable) -> None:
        """Forget the refusal of the model or run `key`, because the worker can score it, or no job will ask
        for it.
        """
        self._refused.pop(key, None)

    def reasons(self) -> tuple[str, ...]:
        """The reason for each model or run that is refused now."""
        now = system.monotonic()
        return tuple(entry.reason for entry in list(self._refused.values()) if now < entry.until)

    def seconds(self, reason: str) -> float:
        """Return the seconds until the last refusal with this `reason` ends, of any model or run. The result
        is at most 0 if no model or run is refused for this `reason` now.
        """
        now = system.monotonic()
        entries = [entry for entry in list(self._refused.values()) if entry.reason == reason]
        return max((entry.until - now for entry in entries), default=0.0)
