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
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

import pyarrow as pa

from rankmill.jobs.contract.errors import ConfigError, InputError, StillWaiting
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import SpecOptions
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.registry.resolver import Resolver
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.jobs.runtime.specs import run_spec
from rankmill.producer.client.runs.scores import Ranked, Scores, ranked
from rankmill.producer.client.runs.scoring_run import ScoringRun
from rankmill.producer.client.runs.several import start_several
from rankmill.producer.client.runs.split import AnyRun, SplitScorer
from rankmill.producer.client.submitted.methods import SubmittedRuns
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.leftovers import Leftovers
from rankmill.producer.collect.listeners import Listeners
from rankmill.producer.collect.pairs import COLUMNS, RowsAt, cut_pairs
from rankmill.producer.collect.reuse.earlier import EarlierScores
from rankmill.producer.collect.sizing import MIN_ROWS, REQUEST_ROWS, ChunkSize, Sizes, WindowSize
from rankmill.producer.collect.submission import Submission
from rankmill.producer.local.embedded import EmbeddedCluster

if TYPE_CHECKING:
    from rankmill.producer.collect.pairs import Pairs

logger = logging.getLogger(__name__)


class Client(SubmittedRuns):
    """Submits pairs to the workers of one queue. A client may have any number of runs at the same time.

    Threads may share it. After a fork, parent and child may both go on using it, each with connections of its
    own; a run belongs to the process that has submitted it.

    Parameters
    ----------
    redis_url
        URL that begins with ``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://``; default:
        `redis_url` of the settings (``REDIS_URL``).
    no_workers_seconds
        A wait for scores ends with `NoWorkers` when no worker has listened on the queue for so long;
        ``None``: never.
    settings
        Settings to start from; default: environment, config file and defaults.
    options
        Values for settings of ``configs/base.yaml`` by name, such as ``model`` or ``queue``.

    Raises
    ------
    ConfigError
        No Redis server is named, or a setting is unknown or invalid.
    ConnectionFailed
        No server answers at the URL.
    """

    _resolver_class = Resolver

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        no_workers_seconds: float | None = 60.0,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        self.settings = settings or load_settings(options)
        url = redis_url or self.settings.redis_url
        if not url:
            raise ConfigError("no Redis server is named: give redis_url or set REDIS_URL")
        if "," in self.settings.queue:
            raise ConfigError(f"queue: {self.settings.queue!r:.80} are several; a run goes to one queue")
        self.store = self._connect(url)
        self._resolver = self._resolver_class(self.settings.registry)
        self._split = SplitScorer(self)
        self._leftovers = Leftovers(self.store)
        self._chunk_rows: dict[str, int] = {}
        self._cluster: EmbeddedCluster | None = None
        self._ends = ExitStack()
        self._listeners: Listeners | None = None
        if no_workers_seconds is not None:
            self._listeners = Listeners(self.store, url, self.settings.queue, no_workers_seconds)

    @classmethod
    def embedded(cls, *, settings: Settings | None = None, **options: Any) -> Client:
        """A client with a server and workers of its own on this host, for a notebook or a script.

        They end with `close`, the ``with`` block, or this process, even if it is killed. It needs
        ``rankmill[worker]``. Parameters are the constructor's; also settings of workers, such as ``device``.

        Raises
        ------
        ConfigError
            A package is missing, or a setting is unknown or invalid.
        EmbeddedError
            The server does not start; also from all waits for scores: server or workers cannot be kept alive.
        """
        cluster = EmbeddedCluster(settings or load_settings(options))
        with ExitStack() as started:
            started.enter_context(cluster)
            client = cls(cluster.url(), no_workers_seconds=None, settings=cluster.settings)
            client._cluster, client._ends = cluster, started.pop_all()
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the embedded server and workers, if any."""
        self.store.redis.close()
        self._ends.close()

    def _connect(self, url: str) -> RunStore:
        return RunStore(connect(url, self.settings.redis_wait_seconds))

    def start(
        self,
        cut: Callable[[RowsAt], Iterator[pa.Table]],
        columns: tuple[str, str],
        *,
        chunk_size: int | None = None,
        rows: int | None = None,
        priority: Priority | None = None,
        on_wait: Callable[[], None] = lambda: None,
        journal: Journal | None = None,
        reuse: EarlierScores | None = None,
        deadline: float = math.inf,
        sharers: int = 1,
        **spec: Unpack[SpecOptions],
    ) -> ScoringRun:
        """Like `submit`, for tables that the caller cuts.

        Parameters
        ----------
        cut, columns
            Returns tables to score, one chunk each; the names of their query and passage columns.
        chunk_size
            Most rows in a chunk; default: the setting.
        rows
            Number of rows in all tables, if it is known.
        priority, spec
            As for `submit`.
        on_wait
            Called at least every second while the producer waits for results.
        journal, reuse
            Stores the results; scores of an earlier output. Chunks and pairs that they have are not scored.
        deadline, sharers
            When to stop waiting for the server, in `time.monotonic` seconds; as of `WindowSize`.
        """
        settings = self.settings
        run = new_run(
            self._resolver.pinned(run_spec(settings, spec)),
            queue=settings.queue,
            ttl=settings.run_ttl,
            max_retries=settings.max_retries,
            rows=rows,
            priority=priority,
        )
        with about(run=run.id):
            total = "rows as they come" if rows is None else f"{rows} rows"
            logger.info("run begins: %s on queue %r, model %s", total, run.queue, run.spec.model)
        window = WindowSize(settings.window, settings.window_mib << 20, sharers)
        least = REQUEST_ROWS if run.priority == "request" else MIN_ROWS
        most = chunk_size or settings.chunk_size
        chunks = ChunkSize(most, run.spec.model, journal, self._chunk_rows, least)
        sizes, tables = Sizes(window, chunks), cut(chunks.at)
        submission = Submission(self.store, run, self._leftovers, tables, columns, sizes, journal, reuse)
        submission.deadline = deadline

        def look() -> None:
            if self._cluster:
                self._cluster.check()
            on_wait()

        submission.on_wait = look
        submission.listeners = self._listeners
        try:
            if journal:
                journal.begin(run.id)
            submission.begin()
            submission.fill()
        except BaseException:
            submission.cancel()  # for example: an item is not a pair of texts, or Redis is not reachable
            raise
        return ScoringRun(submission)

    def score(
        self,
        pairs: Pairs,
        *,
        timeout: float | None = None,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> Scores:
        """Score pairs and wait at most `timeout` seconds: `submit`, then `ScoringRun.scores`.

        If the model is an alias for several versions, the query decides which of them scores a pair.

        Whatever keeps the scores from coming, the run is cancelled then; one that is to go on is started with
        `submit`.

        Raises
        ------
        RunTimeout, NoWorkers
            Not all scores came in time, or nobody listens on the queue.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            run = self.begin(pairs, columns=columns, priority=priority, deadline=deadline, **spec)
            try:
                return run.scores(None if timeout is None else deadline - time.monotonic())
            except BaseException:
                run.cancel()
                raise
        except StillWaiting as error:
            raise error.of_a_cancelled_run() from None

    def score_models(
        self,
        pairs: Pairs,
        models: Sequence[str],
        *,
        timeout: float | None = None,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> dict[str, Scores]:
        """Score pairs with several models, reading them once; parameters as of `Client.score`.

        Returns
        -------
        The scores of each model, by its name.

        Raises
        ------
        ConfigError
            A model is named twice, or none is.
        RunTimeout, NoWorkers
            Not all scores came in time, or nobody listens on the queue. All runs are cancelled then.
        """
        if not models or len(set(models)) < len(models):
            raise ConfigError(f"models: name each once, not {', '.join(models) or 'none'}")

        def cut(rows_at: RowsAt) -> Iterator[pa.Table]:
            return cut_pairs(pairs, columns, rows_at)

        run = start_several(self, models, cut, columns, priority=priority, **spec)
        try:
            return dict(zip(models, run.scores(timeout), strict=True))
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
        **spec: Unpack[SpecOptions],
    ) -> list[Ranked]:
        """Order `passages` by their score with `query`, best first, those without one last; as `score`."""
        if isinstance(passages, str):  # its characters would be the passages
            raise InputError(f"passages are one string, {passages!r:.80}; give a list of them")
        scores = self.score([(query, passage) for passage in passages], timeout=timeout, **spec)
        return ranked(scores, top_k)

    def begin(self, pairs: Pairs, *, columns: tuple[str, str] = COLUMNS, **options: Any) -> AnyRun:
        """As `submit` (or `start`, with `deadline`), also for an alias for several versions."""
        choice = self._resolver.choice(str(options.get("model", self.settings.model)))
        if choice is None or choice.only:
            return self.run_of(pairs, columns, **options)
        return self._split.start(choice, pairs, columns, **options)

    def run_of(self, pairs: Pairs, columns: tuple[str, str], **options: Any) -> ScoringRun:
        """Start a run of `pairs`; `options` as of `start`."""
        rows = len(pairs) if isinstance(pairs, Sized) else None
        cut = partial(cut_pairs, pairs, columns)
        return self.start(cut, columns, rows=rows, **options)
