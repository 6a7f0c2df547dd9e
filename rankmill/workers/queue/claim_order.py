"""Decides which jobs a worker claims, refuses and gives away, without any I/O.

Requests come before bulk work. But while both wait, a quarter of the claimed pairs are bulk work. The queue
decides the order of tenants and runs. A worker claims at most an equal share of the waiting bulk work: all
pairs divided by the number of workers. It claims more only if its device may soon run out of work. A worker
gives idle workers chunks that it has not started.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.system import Backoff, system
from rankmill.workers.engine.pipeline import PriorityTurns

_LEFT_ALONE_SECONDS = 1.0
_REFUSED_SECONDS = 10.0
"""After a worker has handed back a chunk that it cannot score, it takes no chunk of the same run for
`_LEFT_ALONE_SECONDS`. Until `_REFUSED_SECONDS` are over, it takes one only if no other run has a chunk.
"""

PAUSE = Backoff(first=1.0, longest=60.0)

_FORGET_SECONDS = 600.0
"""Whenever the worker refuses a model or run, it forgets the refusals that ended more than this many seconds
ago.
"""

_REMEMBERED = 1000

_KEEP = 4
"""A worker gives a chunk of ``n`` pairs to an idle worker only if it keeps ``n / 4`` pairs or more to score
itself.
"""


class ClaimOrder:
    """Chooses the priority and the runs from which a worker claims its next job.

    Parameters
    ----------
    claim_ahead
        When this many pairs of a priority are claimed and not scored, the worker claims no more of that
        priority. But if its device may soon have nothing to do, the worker claims more bulk work.
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
        """Ids of the runs whose chunks this worker does not take now.

        The worker has handed back a chunk of each of these runs a short time ago.
        """
        return self._refused_within(_LEFT_ALONE_SECONDS)

    @property
    def refused_lately(self) -> list[str]:
        """Ids of the runs whose chunks this worker takes only if no other run has a chunk.

        The worker has lately handed back a chunk of each of these runs. The ids of `left_alone` are included.
        """
        return self._refused_within(_REFUSED_SECONDS)

    def _refused_within(self, seconds: float) -> list[str]:
        now = system.monotonic()
        self._refused = {run: at for run, at in self._refused.items() if now < at + _REFUSED_SECONDS}
        return [run for run, at in self._refused.items() if now < at + seconds]

    @property
    def last(self) -> bool:
        """Whether fewer jobs wait than there are workers, so that other workers may soon be idle. False for a
        single worker.
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
        """Remember that this worker cannot score the run, and let it take no chunk of the run for a while."""
        self._refused[run_id] = system.monotonic()

    def no_bulk_waits(self) -> None:
        """Forget that bulk work is owed a turn, because no bulk job waited when its turn came."""
        self._turns.no_bulk_waits()

    def kinds(self, requests: int, bulk: int, *, hungry: bool) -> list[Priority]:
        """Return the priorities whose jobs the worker may claim now, the first choice first.

        Parameters
        ----------
        requests, bulk
            The numbers of pairs of each priority that the worker has claimed and not scored.
        hungry
            Whether the device may soon run out of work. If so, bulk work may be claimed even if the worker
            already has its share of the waiting pairs.
        """
        priorities: list[Priority] = ["request"] if requests < self._claim_ahead else []
        most: float = self._claim_ahead
        # A single worker is not limited to a share: the more chunks it claims, the less padding batches need.
        if self._workers > 1:
            most = min(most, self._waiting * self._chunk_pairs / self._workers)
        if not bulk or hungry or bulk < most:
            priorities.insert(0 if self._turns.bulk_is_next else len(priorities), "bulk")
        return priorities


def chunks_to_give(unstarted: Sequence[int], pending: int, idle: int) -> int:
    """Return how many of its unstarted chunks a worker gives away to idle workers.

    Each idle worker gets at most one chunk. The last chunks are given first.

    Parameters
    ----------
    unstarted
        The number of pairs of each unstarted chunk, in the order in which the chunks would be scored.
    pending
        The number of all pairs that the worker has to score, including those of unstarted chunks.
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
    the next chunk. If that chunk fails too, the next pause is twice as long, up to a minute. No pause is
    shorter than the failed attempt.
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
