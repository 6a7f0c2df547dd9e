"""How a `Client` submits runs, and what it can do with those that outlive it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec, SpecOptions
from rankmill.jobs.runtime.patience import redis_errors
from rankmill.jobs.runtime.specs import run_spec
from rankmill.producer.client.runs.detached import DetachedRun, attach_detached, submit_detached
from rankmill.producer.client.submitted.file import SubmittedFile, file_request, submit_file, submitted_files
from rankmill.producer.collect.pairs import COLUMNS, cut_pairs

if TYPE_CHECKING:
    from rankmill.jobs.contract.priority import Priority
    from rankmill.jobs.protocol.runs import RunStore
    from rankmill.jobs.protocol.submitted.request import FileRequest
    from rankmill.jobs.protocol.submitted.store import FileRunStore
    from rankmill.jobs.registry.resolver import Resolver
    from rankmill.jobs.runtime.settings import Settings
    from rankmill.producer.client.runs.scoring_run import ScoringRun
    from rankmill.producer.collect.listeners import Listeners
    from rankmill.producer.collect.pairs import Pairs


_DETACHED_ROWS = 256
"""Rows in a chunk of a detached run with ``chunk_size: auto``: nobody sees the workers' speed."""


class SubmittedRuns:
    """The part of `rankmill.producer.client.client.Client` that submits, and finds runs that outlive it."""

    settings: Settings
    store: RunStore
    _resolver: Resolver
    _listeners: Listeners | None

    @abstractmethod
    def run_of(self, pairs: Pairs, columns: tuple[str, str], **options: Any) -> ScoringRun:
        """Start a run of `pairs` that this process feeds."""

    @property
    def files(self) -> FileRunStore:
        """The submitted runs of files on the server."""
        return submitted_files(self.store.redis, self.settings)

    def submit_file(
        self, inputs: str | Sequence[str], output: str, *, webhook: str | None = None, **options: Any
    ) -> SubmittedFile:
        """Hand files to runners (``rankmill runner``), which score them whatever becomes of this process.

        Parameters
        ----------
        inputs, output
            As of score-file: paths on hosts where runners are, which need not see this process's files.
        webhook
            URL that a runner calls at the end.
        options
            Options of score-file by name, such as ``top_k`` or ``score_column``, and fields of `ScoreSpec`.

        Raises
        ------
        ConfigError
            An option is unknown or not valid.
        """
        spec = {name: options.pop(name) for name in list(options) if name in ScoreSpec.model_fields}
        return self.submit_request(file_request(inputs, output, options), webhook=webhook, **spec)

    def submit_request(
        self, request: FileRequest, *, webhook: str | None = None, **spec: Any
    ) -> SubmittedFile:
        """`submit_file`, for a request that is made already."""
        return submit_file(
            self.files, request, self._resolver.pinned(run_spec(self.settings, spec)), self.settings, webhook
        )

    def attach(self, run_id: str) -> SubmittedFile | DetachedRun:
        """A run that any process has submitted: of files, or of pairs that are detached.

        Raises
        ------
        RunExpired
            There is none with this id, or not any more.
        """
        files = self.files
        with redis_errors():
            if files.has(run_id):
                return SubmittedFile(files, run_id)
        return attach_detached(self.store, run_id, self.settings.run_ttl, self._listeners)

    @overload
    def submit(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        detached: Literal[True],
        **spec: Unpack[SpecOptions],
    ) -> DetachedRun: ...

    @overload
    def submit(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> ScoringRun: ...

    def submit(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        detached: bool = False,
        **spec: Unpack[SpecOptions],
    ) -> ScoringRun | DetachedRun:
        """Start a run; its first chunks are in the queue when this returns.

        Parameters
        ----------
        pairs
            An iterable of ``(query, passage)``, a pandas data frame, an Arrow table or an Arrow record
            batch. An iterable is read while the run goes on, so it may be endless.
        columns
            Names of the query and passage columns in a data frame or table.
        priority
            ``request``: the run's chunks come before those of bulk runs, in queues and in workers. ``bulk``:
            they come after. Default: ``request`` for up to 256 pairs, ``bulk`` for more or an unknown number.
        detached
            Put all pairs into Redis at once: the run needs this process no more. Any process fetches the
            scores with `attach`, until `run_ttl` seconds after this call.
        spec
            Fields of `ScoreSpec`, such as ``model``, that replace the client's settings for this run.

        Raises
        ------
        InputError
            A column does not exist, or an item is not a pair of texts. Of a detached run also: there are no
            pairs, or they need more than `window_mib`.
        ConfigError
            The priority or a part of the spec is unknown or invalid.
        """
        if not detached:
            return self.run_of(pairs, columns, priority=priority, **spec)
        settings = self.settings
        run = new_run(
            self._resolver.pinned(run_spec(settings, spec)),
            queue=settings.queue,
            ttl=settings.run_ttl,
            max_retries=settings.max_retries,
            rows=len(pairs) if isinstance(pairs, Sized) else None,
            priority=priority,
        )
        size = _DETACHED_ROWS if settings.chunk_size == "auto" else settings.chunk_size
        tables = cut_pairs(pairs, columns, lambda start: size)
        chunks = submit_detached(self.store, run, tables, columns, settings.window_mib << 20)
        return DetachedRun(self.store, run, chunks, self._listeners)
