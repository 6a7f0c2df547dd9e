"""The rules by which a worker claims jobs and gives them away; no I/O.

Requests come before bulk work, which keeps a share; the queue knows whose turn it is among tenants and runs.
No worker claims more than its part of the bulk work that waits, or keeps what an idle worker could score now.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankmill.jobs.contract.priority import Priority, priority_of
from rankmill.jobs.system import system
from rankmill.workers.engine.pipeline import PriorityTurns

_LEFT_ALONE_SECONDS = 1.0
_REFUSED_SECONDS = 10.0
"""How long the worker leaves a run alone whose chunk it has just given back, as it cannot score it; and how
long that comes after all others."""

_KEEP = 4
"""Pairs of a chunk that a worker may give away for each pair it keeps."""


class ClaimOrder:
    """Chooses what a worker claims next.

    Parameters
    ----------
    claim_ahead
        Pairs of each priority, at most, that are claimed and not scored before it claims no more.
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
        """The runs to leave alone now, as it has just given back a chunk of theirs."""
        return self._refused_within(_LEFT_ALONE_SECONDS)

    @property
    def refused_lately(self) -> list[str]:
        """The runs that come after all others, with those to leave alone."""
        return self._refused_within(_REFUSED_SECONDS)

    def _refused_within(self, seconds: float) -> list[str]:
        now = system.monotonic()
        self._refused = {run: at for run, at in self._refused.items() if now < at + _REFUSED_SECONDS}
        return [run for run, at in self._refused.items() if now < at + seconds]

    @property
    def last(self) -> bool:
        """Whether few jobs wait, so that a worker may soon have none and take what another has claimed."""
        return self._workers > 1 and self._waiting < self._workers

    def saw(self, waiting: int, workers: int) -> None:
        """Note how many jobs wait in all, and for how many workers."""
        self._waiting, self._workers = waiting, max(workers, 1)

    def began(self, run_id: str, pairs: int) -> None:
        """Count a chunk that was claimed."""
        priority = priority_of(run_id)
        self._turns.took(priority, pairs)
        self._refused.pop(run_id, None)
        if priority == "bulk":
            self._chunk_pairs = pairs

    def refused(self, run_id: str) -> None:
        """Note that a chunk of a run was given back for others: it would be next again."""
        self._refused[run_id] = system.monotonic()

    def no_bulk_waits(self) -> None:
        """Note that no bulk work waited when it was its turn."""
        self._turns.no_bulk_waits()

    def kinds(self, requests: int, bulk: int, *, hungry: bool) -> list[Priority]:
        """What to claim now, the next first.

        Parameters
        ----------
        requests, bulk
            Pairs that are claimed and not scored.
        hungry
            Whether the device may soon have no bulk work, whatever the worker's part is.
        """
        found: list[Priority] = ["request"] if requests < self._claim_ahead else []
        most: float = self._claim_ahead
        if self._workers > 1:  # one alone takes from nobody, and pads less the more it mixes
            most = min(most, self._waiting * self._chunk_pairs / self._workers)
        if not bulk or hungry or bulk < most:
            found.insert(0 if self._turns.bulk_is_next else len(found), "bulk")
        return found


def chunks_to_give(unstarted: Sequence[int], pending: int, idle: int) -> int:
    """How many of its unstarted chunks a worker gives to idle workers, from the last one on.

    Each idle worker gets one, and begins it at once. So no chunk is given twice, unless its worker ends.

    Parameters
    ----------
    unstarted
        Pairs of the chunks, in the order in which they would be scored.
    pending
        All pairs that the worker has to score, those of the chunks included.
    idle
        Workers without work.
    """
    given = 0
    for pairs in list(unstarted)[::-1][:idle]:
        kept = pending - pairs
        if kept * _KEEP < pairs:
            break
        given, pending = given + 1, kept
    return given
