"""`Client`, which submits pairs to workers through the queue and returns their scores.

>>> client = Client("redis://localhost:6379/0")                       # doctest: +SKIP
>>> client.score([("how far is the moon", "About 384,000 km.")])      # doctest: +SKIP
array([-1.8], dtype=float32)
>>> client.rank("how far is the moon", ["Cheese.", "About 384,000 km."])[0].index   # doctest: +SKIP
1
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import pyarrow as pa

from rankmill.jobs.contract.errors import ConfigError, InputError, RankmillError
from rankmill.jobs.contract.priority import Priority, Tenant, choose_priority
from rankmill.jobs.contract.run import Run, new_run
from rankmill.jobs.contract.schema import MAX_CHUNK_ROWS, Inputs
from rankmill.jobs.contract.spec import OtherSpecOptions, ScoreSpec, SpecOptions
from rankmill.jobs.model_names import Choice, ModelNames
from rankmill.jobs.protocol.runs import DetachedChunks, RunStore
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.durability import Durability, warn_of_risks
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors
from rankmill.jobs.runtime.settings import Settings, SettingsOptions, load_settings, run_spec
from rankmill.jobs.system import system
from rankmill.producer.client.files import FileHandle, FileRuns, file_request, file_runs
from rankmill.producer.client.joined import rows_by_version, split_run, start_each
from rankmill.producer.client.runs import (
    Classified,
    Ranked,
    Scores,
    ScoringRun,
    cancelled_on_error,
    check_top_k,
    classified,
    ranked,
    read_together,
)
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.detached import expired, submit_detached
from rankmill.producer.collect.driver import RunDriver, collect_detached
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.live import live_run
from rankmill.producer.collect.pairs import COLUMNS, USUAL_COLUMNS, cut_pairs, rows_given
from rankmill.producer.collect.presence import WorkerPresence
from rankmill.producer.collect.scored import EarlierScores
from rankmill.producer.collect.sizing import Sizing, WindowSize
from rankmill.producer.local.embedded import EmbeddedCluster, shared_cluster

if TYPE_CHECKING:
    from rankmill.jobs.contract.file_request import FileRequest
    from rankmill.producer.collect.pairs import Conversations, Pairs, Rows, Texts

    class SubmitOptions(OtherSpecOptions, total=False):
        """The options of `Client.submit` except ``all_labels``, which decides the type of a row's score."""

        texts: Texts | None
        messages: Conversations | None
        columns: tuple[str, ...] | None
        priority: Priority | None
        detached: bool


_DETACHED_ROWS = 256
"""Number of rows in a chunk of a detached run with ``chunk_size: auto``. The number is fixed, because no
producer measures the workers' speed for a detached run.
"""

_SHADOWS = 8
"""A shadow model scores the same rows as a run's own model, but its scores are dropped. Shadow models score
at most this many runs of a client at the same time; further runs are scored only by their own models.
"""

_SHADOW_SECONDS = 300.0

logger = logging.getLogger(__name__)


def settings_of(settings: Settings | None, options: Mapping[str, Any]) -> Settings:
    """Return `settings`, or load them with the values in `options` if `settings` is ``None``.

    Raises `ConfigError` if both `settings` and `options` are given.
    """
    if settings is None:
        return load_settings(options)
    if options:
        raise ConfigError(
            f"{', '.join(options)}: settings are given too; put this into them, or leave them out"
        )
    return settings


class Client:
    """Submits pairs, texts or conversations to the workers of one queue. Any number of runs may go on at the
    same time.

    Threads may share a client. After a fork, parent and child may both use the client, with separate
    connections. Only the process that submitted a run can read it, unless the run is detached.

    Parameters
    ----------
    redis_url
        URL that begins with ``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://``; by default
        `redis_url` of the settings (``REDIS_URL``).
    no_workers_seconds
        A wait for scores ends with `NoWorkers` if no worker has listened on the queue for this many seconds;
        ``None`` means never.
    settings
        All settings, in place of `options`. By default, settings come from the environment, the config file
        and the defaults.
    options
        Values for settings of ``configs/base.yaml`` by name, such as ``model`` or ``queue``.

    Raises
    ------
    ConfigError
        No Redis server is named, a setting is unknown or invalid, or both `settings` and `options` are given.
    ConnectionFailed
        No server answers at the URL.
    """

    _names_class = ModelNames

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        no_workers_seconds: float | None = 60.0,
        settings: Settings | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        self.settings = settings_of(settings, options)
        url = redis_url or self.settings.redis_url
        if not url:
            raise ConfigError("no Redis server is named: give redis_url or set REDIS_URL")
        if "," in self.settings.queue:
            raise ConfigError(f"queue: {self.settings.queue!r:.80} names several; name one queue for a run")
        self.url = url
        self.durability: Durability | None = None
        self.store = self._store_at(url)
        self.store.accountant.know(self.settings.tenant)  # also for runs that other processes have submitted
        self._opened()
        self._names = self._names_class(self.settings)
        self._shadows = system.Semaphore(_SHADOWS)
        self._is_closed = False
        self._cleaner = RunCleaner(self.store)
        self._chunk_rows: dict[str, int] = {}
        self._cluster: EmbeddedCluster | None = None
        self._ends = ExitStack()
        self._no_workers_seconds = no_workers_seconds
        self._presences: dict[str, WorkerPresence] = {}

    @classmethod
    def embedded(cls, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]) -> Client:
        """Make a client that has its own server and workers on this host, for a notebook or a script.

        Server and workers end with `close`, with the ``with`` block, or with this process, even if it is
        killed. The package ``rankmill[worker]`` must be installed. `settings` and `options` are as in the
        constructor; settings of workers, such as ``device``, may be given too.

        Raises
        ------
        ConfigError
            A package is missing, or a setting is unknown or invalid.
        EmbeddedError
            The server does not start. Waits for scores raise this error if server or workers cannot be kept
            alive.
        """
        with ExitStack() as started:
            cluster = started.enter_context(EmbeddedCluster(settings_of(settings, options)))
            return cls._of(cluster, cluster.url(), cluster.settings, started)

    @classmethod
    def _shared(cls, settings: Settings) -> Client:
        """Make a client with a server and workers on this host, like `embedded`. Clients of this process that
        need equal workers share the server and the workers.

        The workers end when the last of these clients is closed, or with this process.
        """
        with ExitStack() as started:
            cluster, url = started.enter_context(shared_cluster(settings))
            return cls._of(cluster, url, settings, started)

    @classmethod
    def _of(cls, cluster: EmbeddedCluster, url: str, settings: Settings, started: ExitStack) -> Client:
        client = cls(url, no_workers_seconds=None, settings=settings)
        client._cluster, client._ends = cluster, started.pop_all()
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; an embedded server and its workers end, unless another client uses them."""
        self._is_closed = True
        self.store.close()
        self._ends.close()

    def _store_at(self, url: str) -> RunStore:
        return RunStore(connect(url, self.settings.redis_wait_seconds))

    def _opened(self) -> None:
        self.note_durability()

    def note_durability(self) -> None:
        """Read how the Redis server stores its data, and warn in the log if it could lose runs."""
        self.durability = self.store.durability()
        warn_of_risks(self.durability, self.url, "every run")

    def _warn_of_losses(self) -> None:
        """Warn in the log if the Redis server could lose a run that is stored only in Redis.

        An embedded server is not checked, because it ends with this process anyway.
        """
        if self._cluster is None:
            warn_of_risks(self.durability, self.url, "only in Redis")

    def sizing(
        self,
        chunk_size: int | None = None,
        journals: Iterable[Journal] = (),
        part_rows: int | None = None,
    ) -> Sizing:
        """Make the `Sizing` of a new run.

        `chunk_size` is the number of rows of a chunk, by default as in the settings; the other parameters are
        those of `Sizing`.
        """
        return Sizing(chunk_size or self.settings.chunk_size, self._chunk_rows, journals, part_rows)

    def start(
        self,
        tables: Iterator[pa.Table],
        columns: tuple[str, ...],
        sizing: Sizing,
        *,
        rows: int | None = None,
        priority: Priority | None = None,
        on_wait: Callable[[], None] = lambda: None,
        journal: Journal | None = None,
        reuse: EarlierScores | None = None,
        deadline: float = math.inf,
        sharers: int = 1,
        tenant: Tenant | None = None,
        row_tokens: bool = False,
        **spec: Unpack[SpecOptions],
    ) -> ScoringRun:
        """Start a run over tables that the caller has cut, one table for each chunk.

        Parameters
        ----------
        tables
            The rows to score.
        columns
            Names of the query and passage columns of the tables, or of the only column.
        sizing
            The sizes by which the tables are cut.
        rows
            Number of rows in all tables, if it is known.
        priority, spec
            As in `submit`.
        on_wait
            Called again and again while the producer waits for results or for the server.
        journal
            Journal that stores the run's results. Chunks whose results it already has are not sent to
            workers.
        reuse
            Scores of an earlier output. Pairs that have a score there are not sent to workers.
        deadline
            When to stop waiting for results or for the server, in `time.monotonic` seconds.
        sharers
            Number of runs that share the limits ``window`` and ``window_mib`` equally.
        tenant
            The run's tenant; by default that of the settings.
        row_tokens
            Whether to ask workers how many tokens each row has.
        """
        settings = self.settings
        run = self._new_run(columns, rows, priority, tenant, **spec)
        with about(run=run.id):
            total = "rows as they come" if rows is None else f"{rows} rows"
            logger.info("run begins: %s on queue %r, model %s", total, run.queue, run.spec.model)
        window = WindowSize(settings.window, settings.window_mib << 20, sharers)
        kept = live_run(self.store, run, self._cleaner, columns, journal, row_tokens=row_tokens)
        driver = RunDriver(kept, tables, sizing, window, reuse)
        driver.deadline, driver.presence = deadline, self.presence(run.queue)

        def look() -> None:
            if self._cluster:
                self._cluster.check()
            on_wait()

        driver.on_wait = look
        try:
            if journal:
                journal.begin(run.id)
            driver.begin()
            driver.fill()
        except BaseException:
            driver.cancel()  # the tables may have failed, for example at an item that is not a pair
            raise
        return ScoringRun(driver)

    def _new_run(
        self,
        columns: tuple[str, ...],
        rows: int | None,
        priority: Priority | None,
        tenant: Tenant | None = None,
        **spec: Unpack[SpecOptions],
    ) -> Run:
        settings = self.settings
        full_spec = run_spec(settings, spec)
        usual = USUAL_COLUMNS[full_spec.inputs]
        if len(columns) != len(usual):
            raise ConfigError(
                f"columns: {', '.join(columns)} do not fit {full_spec.inputs}; name {len(usual)}, such as "
                f"{', '.join(usual)}"
            )
        tenant = tenant or Tenant(settings.tenant, settings.weight)
        self.store.accountant.know(tenant.name)
        return new_run(
            self._names.pinned(full_spec),
            queue=settings.queue,
            ttl=settings.run_ttl,
            max_retries=settings.max_retries,
            rows=rows,
            priority=priority,
            tenant=tenant,
        )

    def score(
        self,
        pairs: Pairs | None = None,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        timeout: float | None = None,
        columns: tuple[str, ...] | None = None,
        priority: Priority | None = None,
        show_progress: bool | None = None,
        **spec: Unpack[SpecOptions],
    ) -> Scores:
        """Score pairs, texts or conversations. Wait at most `timeout` seconds for all scores. Other
        parameters and errors are as in `submit` and `ScoringRun.scores`.

        If the model is an alias for several versions, the row's query (or its single text or conversation)
        decides which version scores the row.

        If the wait ends with any error, the run is cancelled. For a run that should go on, use `submit`.

        Raises
        ------
        RunTimeout, NoWorkers
            Not all scores came in time, or no worker listens on the queue.
        """
        deadline = math.inf if timeout is None else system.monotonic() + timeout
        rows, spec = rows_given(pairs, texts, messages, spec)
        runs: list[ScoringRun] = []
        with cancelled_on_error(runs):
            runs.append(self.begin(rows, columns=columns, priority=priority, deadline=deadline, **spec))
            remaining = None if timeout is None else deadline - system.monotonic()
            return runs[0].scores(remaining, show_progress=show_progress)

    def score_models(
        self,
        pairs: Pairs,
        models: Sequence[str],
        *,
        timeout: float | None = None,
        columns: tuple[str, ...] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> dict[str, Scores]:
        """Score pairs with several models, but read the pairs once. The option ``revision`` applies only to
        the first of `models`. The client's setting ``revision`` applies only to the client's own model. Other
        parameters and errors are as in `Client.score`.

        Returns
        -------
        The scores of each model, by its name.

        Raises
        ------
        ConfigError
            A model is named twice, or no model is named.
        InputError
            The rows are not valid (see `submit`), or a model is an alias for several versions.
        RunTimeout, NoWorkers
            Not all scores came in time, or no worker listens on the queue; all runs are then cancelled.
        """
        if not models or len(set(models)) < len(models):
            raise ConfigError(f"models: name at least one, and each once, not {', '.join(models) or 'none'}")

        deadline = math.inf if timeout is None else system.monotonic() + timeout
        sizing = self.sizing()
        tables = cut_pairs(pairs, columns, sizing)
        runs: list[ScoringRun] = []
        with cancelled_on_error(runs):
            usual = {self.settings.model: self.settings.revision}
            own = [{"model": model, "revision": usual.get(model)} for model in models]
            if "revision" in spec:
                own[0]["revision"] = spec["revision"]
            options: dict[str, Any] = {
                **spec, "rows": _rows(pairs), "priority": priority, "deadline": deadline,
            }  # fmt: skip
            runs += start_each(self.start, own, tables, columns, sizing, **options)
            remaining = None if timeout is None else deadline - system.monotonic()
            return dict(zip(models, read_together(runs, remaining), strict=True))

    def rank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        top_k: int | None = None,
        timeout: float | None = None,
        **spec: Unpack[SpecOptions],
    ) -> list[Ranked]:
        """Score each of `passages` with `query`, and return the best `top_k` of them (default: all), best
        first. Passages without a score come last. Other parameters and errors are as in `score`.

        Raises `InputError` if `passages` is one string. Raises `ConfigError` if `top_k` is not a positive
        whole number, or if a passage has several scores.
        """
        if isinstance(passages, str):  # each character would be scored as a passage
            raise InputError(f"passages are one string, {passages!r:.80}; give a list of them")
        check_top_k(top_k)
        scores = self.score([(query, passage) for passage in passages], timeout=timeout, **spec)
        return ranked(scores, top_k)

    def classify(
        self, texts: Texts, *, timeout: float | None = None, **spec: Unpack[SpecOptions]
    ) -> list[Classified]:
        """Score texts, and return for each text the most likely label and the probabilities of all labels.
        Other parameters and errors are as in `score`.

        Usually, the probabilities are the softmax of the model's outputs, or the sigmoid of its only output.
        But several labels may be right at once if the model's config says ``multi_label_classification``, or
        with ``activation="sigmoid"``. Each probability is then the sigmoid of its own output.
        """
        options: SpecOptions = {"activation": "probability", "all_labels": True, **spec}
        return classified(self.score(texts=texts, timeout=timeout, **options))

    @overload
    def submit(
        self,
        pairs: Pairs | None = None,
        *,
        all_labels: Literal[False] = False,
        **options: Unpack[SubmitOptions],
    ) -> ScoringRun[float]: ...

    @overload
    def submit(
        self, pairs: Pairs | None = None, *, all_labels: Literal[True], **options: Unpack[SubmitOptions]
    ) -> ScoringRun[list[float]]: ...

    @overload
    def submit(
        self, pairs: Pairs | None = None, *, all_labels: bool, **options: Unpack[SubmitOptions]
    ) -> ScoringRun[Any]: ...

    def submit(
        self,
        pairs: Pairs | None = None,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        columns: tuple[str, ...] | None = None,
        priority: Priority | None = None,
        detached: bool = False,
        **spec: Unpack[SpecOptions],
    ) -> ScoringRun[Any]:
        """Start a run; its first chunks are in the queue when this returns.

        Parameters
        ----------
        pairs
            An iterable of ``(query, passage)`` or of dicts, an array of shape ``[n, 2]``, or a table of
            Arrow, pandas, Hugging Face's datasets or anything with Arrow's stream interface (Polars, DuckDB,
            a reader). A stream is read while the run goes on, so it may be endless. A stream or generator is
            closed when the run ends, fails or is cancelled.
        texts, messages
            Rows in place of pairs, for models that score a single text (strings) or a conversation (lists of
            ``{role, content}``); a table is possible too.
        columns
            Names of the query and passage columns of a table, or of the keys of dicts; for texts and messages
            a single name. By default ``query`` and ``passage``, ``text``, or ``messages``.
        priority
            Chunks of a ``request`` come before those of ``bulk`` runs, in queues and in workers. By default a
            run is a ``request`` for up to 256 rows, and ``bulk`` for more or an unknown number.
        detached
            Put all rows into Redis before this call returns, so that the run no longer needs this process.
            Any process can fetch the scores with `attach`, until `run_ttl` seconds after this call.
        spec
            Fields of `ScoreSpec`, such as ``model``, that replace the client's settings for this run. With a
            ``model`` that is not the one of the settings, the setting ``revision`` is not used.

        Raises
        ------
        InputError
            No kind of rows is given, or more than one; a column does not exist; an item is not a row of its
            kind; or the model is an alias for several versions. Or the run is detached, and has no rows, or
            rows that need more than `window_mib`.
        ConfigError
            The priority or a part of the spec is unknown or invalid, or `columns` are too many or too few.
        RedisUnavailable, RedisFailed
            The server could not serve for as long as a command may wait, or it refuses a command.
        """
        rows, spec = rows_given(pairs, texts, messages, spec)
        if not detached:
            return self._start(rows, columns, priority=priority, **spec)
        self._warn_of_losses()
        settings = self.settings
        inputs, columns = self._kind(columns, spec)
        run = self._new_run(columns, _rows(rows), priority, **spec)
        size = _DETACHED_ROWS if settings.chunk_size == "auto" else settings.chunk_size
        tables = cut_pairs(rows, columns, Sizing(size), inputs)
        return self._attached(
            run, submit_detached(self.store, run, tables, columns, settings.window_mib << 20)
        )

    def attach(self, run_id: str) -> FileHandle | ScoringRun:
        """Find a run of files, or a detached run of pairs. Any process may have submitted the run.

        Raises
        ------
        RunExpired
            A run with this id does not exist, or no longer exists.
        """
        files = file_runs(self.store, self.settings)
        with redis_errors():
            if files and (submitted := files.attach(run_id)):
                return submitted
            run, chunks = self.store.load(run_id), self.store.detached_chunks(run_id)
        if run is None or chunks is None:
            raise expired(run_id, self.settings.run_ttl)
        return self._attached(run, chunks)

    def _attached(self, run: Run, chunks: DetachedChunks) -> ScoringRun:
        driver = collect_detached(self.store, run, chunks)
        driver.presence = self.presence(run.queue)
        return ScoringRun(driver)

    def presence(self, queue: str) -> WorkerPresence:
        """Return the object that watches the workers of `queue` for all runs of this client."""
        new = WorkerPresence(self.store, self.url, queue, self._no_workers_seconds)
        return self._presences.setdefault(queue, new)

    @property
    def files(self) -> FileRuns:
        """The object that submits files to runners, and finds files that were submitted to this server.

        Raises
        ------
        ConfigError
            No installed extension carries out runs of files.
        """
        files = file_runs(self.store, self.settings)
        if files is None:
            raise ConfigError("files are submitted to runners, an extension that is not installed here")
        return files

    def submit_file(
        self, inputs: str | Sequence[str], output: str, *, webhook: str | None = None, **options: Any
    ) -> FileHandle:
        """Hand files to runners (``rankmill runner``), which score them even if this process ends.

        Parameters
        ----------
        inputs, output
            As in score-file, but the paths are paths on the runners' hosts, not on this one.
        webhook
            URL that a runner calls when the run has ended.
        options
            Options of score-file by name, such as ``top_k`` or ``score_column``, and fields of `ScoreSpec`.

        Returns
        -------
        The run's handle, a `rankmill.SubmittedFile`.

        Raises
        ------
        ConfigError
            An option is unknown or not valid, or no installed extension carries out runs of files.
        InputError
            The files cannot be scored as requested.
        """
        spec = {name: options.pop(name) for name in list(options) if name in ScoreSpec.model_fields}
        request = file_request(inputs, output, options).at_home()
        return self.submit_request(request, webhook=webhook, **spec)

    def submit_request(
        self, request: FileRequest, *, webhook: str | None = None, **spec: Unpack[SpecOptions]
    ) -> FileHandle:
        """Submit the files that `request` names to runners, and return the run's handle.

        The paths in `request` must be absolute, as `FileRequest.at_home` makes them. The other parameters are
        those of `submit_file`.
        """
        files = self.files
        self._warn_of_losses()
        if request.models:  # score columns are named after the models, so the runner resolves aliases
            asked = run_spec(self.settings, {**spec, "model": request.models[0]})
        else:
            asked = self._names.pinned(run_spec(self.settings, spec))
        return files.submit(request, asked, self.settings, webhook)

    def _kind(
        self, columns: tuple[str, ...] | None, spec: Mapping[str, Any]
    ) -> tuple[Inputs, tuple[str, ...]]:
        inputs: Inputs = spec.get("inputs", self.settings.inputs)
        return inputs, columns or USUAL_COLUMNS.get(inputs, COLUMNS)

    def begin(
        self,
        pairs: Rows,
        *,
        columns: tuple[str, ...] | None = None,
        priority: Priority | None = None,
        deadline: float = math.inf,
        tenant: Tenant | None = None,
        **spec: Unpack[SpecOptions],
    ) -> ScoringRun:
        """Start a run of `pairs`, whose model may be an alias for one or several versions.

        The parameters are those of `submit` and `start`.
        """
        named = str(spec.get("model", self.settings.model))
        choice = self._names.choice(named)
        options: dict[str, Any] = {**spec, "priority": priority, "deadline": deadline, "tenant": tenant}
        if choice and named == self.settings.model:
            options.setdefault("revision", self.settings.revision)
        if choice and not choice.only:
            return self._start_split(choice, pairs, columns, **options)
        if choice:  # choose now, because the alias may soon stand for another version
            options["model"] = choice.only
        return self._start(pairs, columns, **options)

    def _start(
        self,
        pairs: Rows,
        columns: tuple[str, ...] | None,
        *,
        chunk_size: int | None = None,
        **options: Any,
    ) -> ScoringRun:
        """Start a run of `pairs` with one model, in chunks of `chunk_size` rows. The `options` are those of
        `start`.
        """
        inputs, columns = self._kind(columns, options)
        sizing, rows = self.sizing(chunk_size), _rows(pairs)
        tables = cut_pairs(pairs, columns, sizing, inputs)
        return self.start(tables, columns, sizing, rows=rows, **options)

    def _start_split(
        self,
        choice: Choice,
        pairs: Rows,
        columns: tuple[str, ...] | None,
        *,
        priority: Priority | None,
        deadline: float,
        tenant: Tenant | None,
        **spec: Any,
    ) -> ScoringRun:
        """Divide the rows of `pairs` among the versions of the alias `choice`, and start a run for each
        version that gets rows. Returns one handle for all these runs.

        If the alias has a shadow model, the shadow model also scores the rows, and these scores are dropped.
        Rows that ask for tokens do not go to the shadow model.
        """
        inputs, columns = self._kind(columns, spec)
        tables = [*cut_pairs(pairs, columns, Sizing(MAX_CHUNK_ROWS), inputs)]
        texts = {name: [text for part in tables for text in part[name].to_pylist()] for name in columns}
        # `take` does not support all types of text that callers give; Polars has such types
        table = pa.table({name: pa.array(column, pa.large_string()) for name, column in texts.items()})
        rows = rows_by_version(choice.name, choice.shares, texts[columns[0]])
        options = {
            **spec, "priority": choose_priority(priority, len(table)), "deadline": deadline, "tenant": tenant,
        }  # fmt: skip
        runs: list[ScoringRun] = []
        with cancelled_on_error(runs):
            for options["model"], numbers in rows.items():
                runs.append(self._start(table.take(numbers), columns, **options))
        if choice.shadow and tables and inputs != "tokens":
            self._start_shadow(table, columns, **{**spec, "model": choice.shadow})
        return split_run(table, [*rows.values()], runs)

    def _start_shadow(self, table: pa.Table, columns: tuple[str, ...], *, model: str, **spec: Any) -> None:
        """Score the pairs of `table` with a shadow model in the background, and drop the scores.

        Do nothing if shadow models are already scoring `_SHADOWS` runs of this client.
        """
        if not self._shadows.acquire(blocking=False):
            logger.debug("%s has enough to do: a run is not scored in the shadow", model)
            return

        def score() -> None:
            try:
                self.score(
                    table, columns=columns, timeout=_SHADOW_SECONDS, priority="bulk", model=model,
                    show_progress=False, **spec,
                )  # fmt: skip
            except Exception as error:
                if self._is_closed:  # redis-py raises errors of several types for a closed connection
                    logger.debug("%s did not end in the shadow: the client was closed", model)
                elif isinstance(error, RankmillError):
                    logger.warning("%s could not score in the shadow: %s", model, error)
                else:
                    raise
            finally:
                self._shadows.release()

        self.store.later(score)


def _rows(pairs: Rows) -> int | None:
    """Return the number of rows of `pairs`, or ``None`` if it is not known.

    Do not ask a DuckDB relation for its length: DuckDB would run the whole query to count the rows.
    """
    with suppress(TypeError):  # `len` of a progress bar around a generator raises this
        return len(pairs) if isinstance(pairs, Sized) and not hasattr(pairs, "fetchone") else None
    return None
