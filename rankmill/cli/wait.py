"""``rankmill wait``: wait for the end of a submitted run, or for the scores of a detached one."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack

import click

from rankmill.cli import options
from rankmill.cli.show import echo, json_of
from rankmill.cluster.watch import WatchedRun, find_watched
from rankmill.jobs.contract.errors import ExitCode, RunCancelled, RunFailed, RunTimeout
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.runtime.settings import Settings
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

    RUN is the id that rankmill submit has printed, or that of Client.submit(pairs, detached=True). The wait
    for a detached run ends when all of its scores are there.
    """
    options.server(settings)
    client = Client(settings=settings, no_workers_seconds=math.inf)
    submitted = find_watched(client.store.redis, settings, run_id)
    if submitted:
        _wait_for_end(submitted, timeout, as_json=as_json, quiet=quiet)
    else:
        detached = client.attach(run_id)
        assert isinstance(detached, ScoringRun)  # `find_watched` finds any other run
        _wait_for_scores(detached, timeout, as_json=as_json, quiet=quiet)


def _wait_for_end(run: WatchedRun, timeout: float | None, *, as_json: bool, quiet: bool) -> None:
    with ExitStack() as stack:
        shown: list[Show] = []

        def show(rows: int, progress: Progress) -> None:
            if not quiet:
                if not shown:
                    shown.append(stack.enter_context(progress_view(rows)))
                shown[0](progress, 0, "")

        try:
            status = run.wait(timeout, show)
        except (RunFailed, RunCancelled, RunTimeout):
            if as_json:
                echo(json_of(run.status().data))
            raise
    if as_json:
        echo(json_of(status.data))
    elif not quiet:
        echo(status.text)
    sys.exit(ExitCode.ROW_ERRORS if status.row_errors else 0)


def _wait_for_scores(run: ScoringRun, timeout: float | None, *, as_json: bool, quiet: bool) -> None:
    scores = run.scores(timeout)
    counts = {"id": run.id, "rows": len(scores), "row_errors": len(scores.errors)}
    line = f"run {run.id}: {len(scores):,} rows are scored, {len(scores.errors):,} of them have an error"
    if as_json:
        echo(json.dumps(counts))
    elif not quiet:
        echo(line)
    sys.exit(ExitCode.ROW_ERRORS if scores.errors else 0)
