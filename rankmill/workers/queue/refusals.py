"""Which models and runs a worker refuses, and for how long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.system import Backoff, system

PAUSE = Backoff(first=1.0, longest=60.0)
"""Until a worker tries again a model or run that it refused."""

_FORGET_SECONDS = 600.0
"""Time after its pause until a refusal is forgotten that no chunk has tried."""

_REMEMBERED = 1000
"""Refused models and runs that a worker remembers, at most."""


class StillRefused(WorkerError):
    """The worker has refused the model or run before, and does not try it again yet."""


@dataclass
class _Refused:
    reason: str
    option: str | None
    times: int
    until: float


class Refusals:
    """A circuit breaker for each model or run that a worker cannot score; `key` names it.

    Closed: the worker takes chunks. Open, after a refusal: it puts chunks back until the pause is over;
    the pause doubles each time. After the pause, the next chunk closes the breaker or opens it again; one
    that no chunk has tried for long is forgotten.
    """

    def __init__(self) -> None:
        self._refused: dict[Hashable, _Refused] = {}

    def why(self, key: Hashable) -> str | None:
        """Why `key` is refused now; ``None`` if it may be tried."""
        found = self._refused.get(key)
        return found.reason if found and system.monotonic() < found.until else None

    def check(self, key: Hashable) -> None:
        """Raise `StillRefused` if `key` is refused now."""
        if reason := self.why(key):
            raise StillRefused(reason, option=self._refused[key].option)

    def open(self, key: Hashable, reason: str, option: str | None = None, *, took: float = 0.0) -> bool:
        """Refuse `key` for twice as long as the last time; return whether this is the first time.

        ``option`` is that of the `SpecError`, if it was one. It is refused for no less than the seconds that
        the attempt ``took``: others' runs get half of the time.
        """
        before = self._refused.get(key)
        now = system.monotonic()
        self._refused = {
            key: each for key, each in self._refused.items() if now < each.until + _FORGET_SECONDS
        }
        times = before.times + 1 if before else 1
        self._refused[key] = _Refused(reason, option, times, now + max(PAUSE.pause(times), took))
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return before is None

    def close(self, key: Hashable) -> None:
        """Accept `key` again, or forget it, as no job will ask for it."""
        self._refused.pop(key, None)

    def reasons(self) -> tuple[str, ...]:
        """Why this worker leaves chunks to others: one reason for each model or run refused now."""
        return tuple(each.reason for each in list(self._refused.values()) if system.monotonic() < each.until)

    def seconds(self, reason: str) -> float:
        """How long the worker goes on refusing for this reason, at most."""
        now = system.monotonic()
        return max(
            (each.until - now for each in list(self._refused.values()) if each.reason == reason), default=0.0
        )
