"""Pauses between attempts: each is twice as long as the one before, up to a longest."""

from __future__ import annotations

from dataclasses import dataclass

from rankmill.jobs.system import system


@dataclass(frozen=True)
class Backoff:
    """How long to pause after so many failures in a row.

    Attributes
    ----------
    first, longest
        Seconds of the first pause, and of the longest.
    jitter
        Share by which a pause may be longer or shorter, so that those who failed together do not come back
        together.
    """

    first: float
    longest: float
    jitter: float = 0.0

    def pause(self, failures: int) -> float:
        """Seconds to pause after `failures` in a row, from 1.

        >>> [Backoff(0.5, 3.0).pause(failures) for failures in (1, 2, 3, 4, 5000)]
        [0.5, 1.0, 2.0, 3.0, 3.0]
        """
        pause = min(self.first * 2.0 ** min(failures - 1, 100), self.longest)
        return pause * system.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else pause
