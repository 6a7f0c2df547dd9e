"""A submitted run, as its caller has it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rankmill.producer.client.runs.scores import RunStats, Scores, as_array

if TYPE_CHECKING:
    from rankmill.jobs.contract.run import Progress
    from rankmill.jobs.protocol.runs import RunStore
    from rankmill.producer.collect.splitting import ScoredTable
    from rankmill.producer.collect.submission import Submission


class ScoringRun:
    """A submitted run. Read its results once: all with `scores`, or in parts by iterating.

    Chunks beyond the window are submitted while the caller reads results. One thread at a time reads a run;
    any may use `cancel` and `progress`.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._scores: list[npt.NDArray[np.float32]] = []
        self.errors: dict[int, str] = {}
        """Reasons by row number (from 0) for the rows read so far that have no score."""
        self.stats = RunStats()
        """How the rows read so far were scored."""
        self.labels: tuple[str, ...] = ()
        """Names of a row's scores, with ``all_labels``; known after the first scored chunk."""

    @property
    def id(self) -> str:
        """The run's id, as it appears in logs and Redis keys."""
        return self._submission.run.id

    @property
    def model(self) -> str:
        """The model that scores, with the version that an alias stood for."""
        return self._submission.run.spec.model

    @property
    def progress(self) -> Progress:
        """The rows done so far, those of unfinished chunks included, and the speed."""
        return self._submission.progress

    def scores(self, timeout: float | None = None) -> Scores:
        """Wait for all scores: float32 of shape ``[n]`` (``[n, labels]``), NaN for the rows in `errors`.

        Parameters
        ----------
        timeout
            Longest time to wait, in seconds.

        Raises
        ------
        RunTimeout, NoWorkers
            Some scores are still missing. The run goes on; call this again to go on waiting, or `cancel`.
        RunFailed, RunCancelled
            The run has ended without all of its scores.
        """
        return read_together([self], timeout)[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield the scores in input order, each as soon as it is available; NaN for rows in `errors`.

        Each is a float, or with ``all_labels`` a list of them.
        """
        for part in self.tables():
            for score in part.scores.to_pylist():
                yield math.nan if score is None else score

    def tables(self) -> Iterator[ScoredTable]:
        """Yield the input as tables in input order, each with its scores, errors and statistics."""
        for part in self._submission.tables():
            self._count(part)
            yield part

    def cancel(self) -> None:
        """Cancel the run: its waiting chunks leave the queue, and its keys are deleted."""
        self._submission.cancel()

    def _count(self, part: ScoredTable) -> None:
        stats, rows = self.stats, len(part.table)
        if part.errors.null_count < rows:
            reasons = enumerate(part.errors.to_pylist(), stats.rows)
            self.errors |= {row: reason for row, reason in reasons if reason is not None}
        stats.rows += rows
        stats.chunks += 1
        stats.retries += max(part.attempts - 1, 0)
        stats.workers[part.worker] = stats.workers.get(part.worker, 0) + rows
        if part.stats:
            stats.tokens += part.stats.tokens
            stats.padded_tokens += part.stats.padded_tokens
            if part.stats.seconds >= stats.seconds:
                stats.seconds = part.stats.seconds
                stats.tokenize_seconds = part.stats.tokenize_seconds
                stats.forward_seconds = part.stats.forward_seconds
            stats.precision, stats.backend = part.stats.precision, part.stats.backend
            stats.revision = part.stats.revision
            self.labels = part.stats.labels


def read_together(runs: Sequence[ScoringRun], timeout: float | None) -> list[Scores]:
    """Wait for the scores of runs over the same tables, a table of each at a time; as `ScoringRun.scores`."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    for run in runs:
        run._submission.deadline = deadline
    try:
        for parts in zip(*(run.tables() for run in runs), strict=True):
            for run, part in zip(runs, parts, strict=True):
                run._scores.append(as_array(part.scores))
    finally:
        for run in runs:
            run._submission.deadline = math.inf
    return [Scores.of(run._scores, run.errors, run.labels) for run in runs]


class Submitter(Protocol):
    """What submits runs: a `Client`, as those know it who begin several runs by it."""

    store: RunStore

    @property
    def start(self) -> Callable[..., ScoringRun]:
        """As of `Client.start`."""
        ...

    @property
    def run_of(self) -> Callable[..., ScoringRun]:
        """As of `Client.run_of`."""
        ...

    @property
    def score(self) -> Callable[..., Scores]:
        """As of `Client.score`."""
        ...
