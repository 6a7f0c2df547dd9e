"""``rankmill status``, ``runs``, ``errors`` and ``cancel``: show a cluster's state, cancel a run."""

from __future__ import annotations

import json

import click

from jobs import keys
from jobs.errors import InputError
from jobs.run import MAX_ROW_ERRORS, Run
from jobs.runtime.connection import connect
from jobs.runtime.settings import load_settings
from jobs.store.runs import RunStore
from rankmill.cli import options, watch
from rankmill.cli.watch import View, console
from rankmill.cluster import tables
from rankmill.cluster.snapshot import PAGE_RUNS, read_cluster

_STATUS_RUNS = 10
_WAIT_SECONDS = 5


@options.command("status")
@options.settings("redis_url")
@watch.as_json
@watch.watching
def status(redis_url: str | None, config: str | None, **how: bool) -> None:
    """Show queues, workers and runs."""
    view = View(
        lambda cluster: tables.overview(cluster, _STATUS_RUNS), lambda cluster: cluster.model_dump_json()
    )
    view.show(_store(redis_url, config).redis, **how)


@options.command("runs")
@options.settings("redis_url")
@click.option(
    "--page", type=click.IntRange(min=1), default=1, help=f"Page number; a page has {PAGE_RUNS} runs."
)
@options.as_json
def runs(redis_url: str | None, config: str | None, page: int, as_json: bool) -> None:
    """List the runs that are not finished.

    The runs with the most recent activity come first.
    """
    cluster = read_cluster(_store(redis_url, config).redis, page=page - 1)
    if as_json:
        found = [run.model_dump() for run in cluster.runs]
        click.echo(json.dumps({"total": cluster.runs_total, "page": page, "runs": found}))
        return
    console().print(tables.runs_table(cluster.runs, cluster.at))
    pages = -(-cluster.runs_total // PAGE_RUNS)
    if pages > 1:
        click.echo(f"page {page} of {pages}, {cluster.runs_total:,} runs: --page N")


@options.command("cancel")
@click.argument("run_id", metavar="RUN")
@options.settings("redis_url")
def cancel(run_id: str, redis_url: str | None, config: str | None) -> None:
    """Cancel a run.

    RUN is the run's id or the beginning of it. The run's waiting chunks leave the queue; its producer, and
    the workers' work on it, stop within seconds. score-file keeps the scores, and the same command continues.
    """
    store = _store(redis_url, config)
    run = _find(store, run_id)
    waiting = store.cancel(run)
    click.echo(f"run {run.id} is cancelled; {waiting} waiting chunks have left queue {run.queue!r}")


@options.command("errors")
@click.argument("run_id", metavar="RUN")
@options.settings("redis_url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line for each row.")
def errors(run_id: str, redis_url: str | None, config: str | None, as_json: bool) -> None:
    """List the rows of a run without a score.

    Each row has its reason, the number of attempts, and the worker of the last attempt. RUN is the run's id
    or the beginning of it.
    """
    store = _store(redis_url, config)
    run = _find(store, run_id)
    found, damaged = store.row_errors(run.id)
    if damaged:
        click.echo(f"{damaged} entries of {keys.errors(run.id)} are damaged and are not shown", err=True)
    if as_json:
        for error in found:
            click.echo(error.model_dump_json())
        return
    if not found and not damaged:
        click.echo(f"run {run.id}: every row finished so far has a score")
        return
    console().print(tables.errors_table(found))
    if len(found) >= MAX_ROW_ERRORS:
        click.echo(
            f"these are the first {len(found)}; OUTPUT.errors.jsonl will list all when the run is done"
        )


def _store(redis_url: str | None, config: str | None) -> RunStore:
    """The run store of the server that the options name."""
    return RunStore(connect(options.server(load_settings({"redis_url": redis_url}, config)), _WAIT_SECONDS))


def _find(store: RunStore, prefix: str) -> Run:
    """The run whose id begins with `prefix`; raises `InputError` unless there is exactly one."""
    found = store.find(prefix)
    if len(found) > 1:
        raise InputError(
            f"{len(found)} runs begin with {prefix}: {', '.join(found[:5])}; give more characters of the id"
        )
    run = store.load(found[0]) if found else None
    if run is None:
        raise InputError(
            f"there is no run {prefix}: it has finished, was cancelled or has expired; score-file lists the "
            "rows without a score of a finished run in OUTPUT.errors.jsonl, beside its output"
        )
    return run
