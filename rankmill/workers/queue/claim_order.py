"""The rules by which a worker claims jobs and gives them away; no I/O.

Requests come before bulk work, which keeps a share. Tenants get pairs by their weights, of requests and of
bulk work; the bulk runs of a tenant get equal numbers, wherever in the queue their chunks are. No worker
claims more than its part of the bulk work that waits, or keeps what an idle worker could score now.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rankmill.jobs.contract.priority import Priority, group_in, priority_of
from rankmill.jobs.protocol.ordered_queue import LOOK_AT
from rankmill.jobs.system import system
from rankmill.workers.engine.pipeline import PriorityTurns

_NAMES = 16
"""The number of bulk runs, and of tenants, whose pairs a worker counts: the last that it claimed from."""

_A_SECOND = 25_000
_AT_ONCE = 512
"""Jobs further back in a queue at which all workers look in a second, and most at which one does in a claim;
these take the server about 0.15 ms."""

_LEFT_ALONE_SECONDS = 1.0
_REFUSED_SECONDS = 10.0
"""How long the worker leaves a run alone whose chunk it has just given back, as it cannot score it; and how
long that comes after all others.

It rests for up to a second after 64 such chunks, so it gets past some 500 runs to one that it can score.
"""

_KEEP = 4
"""Pairs of a chunk that a worker may give away for each pair it keeps."""


class Shares:
    """Chooses the waiting tenant or run with the fewest pairs so far (start-time fair queueing).

    Newcomers start level with the others; those without waiting work gain no credit.
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[str, float] = OrderedDict()
        self._level = 0.0

    def took(self, name: str, pairs: float) -> None:
        """Count pairs."""
        self._level = max(self._pairs.pop(name, 0.0), self._level)
        self._pairs[name] = self._level + pairs
        if len(self._pairs) > _NAMES:
            self._pairs.popitem(last=False)

    def names(self) -> list[str]:
        """All names, fewest pairs first; names that are missing have had none."""
        return sorted(self._pairs, key=self._pairs.__getitem__)


class FurtherLook:
    """Which piece of a long queue a worker looks at, beside its next jobs, for runs that are not among these.

    Each claim looks at the next piece, so that the whole queue is looked at again and again. A piece has
    `LOOK_AT` jobs, or as many more as are due at `_A_SECOND` when claims are rare.
    """

    def __init__(self) -> None:
        self._at = 0
        self._looked = -math.inf

    def next(self, waiting: int, workers: int, now: float) -> tuple[int, int]:
        """After how many jobs, and at how many, of `waiting` in all; `now` is in seconds."""
        due = min((now - self._looked) * _A_SECOND / workers, _AT_ONCE)
        self._looked = now
        if waiting <= LOOK_AT:
            return 0, 0
        start = self._at if LOOK_AT <= self._at < waiting else LOOK_AT
        jobs = max(int(due), LOOK_AT)
        moved_up = min(workers, LOOK_AT // 2)  # by what all workers claim until the next look
        self._at = start + jobs - moved_up
        return start, jobs


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
        self._tenants: dict[Priority, Shares] = {"request": Shares(), "bulk": Shares()}
        self._runs = Shares()
        self._chunk_pairs = 0
        self._waiting = 0
        self._workers = 1
        self._further: dict[str, FurtherLook] = {}
        self._in_queue: dict[str, int] = {}
        self._refused: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """Whose job to claim next, as the `order` of `OrderedQueue.take`."""
        now = system.monotonic()
        self._refused = {run: at for run, at in self._refused.items() if now < at + _REFUSED_SECONDS}
        refused = (f"{'-' if self._left_alone(run, now) else '!'}{run}" for run in self._refused)
        tenants = [name for shares in self._tenants.values() for name in shares.names()]
        return [*tenants, *self._runs.names(), *refused]

    @property
    def leaves_some(self) -> bool:
        """Whether jobs wait, and some of them may be of runs that are left alone."""
        now = system.monotonic()
        return self._waiting > 0 and any(self._left_alone(run, now) for run in self._refused)

    def _left_alone(self, run_id: str, now: float) -> bool:
        return now < self._refused[run_id] + _LEFT_ALONE_SECONDS

    @property
    def last(self) -> bool:
        """Whether few jobs wait, so that a worker may soon have none and take what another has claimed."""
        return self._workers > 1 and self._waiting < self._workers

    def saw(self, waiting: Mapping[str, int], workers: int) -> None:
        """Note how many jobs wait, by queue, and for how many workers."""
        self._in_queue.update(waiting)
        self._waiting, self._workers = sum(waiting.values()), max(workers, 1)

    def further(self, queue: str) -> tuple[int, int]:
        """Which piece of a queue to look at beside its next jobs, as `OrderedQueue.take` has it."""
        look = self._further.setdefault(queue, FurtherLook())
        return look.next(self._in_queue.get(queue, 0), self._workers, system.monotonic())

    def began(self, run_id: str, pairs: int, weight: float = 1.0) -> None:
        """Count a chunk that was claimed; `weight` is that of its run's tenant."""
        priority = priority_of(run_id)
        self._turns.took(priority, pairs)
        self._tenants[priority].took(group_in(run_id), pairs / weight)
        self._refused.pop(run_id, None)
        if priority == "bulk":
            self._chunk_pairs = pairs
            self._runs.took(run_id, pairs)

    def refused(self, run_id: str) -> None:
        """Note that a chunk of a run was given back for others: it would be next again, wherever it is."""
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
