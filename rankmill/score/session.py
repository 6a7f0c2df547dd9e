"""A scoring session: a client of a running server, or of a server and workers that the session starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import ConnectionFailed, InputError, RankmillError
from rankmill.jobs.contract.results import ChunkStats
from rankmill.jobs.model_names import ModelNames
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.client.joined import start_several
from rankmill.producer.client.runs import Scores, ScoringRun, as_array
from rankmill.producer.client.sync_client import Client
from rankmill.producer.collect.pairs import USUAL_COLUMNS, cut_pairs
from rankmill.producer.collect.presence import WorkerPresence
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.local.embedded import EmbeddedCluster


@dataclass(frozen=True)
class RunScores:
    """The scores of a run.

    Attributes
    ----------
    scores
        Float32 ``[n]``, with NaN for rows without a score.
    seconds
        How long the run took.
    stats
        Statistics of each chunk.
    workers
        Names of the workers that made the last attempts at the chunks.
    """

    scores: npt.NDArray[np.float32]
    seconds: float
    stats: tuple[ChunkStats, ...]
    workers: frozenset[str]


class Session:
    """Scores tables on the server that the settings name, or else on an embedded server with embedded
    workers.

    Use the session as a context manager. Entering does not wait for a server; `client` waits until it is
    ready.

    Parameters
    ----------
    settings
        The settings: the server, the model, and what embedded workers need.
    cluster
        An `EmbeddedCluster` whose ``with`` block has begun. By default, if the settings do not name a server,
        the session starts one of its own.

    Attributes
    ----------
    embedded
        The embedded server and workers; ``None`` if the settings name a server.

    Raises
    ------
    EmbeddedError
        Raised by every method that waits: the embedded server or its workers cannot be kept alive.
    """

    def __init__(self, settings: Settings, cluster: EmbeddedCluster | None = None) -> None:
        # The model's alias in a registry is resolved once, so that the session uses one model even if the
        # alias is moved meanwhile.
        names = ModelNames(settings)
        settings = settings.model_copy(update={"model": names.pin(settings.model)})
        self._settings = settings
        self.embedded = None if settings.redis_url else cluster or EmbeddedCluster(settings)
        self._own = None if cluster else self.embedded

    def __enter__(self) -> Session:
        if self._own:
            self._own.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own:
            self._own.__exit__(kind, error, trace)

    @cached_property
    def client(self) -> Client:
        """The client of the session's server; the first access connects, and waits until an embedded server
        is ready.

        Raises
        ------
        ConnectionFailed
            No server answers.
        """
        if self.embedded:
            return Client(self.embedded.url(), no_workers_seconds=None, settings=self._settings)
        try:
            return Client(no_workers_seconds=math.inf, settings=self._settings)
        except ConnectionFailed as error:
            error.add_note("leave --redis and REDIS_URL out to start an embedded server")
            raise

    @cached_property
    def watch(self) -> WorkerPresence:
        return self.client.presence(self._settings.queue)

    @contextmanager
    def run(
        self,
        tables: Iterator[pa.Table],
        columns: tuple[str, ...],
        sizing: Sizing,
        *,
        on_wait: Callable[[], None] = lambda: None,
        models: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Iterator[ScoringRun]:
        """Start a run that scores the `tables`; with several `models`, start a run for each model. An error
        inside the ``with`` block cancels these runs.

        While results are awaited, the session watches the workers, and calls `on_wait`. The other parameters
        are those of `Client.start` and `start_several`.
        """

        def look() -> None:
            if self.embedded:
                self.embedded.check()
            self.watch.look()
            on_wait()

        start = partial(start_several, self.client.start, models) if models else self.client.start
        run = start(tables, columns, sizing, on_wait=look, **options)
        try:
            yield run
        except BaseException:
            with suppress(RankmillError):  # if the server has failed, cancelling fails too
                run.cancel()
            raise

    def labels(self, **options: Any) -> tuple[str, ...]:
        """Return the names of the model's outputs, such as ``("contradiction", "entailment")``; empty for a
        single output.

        A worker scores a test row to find the names. `options` are passed to `score`.

        Raises
        ------
        InputError
            No worker could score the test row.
        """
        inputs = self._settings.inputs
        columns = USUAL_COLUMNS[inputs]
        text = '[{"role": "user", "content": "a"}]' if inputs == "conversations" else "a"
        row = pa.table({name: [text] for name in columns})
        scored = self.score(row, columns, all_labels=True, **options)
        if not scored.stats:
            raise InputError(
                "no worker could score a pair, so the model's labels are not known; leave out --all-labels"
            )
        return scored.stats[0].labels

    def score(
        self, table: pa.Table, columns: tuple[str, ...], *, chunk_size: int | None = None, **options: Any
    ) -> RunScores:
        """Score a table as one run, and wait for its scores.

        Parameters
        ----------
        table, columns
            The rows, and the names of the columns with their texts.
        chunk_size
            A chunk has at most this many rows; the default is the setting ``chunk_size``.
        options
            Passed to `run`.

        Raises
        ------
        RunFailed
            The workers refuse the model, the precision or the backend.
        """
        started = time.perf_counter()
        inputs = options.get("inputs", self._settings.inputs)
        sizing = self.client.sizing(chunk_size)
        tables = cut_pairs(table, columns, sizing, inputs)
        options.setdefault("all_labels", False)  # callers expect one score in each row
        with self.run(tables, columns, sizing, rows=len(table), **options) as run:
            parts = list(run.tables())
        seconds = time.perf_counter() - started
        return RunScores(
            Scores.of([as_array(part.scores) for part in parts], {}),
            seconds,
            tuple(part.stats for part in parts if part.stats),
            frozenset(part.worker for part in parts),
        )
