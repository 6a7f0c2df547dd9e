"""``rankmill wait``: wait for the end of a submitted run."""

from __future__ import annotations

import sys
from typing import Any

import click

from jobs.errors import ExitCode
from jobs.files.record import FileRun
from jobs.runtime.logs import set_up
from jobs.runtime.settings import load_settings
from producer import Client
from producer.submitted.file import SubmittedFile, find_submitted
from rankmill.cli import options
from rankmill.cli.submitted.lines import describe
from rankmill.progress import ProgressView, progress_view

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
    """Wait for the end of a submitted run.

    RUN is the id that rankmill submit has printed.
    """
    settings = load_settings({**flags, "log_level": "error" if quiet else None}, config)
    set_up(settings.log_level, settings.log_format)
    options.server(settings)
    files = Client(settings=settings).files
    submitted = find_submitted(files, run_id) or SubmittedFile(files, run_id)
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
