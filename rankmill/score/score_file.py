"""Scores the input's files through the queue, and writes the output, as score-file does."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import InputError, RunFailed, WireError, WrongScores
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.results import NO_DEVICE
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.model_names import ModelNames
from rankmill.jobs.protocol.accounts import END
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.runs import ScoringRun
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.scored import EarlierScores, no_earlier
from rankmill.producer.files.manifest import manifest
from rankmill.producer.files.plan import OutputPlan, names_of_score_columns
from rankmill.producer.files.shards import shard_metadata
from rankmill.producer.files.sink import ScoredFile, ScoredParts
from rankmill.producer.files.source import PairSource
from rankmill.producer.files.stores.paths import workspace_of
from rankmill.producer.files.workspace import OutputFile, Workspace
from rankmill.producer.local.embedded import EmbeddedCluster
from rankmill.score.input import find_input
from rankmill.score.output import find_target, named_columns, row_options
from rankmill.score.progress import MakeView, Show, progress_view
from rankmill.score.reuse import earlier_scores
from rankmill.score.session import Session
from rankmill.score.summary import Summary, Tally, metadata, summarize

Confirm = Callable[[ScoredFile | None, Summary], None]

logger = logging.getLogger(__name__)


def score_file(
    request: FileRequest,
    settings: Settings,
    *,
    cluster: EmbeddedCluster | None = None,
    view: MakeView = progress_view,
    confirm: Confirm = lambda *_: None,
    tokens_column: str | None = None,
    made: Callable[[], bool] = lambda: False,
) -> Summary:
    """Score the files of `request` into one output; resume an interrupted run of the same request.

    Parameters
    ----------
    request, settings
        What to score, and how.
    cluster
        An `EmbeddedCluster` whose ``with`` block has begun. By default, one is started if the settings do not
        name a server.
    view
        Makes the display of the progress; called with the number of rows when the scoring begins.
    confirm
        Called with the complete output and the summary before the output is moved into place. If `confirm`
        raises an error, the output is not moved. If the output has several parts, `confirm` gets the last
        part, or ``None`` if the last part is in place already.
    tokens_column
        Name of a further column with the number of tokens of each row; null where no worker has counted them.
    made
        Called after this process has locked the output. Returns whether another process has made the output
        since the caller looked for it.

    Raises
    ------
    InputError, ConfigError, ConnectionFailed
        The message says what to change; the output is not complete.
    RunFailed, RunCancelled, RedisUnavailable, RedisFailed, EmbeddedError, OutputError, StoreError
        The run cannot be finished, and the output is not complete. The scores computed so far are stored, and
        the same request resumes from them, unless some are wrong (`WrongScores`).
    RunnerError
        This process is a runner that is not permitted to read the input or to write the output.
    OutputBusy
        Another process is making the output, or has just made it.
    InputChanged
        The input changed during the run; no output was made, and the scores are dropped.
    """
    started = system.monotonic()
    settings = with_inputs(request, settings)
    _use_system_memory()
    input_files = find_input(request)
    target = find_target(request, input_files.files)
    target.check(input_files.files, settings)
    settings, earlier = earlier_scores(request, settings)
    with ExitStack() as stack:
        names = request.run_models(settings.model)
        work = stack.enter_context(
            Workspace(
                target.place(), restart=request.restart, force=request.force, models=len(names), made=made
            )
        )
        # The manifest has everything on which the scores depend. An interrupted run is continued if its
        # manifest is unchanged.
        inputs, cache = input_files.identify(work.folder, stack), cache_folder(settings.cache_dir)
        target.refuse_unused(input_files)
        made_from = manifest(inputs, names, row_options(request, settings), cache)
        work.begin(made_from)
        models = _with_versions(names, settings, work)
        settings = settings.model_copy(update={"model": models[0]})
        session = stack.enter_context(Session(settings, cluster))
        source = input_files.open(target.form.of(target.file))
        logger.debug("%s rows in %d files", f"{source.rows:,}", len(input_files.files))
        revision = _revision(work.journal, settings.revision)
        columns = names_of_score_columns(request, settings, partial(session.labels, revision=revision))
        plan = target.plan(source, columns, tokens_column)
        work.check_replaced()
        tally = Tally.read(work.journal.finished.tally)
        several = models if len(models) > 1 else ()
        tally.each = [Tally() for _ in several]

        def output_metadata() -> dict[str, str]:
            part_of = request.shard or ((1, 1) if request.rows_per_part else None)
            made_with = {**made_from, "--model": ", ".join(models)}
            facts = metadata(settings, tally, several, columns) | named_columns(request)
            return facts | (shard_metadata(part_of, made_with) if part_of else {})

        output: ScoredFile | ScoredParts = (
            ScoredParts(
                target.path, work, plan, source.rows, request.rows_per_part, output_metadata, tally.written
            )
            if request.rows_per_part
            else ScoredFile(target.path, work.inside, plan, record=work.record)
        )
        stack.enter_context(output)
        logger.debug("run on queue %r, %s", settings.queue, "embedded" if session.embedded else "of --redis")
        startup = load = 0.0
        if source.rows:
            with view(source.rows) as show:
                since = _score(session, request, source, output, work, show, tally, earlier, several, plan)
            # The first worker may have begun to score before it was seen, because workers are looked for only
            # once a second.
            startup = min(session.watch.since(started), since - started)
            load = since - started - startup if math.isfinite(since) else 0.0
        output.finish(output_metadata())
        source.check_unchanged()
        used = list(dict.fromkeys(models))
        seconds = system.monotonic() - started
        summary = summarize(output, used, (startup, load), tally, seconds, source.taken)
        confirm(output.last, summary)
        work.check()
        output.publish(work.journal)
    return summary


def with_inputs(request: FileRequest, settings: Settings) -> Settings:
    """Return the settings with ``inputs`` set to the kind of the request's rows: pairs, texts or
    conversations.

    Raises
    ------
    InputError
        The settings name another kind of rows, or have an option that is only for pairs.
    """
    kind = request.kind_of_rows
    if kind == "pairs" and settings.inputs != kind:
        option = "--text-column" if settings.inputs == "texts" else "--messages-column"
        raise InputError(f"the settings say that rows are {settings.inputs}: name their column with {option}")
    try:
        return settings.changed({"inputs": kind})
    except ValidationError as error:
        raise InputError(f"inputs: {error.errors()[0]['msg']}") from None


def _use_system_memory() -> None:
    """Make Arrow allocate from the C library, unless the environment names another allocator.

    Arrow's default on Linux returns freed memory at once, and gets it back as empty pages, which costs CPU
    time.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())


def _with_versions(models: Sequence[str], settings: Settings, work: Workspace) -> list[str]:
    """Replace each alias in `models` with its version: ``reranker@production`` becomes ``reranker@v3``. A
    resumed run keeps the versions with which it began.
    """
    versions, resolver = [], ModelNames(settings)
    for name, journal in zip(models, work.journals, strict=True):
        model = journal.model if work.resumes else None
        if model is None:
            model = resolver.pin(name)
            journal.keep_model(model)
        versions.append(model)
    return versions


def _score(
    session: Session,
    request: FileRequest,
    source: PairSource,
    output: ScoredFile | ScoredParts,
    work: Workspace,
    show: Show,
    tally: Tally,
    earlier: EarlierScores | None,
    models: Sequence[str],
    plan: OutputPlan,
) -> float:
    """Score the rows that have no score yet, and write them to `output`. Returns the time at which the first
    worker began to score (`ScoringRun.scoring_since`).
    """
    client, watch = session.client, session.watch
    for model_journal in work.journals:
        _end_last_run(client.store, model_journal)
    journal = work.journal
    known_rows = [model_journal.rows for model_journal in work.journals]
    tally.resumed_rows = min(known_rows)
    if tally.resumed_rows:
        logger.info("continuing: %s rows are scored already (%s)", f"{tally.resumed_rows:,}", work.folder)

    begun: list[ScoringRun] = []

    def look() -> None:
        progress = begun[0].progress if begun else Progress(rows=tally.resumed_rows)
        show(progress, watch.workers, "" if progress.at else watch.doing())

    look()
    options: dict[str, Any] = {
        "rows": source.rows,
        "priority": "bulk",
        "reuse": earlier or no_earlier(source.columns.sent),
        "row_tokens": bool(plan.tokens),
    }
    named = client.settings.revision
    if models:  # --revision is for the first model; CHOSEN and REJECTED are scored by one model
        own = [
            {
                "model": model,
                "journal": each,
                "revision": _revision(each, named if model == models[0] else None),
            }
            for model, each in zip(models, work.journals, strict=True)
        ]
        options |= {"models": own, "apart": not request.models}
    else:
        options |= {"journal": journal, "revision": _revision(journal, named)}

    sizing = client.sizing(journals=work.journals, part_rows=request.rows_per_part)
    tables = source.tables(sizing, journal.finished.rows, plan.needed)
    try:
        with session.run(tables, source.columns.sent, sizing, on_wait=look, **options) as run:
            begun.append(run)
            for part in run.tables():
                tally.add(part)
                _check_kind(tally, earlier)
                output.write(source.explain(part))
                watch.look()
                look()
        return run.scoring_since
    except RunFailed as error:
        if work.rows or isinstance(error, WrongScores):
            raise
        # If no chunk was scored, the model or an option is most likely wrong.
        raise InputError(str(error)) from None


def _check_kind(tally: Tally, earlier: EarlierScores | None) -> None:
    """Raise `InputError` if this run's workers compute other bits than the workers that made the scores of
    ``--reuse``. Otherwise add to `tally` how the scores of ``--reuse`` were made.

    Scores that are not deterministic are not checked.
    """
    if earlier and earlier.kind and (others := tally.kinds - {earlier.kind}):
        raise InputError(
            f"the scores of --reuse have the bits of {earlier.kind}, and the workers here those of "
            f"{', '.join(sorted(others))}: leave out --reuse, or use workers of that kind"
        )
    if earlier and (tally.reused_rows or tally.resumed_rows):
        tally.add_reused(earlier.made)


def _revision(journal: Journal, named: str | None) -> str | None:
    """Return the revision of the model to score with. A new run takes the revision `named`. A resumed run
    keeps its revision, even if a branch or a directory has a new one now.
    """
    return (journal.first and journal.first.revision) or named


def _end_last_run(store: RunStore, journal: Journal) -> None:
    """Delete a dead producer's run from Redis, and add what the run has used to its tenant's account.

    Only results that the producer had accepted are counted. All other results are dropped, and their chunks
    are scored again.
    """
    try:
        last = store.load(journal.run) if journal.run else None
    except WireError as error:
        logger.warning("the last run in Redis cannot be read: %s", error)
        return
    if last:
        account = journal.account
        rest = {END: {NO_DEVICE: account.rest}} if account.rest and any(account.rest) else {}
        store.delete(last, store.chunks(last), used={**account.used, **rest})
    journal.is_in_redis = False


def drop_last_run(output: OutputFile, models: int, store: RunStore) -> None:
    """Delete from Redis the run of a process that has died, if no other process will complete its `output`.

    The rows that are scored already stay in the output's working folder. Raises the errors of `Workspace`.
    """
    if workspace_of(output.path).exists():
        with Workspace(output, restart=False, force=True, models=models) as work:
            for journal in work.journals:
                _end_last_run(store, journal)
