"""score-file: from the input's files to the scored file, through the queue."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

from jobs.errors import InputError, RunFailed, WireError
from jobs.results import ChunkScores
from jobs.run import Progress, Run
from jobs.runtime.settings import Settings
from jobs.store.runs import RunStore
from jobs.wire import decode_pairs
from producer.client import ScoringRun
from producer.files.inputs import InputFile, find_files, stem
from producer.files.manifest import fingerprint, manifest
from producer.files.readers import TextColumns
from producer.files.sink import ScoredFile, check_target
from producer.files.source import Source, open_source
from producer.files.workspace import Workspace
from producer.journal import OLD_CHUNK_SIZE
from producer.splitting import ScoredTable
from producer.window import FIRST_PIECE
from rankmill.progress import ProgressView, progress_view
from rankmill.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """Options of the command line that are not settings."""

    inputs: Sequence[str]
    output: str | None
    columns: TextColumns
    score_column: str
    text_columns: Sequence[str]
    allow_nulls: bool
    force: bool
    restart: bool
    quiet: bool


@dataclass(frozen=True)
class Summary:
    """Result of the command, as printed with ``--json``.

    ``resumed_rows`` of the ``rows`` were scored by earlier, interrupted runs of the command;
    ``seconds`` and ``pairs_per_second`` do not count them. ``startup_seconds`` is the time until the
    first worker was ready; ``pairs_per_second`` excludes it. ``real_token_share`` is the share of the
    computed tokens that were not padding. ``int8_gain`` is the speed of int8 divided by the speed of
    the precision used, if workers have measured it.
    """

    output: str
    rows: int
    resumed_rows: int
    row_errors: int
    errors_file: str | None
    seconds: float
    startup_seconds: float
    pairs_per_second: float
    real_token_share: float
    retries: int
    model: str
    revision: str | None
    backend: str
    device: str
    precision: str
    int8_gain: float | None


def score_file(request: Request, settings: Settings) -> Summary:
    """Score the files of `request` into one output file; resume an interrupted run of the same request.

    Raises
    ------
    InputError, ConfigError, ConnectionFailed
        No row was scored; the message says what to change.
    RunFailed, EmbeddedError, OutputError
        The run cannot be finished; no output was written. The scores computed so far are stored,
        and the same request resumes from them.
    InputChanged
        The input changed during the run; no output was written, and the scores are dropped.
    """
    started = time.monotonic()
    files = find_files(request.inputs, request.output)
    target = output_path(request, files)
    check_target(target)
    if target.resolve() in {file.path.resolve() for file in files}:
        raise InputError(f"{target} is the input itself; name another output with -o")
    fingerprints = [fingerprint(file.path) for file in files]
    made_from = manifest(files, fingerprints, settings.model, _options(request, settings))
    with ExitStack() as stack:
        work = stack.enter_context(Workspace(target, made_from, restart=request.restart, force=request.force))
        session = stack.enter_context(Session(settings))  # workers start while the files are opened
        source = open_source(
            files,
            request.columns,
            allow_nulls=request.allow_nulls,
            as_text=request.text_columns,
            fingerprints=fingerprints,
        )
        logger.debug("%s rows in %d files", f"{source.rows:,}", len(files))
        output = stack.enter_context(ScoredFile(target, work.folder, source.schema, request.score_column))
        where = "an embedded server" if session.embedded else "--redis"
        logger.debug("run on queue %r of %s", settings.queue, where)
        tally = _Tally()
        startup = 0.0
        if source.rows:
            with progress_view(source.rows, quiet=request.quiet) as view:
                _score(session, source, output, work, view, tally)
            startup = session.watch.since(started)
        output.finish(_metadata(settings, tally))
        source.check_unchanged()
        work.journal.seal(output.partial)
        output.publish()
    return _summary(output, settings, startup, tally, time.monotonic() - started)


def _options(request: Request, settings: Settings) -> dict[str, object]:
    """Options that change the rows of the output."""
    return {
        **settings.spec().model_dump(),
        "query_column": request.columns.query,
        "passage_column": request.columns.passage,
        "score_column": request.score_column,
        "on_null": "error" if request.allow_nulls else "fail",
        **({"text_columns": ", ".join(sorted(request.text_columns))} if request.text_columns else {}),
    }


def output_path(request: Request, files: Sequence[InputFile]) -> Path:
    """The requested output, else ``<input stem>.scored.parquet`` beside the input."""
    if request.output:
        return Path(request.output)
    if len(request.inputs) > 1 or (len(files) > 1 and not Path(request.inputs[0]).is_dir()):
        raise InputError("several inputs make one output; name it with -o")
    whole = Path(request.inputs[0])
    name = whole.resolve().name if whole.is_dir() else stem(files[0].path)
    return (whole if whole.is_dir() else files[0].path).resolve().parent / f"{name}.scored.parquet"


def _score(
    session: Session,
    source: Source,
    output: ScoredFile,
    work: Workspace,
    view: ProgressView,
    tally: _Tally,
) -> None:
    client, watch = session.client, session.watch
    _settle_last_run(client.store, work)
    journal = work.journal
    if old_size := journal.manifest.get(OLD_CHUNK_SIZE):
        sizes = [len(table) for table in source.tables(lambda _: int(old_size))]
        journal.renumber(accumulate(sizes, initial=0))
    tally.resumed_rows = journal.rows
    if tally.resumed_rows:
        logger.info("continuing: %s rows are scored already (%s)", f"{tally.resumed_rows:,}", work.folder)

    begun: list[ScoringRun] = []

    def look() -> None:
        view.update(begun[0].progress if begun else Progress(rows=tally.resumed_rows), watch.workers)

    # The branch may have a new commit by now: score the rest with the commit that scored the first chunk.
    revision = (journal.first and journal.first.revision) or client.settings.revision
    options: dict[str, Any] = {"rows": source.rows, "journal": journal, "revision": revision}
    try:
        with session.run(source.tables, source.columns.names, on_wait=look, **options) as run:
            begun.append(run)
            for part in run.tables():
                output.write(part)
                tally.add(part)
                watch.look()
                look()
    except RunFailed as error:
        if output.rows:
            raise
        raise InputError(str(error)) from None  # no chunk was scored: most likely the model is wrong


def _settle_last_run(store: RunStore, work: Workspace) -> None:
    """Move the finished chunks of a run whose producer died to the journal; delete the run from Redis."""
    journal = work.journal
    try:
        left = store.load(journal.run) if journal.run else None
        if left and work.resumes:
            results = [result for _, result in store.results(left, after="0", block_ms=1)]
            scored = [result for result in results if isinstance(result, ChunkScores)]
            whole = [result for result in scored if len(result.scores) == _rows_of(store, left, result.chunk)]
            journal.add({result.chunk: (len(result.scores), result) for result in whole})
    except WireError as error:
        logger.warning("the results of the last run in Redis cannot be used: %s", error)
        return
    if left:
        store.delete(left, store.chunks(left))


def _rows_of(store: RunStore, run: Run, chunk: int) -> int | None:
    """Number of rows of a chunk whose pairs are still in Redis; ``None`` if they are not, or for a piece."""
    payload = store.payload(run, chunk)
    return len(decode_pairs(payload)[0]) if payload and chunk < FIRST_PIECE else None


@dataclass
class _Tally:
    """Sums over the chunks' statistics, and the number of rows that earlier processes scored."""

    resumed_rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    retries: int = 0
    how: set[tuple[str, str, str]] = field(default_factory=set)
    revisions: set[str] = field(default_factory=set)
    int8_gain: float | None = None
    """The smallest gain that any worker has measured."""

    def add(self, part: ScoredTable) -> None:
        stats = part.stats
        if stats is None:
            return
        self.tokens += stats.tokens
        self.padded_tokens += stats.padded_tokens
        self.retries += stats.attempt - 1
        self.how.add((stats.backend, stats.device, stats.precision))
        if stats.revision:
            self.revisions.add(stats.revision)
        if stats.int8_gain is not None:
            self.int8_gain = min(stats.int8_gain, self.int8_gain or math.inf)

    def named(self, index: int) -> str:
        """Backend (0), device (1) or precision (2); joined with commas where workers differ."""
        return ", ".join(sorted({how[index] for how in self.how}))

    @property
    def revision(self) -> str | None:
        return ", ".join(sorted(self.revisions)) or None


def _metadata(settings: Settings, tally: _Tally) -> dict[str, str]:
    """Metadata of the output file: release, model, precision and so on."""
    return {
        "rankmill.version": version("rankmill"),
        "rankmill.model": settings.model,
        "rankmill.revision": tally.revision or settings.revision or "",
        "rankmill.precision": tally.named(2) or settings.precision,
        "rankmill.backend": tally.named(0),
        "rankmill.device": tally.named(1),
        "rankmill.max_length": str(settings.max_length or ""),
        "rankmill.activation": settings.activation,
    }


def _summary(
    output: ScoredFile, settings: Settings, startup: float, tally: _Tally, seconds: float
) -> Summary:
    fresh_rows = output.rows - tally.resumed_rows
    return Summary(
        output=str(output.path),
        rows=output.rows,
        resumed_rows=tally.resumed_rows,
        row_errors=output.row_errors,
        errors_file=str(output.errors_path) if output.row_errors else None,
        seconds=round(seconds, 3),
        startup_seconds=round(startup, 3),
        pairs_per_second=round(fresh_rows / max(seconds - startup, 1e-9), 1),
        real_token_share=round(tally.tokens / tally.padded_tokens, 4) if tally.padded_tokens else 1.0,
        retries=tally.retries,
        model=settings.model,
        revision=tally.revision,
        backend=tally.named(0),
        device=tally.named(1),
        precision=tally.named(2),
        int8_gain=None if tally.int8_gain is None else round(tally.int8_gain, 2),
    )
