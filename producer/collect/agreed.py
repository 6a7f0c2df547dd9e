"""What all chunks of a run have in common: the precision, the model's content, and the labels of scores."""

from __future__ import annotations

from collections.abc import Callable

from rankmill.jobs.contract.results import ChunkStats
from rankmill.jobs.contract.run import Settled
from rankmill.jobs.contract.spec import ScoreSpec


class Agreed:
    """The precision, the revision and the labels of a run, which are known after its first scored chunk.

    Parameters
    ----------
    spec
        That of the run.
    first
        Statistics of a chunk that is scored already.
    """

    def __init__(self, spec: ScoreSpec, first: ChunkStats | None) -> None:
        self._spec = spec
        self.settled = self._of(first) if first else Settled(None, None)
        self._labels = first.labels if first else None

    def objection(self, stats: ChunkStats, settle: Callable[[Settled], Settled]) -> str | None:
        """Why a chunk with these statistics is none of this run; ``None`` if it is one.

        `settle` returns what is settled for the run, given what its first chunk has.
        """
        mine = self._of(stats)
        if any(own and not known for own, known in zip(mine, self.settled, strict=True)):
            first = (known or own for own, known in zip(mine, self.settled, strict=True))
            self.settled = settle(Settled(*first))
        if mine.precision != self.settled.precision:
            return f"it is in {mine.precision}, and the run in {self.settled.precision}"
        if mine.revision and mine.revision != self.settled.revision:  # older workers name no content
            return f"its model has content {mine.revision:.12}, and the run's {self.settled.revision:.12}"
        if self._labels is None:
            self._labels = stats.labels if self._spec.all_labels else ()
        if stats.labels != self._labels:
            return f"its labels are {stats.labels}, and the run's are {self._labels}"
        return None

    def _of(self, stats: ChunkStats) -> Settled:
        """What can differ between workers: the precision only where the run leaves it open."""
        return Settled(stats.precision if self._spec.precision == "auto" else None, stats.revision)
