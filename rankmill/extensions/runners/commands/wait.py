"""``rankmill wait``: wait for the end of a submitted run."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import click

from rankmill.cli import options
from rankmill.cli.show import echo, json_of
from rankmill.cluster.tables import duration, plain
from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.submitted import SubmittedFile, find_submitted
from rankmill.jobs.contract.errors import ExitCode
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.runs import ScoringRun
from rankmill.producer.client.sync_client import Client
from rankmill.score.progress import Show, progress_view

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
@options.settings("redis_url", "file_queue", logs=True)
@options.as_json
@options.quiet
def wait(run_id: str, timeout: float | None, settings: Settings, as_json: bool, quiet: bool) -> None:
    """Wait for a submitted run, or for a detached one.

    RUN is the id that rankmill submit has printed, or that of Client.submit(pairs, detached=True);
    its scores must all be there.
    """
    options.server(settings)
    client = Client(settings=settings)
    submitted = find_submitted(client.files, run_id)
    if submitted is None and isinstance(detached := client.attach(run_id), ScoringRun):
        _wait_for_scores(detached, timeout, as_json=as_json, quiet=quiet)
        return
    submitted = submitted or SubmittedFile(client.files, run_id)
    with ExitStack() as stack:
        shown: list[Show] = []

        def look(run: FileRun) -> None:
            if run.rows is not None and not quiet:
                if not shown:
                    shown.append(stack.enter_context(progress_view(run.rows)))
                shown[0](run.progress, 0, "")

        run = submitted.wait(timeout, on_look=look)
    if as_json:
        echo(json_of(run))
    elif not quiet:
        echo(describe(run))
    sys.exit(ExitCode.ROW_ERRORS if run.outcome and run.outcome.row_errors else 0)


def _wait_for_scores(run: ScoringRun, timeout: float | None, *, as_json: bool, quiet: bool) -> None:
    scores = run.scores(timeout)
    counts = {"id": run.id, "rows": len(scores), "row_errors": len(scores.errors)}
    line = f"run {run.id}: {len(scores):,} rows are scored, {len(scores.errors):,} of them have an error"
    if as_json:
        echo(json.dumps(counts))
    elif not quiet:
        echo(line)
    sys.exit(ExitCode.ROW_ERRORS if scores.errors else 0)


def describe(run: FileRun) -> str:
    """The run's state, and what there is to know in it."""
    request, done = run.order.request, run.outcome
    source = request.run or ", ".join(request.inputs)
    lines = [
        f"submitted run {run.id} is {run.state}{f': {plain(run.reason)}' if run.reason else ''}",
        f"model {plain(run.order.spec.model)}: {plain(source)} to {plain(request.output or '')}",
    ]
    if run.state == "done" and done:
        lines.append(
            f"{done.rows - done.row_errors:,} of {done.rows:,} rows scored; scores are in {done.output}"
        )
        if done.row_errors:
            lines.append(f"{done.row_errors:,} rows have no score; {done.errors_file} says which and why")
    elif run.rows is not None:
        speed = run.progress.rows_per_second()
        left = duration(run.progress.seconds_left(run.rows))
        lines.append(
            f"{run.progress.rows:,} of {run.rows:,} rows are done"
            + (f", {speed:,.0f} pairs/s, time left: {left}" if speed and not run.is_ended else "")
        )
    if run.runner:
        lines.append(f"runner {plain(run.runner)}")
    if run.notice:
        why = f" ({plain(run.notice.reason)})" if run.notice.reason else ""
        lines.append(f"webhook {run.notice.state} after {run.notice.attempts} attempts{why}")
    lines.append(f"submitted {duration(system.now() - run.created)} ago")
    return "\n".join(lines)
