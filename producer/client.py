"""Scoring from other services: pairs in, scores out, through the queue.

>>> client = Client("redis://localhost:6379/0")                       # doctest: +SKIP
>>> client.score([("how far is the moon", "About 384,000 km.")])      # doctest: +SKIP
array([8.1], dtype=float32)
>>> client.rank("how far is the moon", ["Cheese.", "About 384,000 km."])[0].index   # doctest: +SKIP
1
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from jobs.errors import ConfigError
from jobs.run import new_run
from jobs.runs import RunStore
from jobs.runtime.connection import connect
from jobs.runtime.logs import about
from jobs.runtime.settings import Settings, load_settings
from jobs.spec import ScoreSpec
from producer.journal import Journal
from producer.leftovers import Leftovers
from producer.pairs import cut_pairs
from producer.submission import Submission
from producer.window import ScoredTable

if TYPE_CHECKING:
    from producer.pairs import Pairs

COLUMNS = ("query", "passage")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranked:
    """A passage of `Client.rank`: its place in the list given, and its score."""

    index: int
    score: float


class Client:
    """Submits pairs to the workers of one queue. Any number of runs may be under way at once.

    Parameters
    ----------
    redis_url
        ``redis://``, ``rediss://`` or ``unix://``; default: the settings' (``REDIS_URL``).
    settings
        Settings to start from; default: environment, config file and defaults.
    options
        Any setting of ``configs/base.yaml`` by name, such as ``model`` or ``queue``.

    Raises
    ------
    ConfigError
        No server is named, or a setting is unknown or bad.
    ConnectionFailed
        Nobody answers at the URL.
    """

    def __init__(
        self, redis_url: str | None = None, *, settings: Settings | None = None, **options: Any
    ) -> None:
        self.settings = settings or load_settings(options)
        url = redis_url or self.settings.redis_url
        if not url:
            raise ConfigError("no Redis server is named: give redis_url or set REDIS_URL")
        self.store = RunStore(connect(url, self.settings.redis_wait_seconds))
        self._leftovers = Leftovers(self.store)

    def submit(self, pairs: Pairs, *, columns: tuple[str, str] = COLUMNS, **spec: Any) -> ScoringRun:
        """Start scoring; the first chunks are in the queue when this returns.

        Parameters
        ----------
        pairs
            An iterable of ``(query, passage)`` (read as the run goes on, so it may be endless), a
            pandas data frame, or an Arrow table or record batch.
        columns
            Where the texts are in a frame or table.
        spec
            What differs from the client's settings: ``model``, ``revision``, ``precision``,
            ``max_length``, ``activation``.

        Raises
        ------
        InputError
            The columns are not there, or something is no pair of texts.
        ConfigError
            A part of the spec is unknown or bad.
        """
        return self._submit(pairs, columns, math.inf, spec)

    def start(
        self,
        tables: Iterator[pa.Table],
        columns: tuple[str, str],
        *,
        rows: int | None = None,
        on_wait: Callable[[], None] = lambda: None,
        journal: Journal | None = None,
        deadline: float = math.inf,
        **spec: Any,
    ) -> ScoringRun:
        """Like `submit`, for tables that are cut into chunks already.

        `rows` are in all tables, if that is known; `deadline` is when to give up waiting for the server,
        in `time.monotonic` seconds. `on_wait` is called at least every second while
        the run's results are waited for. What is in `journal` is not scored again, and what is
        scored is kept there.
        """
        settings = self.settings
        run = new_run(
            _spec(settings, spec),
            queue=settings.queue,
            ttl=settings.run_ttl,
            max_retries=settings.max_retries,
            rows=rows,
        )
        with about(run=run.id):
            size = "rows as they come" if rows is None else f"{rows} rows"
            logger.info("run begins: %s on queue %r, model %s", size, run.queue, run.spec.model)
        submission = Submission(self.store, run, self._leftovers, tables, columns, settings.window, journal)
        submission.on_wait, submission.deadline = on_wait, deadline
        try:
            if journal:
                journal.begin(run.id)
            submission.begin()
            submission.fill()
        except BaseException:
            submission.cancel()  # something in the input is no pair of texts, or the server is away
            raise
        return ScoringRun(submission)

    def score(
        self,
        pairs: Pairs,
        *,
        timeout: float | None = None,
        columns: tuple[str, str] = COLUMNS,
        **spec: Any,
    ) -> npt.NDArray[np.float32]:
        """Score pairs and wait, `timeout` seconds at most: `submit` and `ScoringRun.scores` in one."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        run = self._submit(pairs, columns, deadline, spec)
        try:
            return run.scores(None if timeout is None else deadline - time.monotonic())
        except BaseException:
            run.cancel()
            raise

    def rank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        top_k: int | None = None,
        timeout: float | None = None,
        **spec: Any,
    ) -> list[Ranked]:
        """Order `passages` by their score with `query`, best first; those without a score last."""
        scores = self.score([(query, passage) for passage in passages], timeout=timeout, **spec)
        order = np.argsort(-scores, kind="stable")[:top_k]
        return [Ranked(int(index), float(scores[index])) for index in order]

    def _submit(
        self, pairs: Pairs, columns: tuple[str, str], deadline: float, spec: dict[str, Any]
    ) -> ScoringRun:
        rows = len(pairs) if isinstance(pairs, Sized) else None
        tables = cut_pairs(pairs, columns, self.settings.chunk_size)
        return self.start(tables, columns, rows=rows, deadline=deadline, **spec)


class ScoringRun:
    """A submission under way. Read it once: whole with `scores`, or piece by piece.

    Chunks beyond the window are submitted while results are being read.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._scores: list[npt.NDArray[np.float32]] = []
        self.errors: dict[int, str] = {}
        """Row (from 0) to reason, of the rows read so far that have no score."""
        self._rows = 0

    @property
    def id(self) -> str:
        """The run's id, as in logs and Redis keys."""
        return self._submission.run.id

    def scores(self, timeout: float | None = None) -> npt.NDArray[np.float32]:
        """Wait for all scores: float32 of shape ``[n]``, NaN for the rows in `errors`.

        Parameters
        ----------
        timeout
            Seconds to wait, at most.

        Raises
        ------
        TimeoutError
            Not all scores are there yet; the run goes on, and may be asked again.
        RunFailed, RunCancelled
            There will be none.
        """
        self._submission.deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            for part in self.tables():
                self._scores.append(part.scores.to_numpy(zero_copy_only=False).astype(np.float32))
        finally:
            self._submission.deadline = math.inf
        return np.concatenate(self._scores) if self._scores else np.zeros(0, np.float32)

    def __iter__(self) -> Iterator[float]:
        """Yield each score in input order as soon as it is there; NaN for rows in `errors`."""
        for part in self.tables():
            for score in part.scores.to_pylist():
                yield math.nan if score is None else score

    def tables(self) -> Iterator[ScoredTable]:
        """Yield the input in order, in tables, each with its scores, errors and statistics."""
        for part in self._submission.tables():
            for row, reason in enumerate(part.errors.to_pylist(), self._rows):
                if reason is not None:
                    self.errors[row] = reason
            self._rows += len(part.table)
            yield part

    def cancel(self) -> None:
        """Give the run up: waiting chunks leave the queue, and its keys are deleted."""
        self._submission.cancel()


def _spec(settings: Settings, changes: dict[str, Any]) -> ScoreSpec:
    try:
        spec = ScoreSpec(**{**settings.spec().model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}") from None
    if spec.model == "demo" or not Path(spec.model).is_dir():
        return spec
    return spec.model_copy(update={"model": str(Path(spec.model).resolve())})  # workers run elsewhere
