"""``rankmill wait``: wait for the end of a submitted run."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from rankmill.cli import options
from rankmill.cli.submitted.lines import describe
from rankmill.jobs.contract.errors import ExitCode
from rankmill.jobs.protocol.submitted.record import FileRun
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.client.runs import ScoringRun
from rankmill.producer.client.submitted import SubmittedFile, find_submitted
from rankmill.producer.client.sync_client import Client
from rankmill.score.progress import ProgressView, progress_view

_EPILOG = """\b
Exit codes:
  0    every row was scored
  1    the run has failed or was cancelled, or has not ended in time
  2    there is no such run
  3    done, but some rows have no score: OUTPUT.errors.jsonl names them
  130  interrupted; the run goes on"""


@options.command("wait", epilog=_EPILOG, interrupted="the run goes on")
@click.argument("run_id", metavar="RUN")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Longest time to wait.")
@options.settings("redis_url", "file_queue")
@options.as_json
@options.quiet
def wait(
    run_id: str, timeout: float | None, config: str | None, as_json: bool, quiet: bool, **flags: Any
) -> None:
    """Wait for a submitted run, or for a detached one.

    RUN is the id that rankmill submit has printed, or that of Client.submit(pairs, detached=True);
    its scores must all be there.
    """
    settings = load_settings({**flags, "log_level": "error" if quiet else None}, config)
    set_up(settings.log_level, settings.log_format)
    options.server(settings)
    client = Client(settings=settings)
    submitted = find_submitted(client.files, run_id)
    if submitted is None and isinstance(detached := client.attach(run_id), ScoringRun):
        _wait_for_scores(detached, timeout, as_json)
        return
    submitted = submitted or SubmittedFile(client.files, run_id)
    shown: list[ProgressView] = []

    def look(run: FileRun) -> None:
        if run.rows is not None and not quiet:
            if not shown:
                shown.append(progress_view(run.rows, quiet=quiet).__enter__())
            shown[0].update(run.progress, 0)

    try:
        run = submitted.wait(timeout, on_look=look)
    finally:
        if shown:
            shown[0].__exit__(None, None, None)
    click.echo(run.model_dump_json() if as_json else describe(run))
    sys.exit(ExitCode.ROW_ERRORS if run.outcome and run.outcome.row_errors else 0)


def _wait_for_scores(run: ScoringRun, timeout: float | None, as_json: bool) -> None:
    scores = run.scores(timeout)
    counts = {"id": run.id, "rows": len(scores), "row_errors": len(scores.errors)}
    line = f"run {run.id}: {len(scores):,} rows are scored, {len(scores.errors):,} of them have an error"
    click.echo(json.dumps(counts) if as_json else line)
    sys.exit(ExitCode.ROW_ERRORS if scores.errors else 0)
