"""What all chunks of a run have in common: the precision, and the labels of their scores."""

from __future__ import annotations

from collections.abc import Callable

from jobs.results import ChunkStats
from jobs.spec import ScoreSpec


class Agreed:
    """The precision and the labels of a run, which are known after its first scored chunk.

    Parameters
    ----------
    spec
        That of the run.
    first
        Statistics of a chunk that is scored already.
    """

    def __init__(self, spec: ScoreSpec, first: ChunkStats | None) -> None:
        self._spec = spec
        self.precision = first.precision if first else None
        self._labels = first.labels if first else None

    def objection(self, stats: ChunkStats, settle: Callable[[str], str]) -> str | None:
        """Why a chunk with these statistics is none of this run; ``None`` if it is one.

        `settle` returns the precision of a run with ``auto``, given that of its first chunk.
        """
        if self._spec.precision == "auto":
            if self.precision is None:
                self.precision = settle(stats.precision)
            if stats.precision != self.precision:
                return f"it is in {stats.precision}, and the run in {self.precision}"
        if self._labels is None:
            self._labels = stats.labels if self._spec.all_labels else ()
        if stats.labels != self._labels:
            return f"its labels are {stats.labels}, and the run's are {self._labels}"
        return None
