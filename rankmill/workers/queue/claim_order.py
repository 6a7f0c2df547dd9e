"""Decides which jobs a worker claims, and which it gives away, without any I/O.

Requests come before bulk work, which keeps a share of the pairs. The queue decides the order of tenants and
runs. A worker claims no more than its part of the waiting bulk work, unless its device may soon run out of
work. A worker gives idle workers chunks that it has not started.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.system import system
from rankmill.workers.engine.pipeline import PriorityTurns

_LEFT_ALONE_SECONDS = 1.0
_REFUSED_SECONDS = 10.0
"""For the first number of seconds after a worker has handed back a chunk that it cannot score, the worker
leaves the run alone. Until the second number of seconds is over, the worker takes the run only after all
others.
"""

_KEEP = 4
"""A worker gives a chunk away only if the chunk has at most this many times the pairs that the worker
keeps.
"""


class ClaimOrder:
    """Chooses what a worker claims next.

    Parameters
    ----------
    claim_ahead
        When this many pairs of a priority are claimed and not scored, the worker claims no more of that
        priority. The worker claims more bulk work if its device may soon run out.
    """

    def __init__(self, claim_ahead: int) -> None:
        self._claim_ahead = claim_ahead
        self._turns = PriorityTurns()
        self._chunk_pairs = 0
        self._waiting = 0
        self._workers = 1
        self._refused: dict[str, float] = {}

    @property
    def left_alone(self) -> list[str]:
        """The runs to leave alone now, because the worker has just handed back one of their chunks."""
        return self._refused_within(_LEFT_ALONE_SECONDS)

    @property
    def refused_lately(self) -> list[str]:
        """The runs that come after all others, including those to leave alone."""
        return self._refused_within(_REFUSED_SECONDS)

    def _refused_within(self, seconds: float) -> list[str]:
        now = system.monotonic()
        self._refused = {run: at for run, at in self._refused.items() if now < at + _REFUSED_SECONDS}
        return [run for run, at in self._refused.items() if now < at + seconds]

    @property
    def last(self) -> bool:
        """Whether fewer jobs wait than there are workers. If so, another worker may soon be idle and get
        chunks that this one has claimed.
        """
        return self._workers > 1 and self._waiting < self._workers

    def saw(self, waiting: int, workers: int) -> None:
        self._waiting, self._workers = waiting, max(workers, 1)

    def began(self, run_id: str, priority: Priority, pairs: int) -> None:
        self._turns.took(priority, pairs)
        self._refused.pop(run_id, None)
        if priority == "bulk":
            self._chunk_pairs = pairs

    def refused(self, run_id: str) -> None:
        """Note that a chunk of this run was handed back to others, so that the run is left alone for now."""
        self._refused[run_id] = system.monotonic()

    def no_bulk_waits(self) -> None:
        """Note that no bulk work waited when its turn came."""
        self._turns.no_bulk_waits()

    def kinds(self, requests: int, bulk: int, *, hungry: bool) -> list[Priority]:
        """The priorities to claim now, in order.

        Parameters
        ----------
        requests, bulk
            Pairs of each priority that are claimed and not scored.
        hungry
            Whether the device may soon run out of work; then bulk work may be claimed even if the worker has
            its part already.
        """
        priorities: list[Priority] = ["request"] if requests < self._claim_ahead else []
        most: float = self._claim_ahead
        if self._workers > 1:  # a single worker may take everything, and pads less if it mixes more
            most = min(most, self._waiting * self._chunk_pairs / self._workers)
        if not bulk or hungry or bulk < most:
            priorities.insert(0 if self._turns.bulk_is_next else len(priorities), "bulk")
        return priorities


def chunks_to_give(unstarted: Sequence[int], pending: int, idle: int) -> int:
    """The number of unstarted chunks that a worker gives to idle workers, beginning with the last chunk.

    Each idle worker gets one chunk and begins it at once. So a chunk is given away only once, unless its new
    worker ends.

    Parameters
    ----------
    unstarted
        Pairs of the chunks, in the order in which they would be scored.
    pending
        All pairs that the worker has to score, including those of the chunks.
    idle
        Number of workers without work.
    """
    given = 0
    for pairs in list(unstarted)[::-1][:idle]:
        kept = pending - pairs
        if kept * _KEEP < pairs:
            break
        given, pending = given + 1, kept
    return given
