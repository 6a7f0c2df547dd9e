"""Keeps the models and runs that a worker refuses, and for how long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.system import Backoff, system

PAUSE = Backoff(first=1.0, longest=60.0)

_FORGET_SECONDS = 600.0
"""A refusal is forgotten if no chunk tests it for this many seconds after its pause."""

_REMEMBERED = 1000


class StillRefused(WorkerError):
    """The worker has refused this model or run before, and does not try it again yet."""


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
        """Why `key` is refused now; ``None`` if it may be tried."""
        refused = self._refused.get(key)
        return refused.reason if refused and system.monotonic() < refused.until else None

    def check(self, key: Hashable) -> None:
        if reason := self.why(key):
            raise StillRefused(reason, option=self._refused[key].option)

    def open(self, key: Hashable, reason: str, option: str | None = None, *, took: float = 0.0) -> bool:
        """Refuse `key` for its next pause; returns whether this is the first time.

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
        """Accept `key` again, or forget it because no job will ask for it."""
        self._refused.pop(key, None)

    def reasons(self) -> tuple[str, ...]:
        """The reason for each model or run that is refused now."""
        now = system.monotonic()
        return tuple(entry.reason for entry in list(self._refused.values()) if now < entry.until)

    def seconds(self, reason: str) -> float:
        """The seconds until this reason is over for every model and run that is refused for it."""
        now = system.monotonic()
        entries = [entry for entry in list(self._refused.values()) if entry.reason == reason]
        return max((entry.until - now for entry in entries), default=0.0)
