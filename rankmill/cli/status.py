"""``rankmill status``, ``runs``, ``errors`` and ``cancel``: what goes on, and how to stop it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

import click
import redis
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from jobs import keys
from jobs.errors import InputError, RedisUnavailable
from jobs.run import MAX_ROW_ERRORS, Run
from jobs.runs import RunStore
from jobs.runtime.connection import connect
from jobs.runtime.passwords import mask_passwords
from jobs.runtime.settings import load_settings
from rankmill.cli import options
from rankmill.cluster import tables
from rankmill.cluster.snapshot import PAGE_RUNS, Cluster, read_cluster

_LOOK_SECONDS = 2.0
_STATUS_RUNS = 10
_WAIT_SECONDS = 5


@options.command("status")
@options.settings("redis_url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, a line for each look.")
@click.option("--watch", is_flag=True, help=f"Look again every {_LOOK_SECONDS:.0f} s, until Ctrl-C.")
def status(redis_url: str | None, config: str | None, as_json: bool, watch: bool) -> None:
    """Show queues, workers and runs."""
    store = _store(redis_url, config)
    if not watch:
        _show_status(read_cluster(store.redis), as_json)
        return
    with suppress(KeyboardInterrupt):  # is how to end it
        _watch(store, as_json)


@options.command("runs")
@options.settings("redis_url")
@click.option("--page", type=click.IntRange(min=1), default=1, help=f"Which page, of {PAGE_RUNS} runs each.")
@options.as_json
def runs(redis_url: str | None, config: str | None, page: int, as_json: bool) -> None:
    """List the runs that are not finished.

    Those last worked on come first.
    """
    cluster = read_cluster(_store(redis_url, config).redis, page=page - 1)
    if as_json:
        found = [run.model_dump() for run in cluster.runs]
        click.echo(json.dumps({"total": cluster.runs_total, "page": page, "runs": found}))
        return
    _console().print(tables.runs_table(cluster.runs, cluster.at))
    pages = -(-cluster.runs_total // PAGE_RUNS)
    if pages > 1:
        click.echo(f"page {page} of {pages}, {cluster.runs_total:,} runs: --page N")


@options.command("cancel")
@click.argument("run_id", metavar="RUN")
@options.settings("redis_url")
def cancel(run_id: str, redis_url: str | None, config: str | None) -> None:
    """Cancel a run.

    It is named by its id or how that begins. Its waiting chunks leave the queue, workers stop within
    seconds, and so does its producer; a score-file keeps what is scored, and the same command continues.
    """
    store = _store(redis_url, config)
    run = _find(store, run_id)
    waiting = store.cancel(run)
    click.echo(f"run {run.id} is cancelled; {waiting} waiting chunks have left queue {run.queue!r}")


@options.command("errors")
@click.argument("run_id", metavar="RUN")
@options.settings("redis_url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line for each row.")
def errors(run_id: str, redis_url: str | None, config: str | None, as_json: bool) -> None:
    """List the rows of a run without a score.

    With the reason, the attempts made, and the worker of the last one. The run is named by its id or
    how that begins.
    """
    store = _store(redis_url, config)
    run = _find(store, run_id)
    found, damaged = store.row_errors(run.id)
    if damaged:
        click.echo(f"{damaged} entries of {keys.errors(run.id)} are damaged and left out", err=True)
    if as_json:
        for error in found:
            click.echo(error.model_dump_json())
        return
    if not found and not damaged:
        click.echo(f"run {run.id}: every row that is done has a score")
        return
    _console().print(tables.errors_table(found))
    if len(found) >= MAX_ROW_ERRORS:
        click.echo(f"these are the first {len(found)}; the list beside the run's output will have all")


def _store(redis_url: str | None, config: str | None) -> RunStore:
    """The runs of the server that is asked for."""
    return RunStore(connect(options.server(load_settings({"redis_url": redis_url}, config)), _WAIT_SECONDS))


def _watch(store: RunStore, as_json: bool) -> None:
    """Show the status again and again."""
    if as_json or not sys.stdout.isatty():
        while True:
            _show_status(_look(store), as_json)
            time.sleep(_LOOK_SECONDS)
    with Live(console=_console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_status(_look(store)), refresh=True)
            time.sleep(_LOOK_SECONDS)


def _look(store: RunStore) -> Cluster | str:
    """The cluster, or why it cannot be seen just now."""
    try:
        return read_cluster(store.redis)
    except (redis.RedisError, RedisUnavailable) as error:
        return f"trying again: {_line(error)}"


def _status(found: Cluster | str) -> RenderableType:
    return Text(found, style="bold red") if isinstance(found, str) else tables.overview(found, _STATUS_RUNS)


def _show_status(found: Cluster | str, as_json: bool) -> None:
    if not as_json:
        _console().print(_status(found))
    elif isinstance(found, str):
        click.echo(json.dumps({"error": found}))
    else:
        click.echo(found.model_dump_json())


def _find(store: RunStore, prefix: str) -> Run:
    """The one run whose id begins so."""
    found = store.find(prefix)
    if len(found) > 1:
        raise InputError(f"{len(found)} runs begin with {prefix}: {', '.join(found[:5])}; give more of it")
    run = store.load(found[0]) if found else None
    if run is None:
        raise InputError(
            f"there is no run {prefix}: it has finished, was cancelled or has expired; a finished score-file "
            "has left the rows without a score beside its output, in OUTPUT.errors.jsonl"
        )
    return run


def _console() -> Console:
    """Standard output; what comes from Redis is no markup."""
    return Console(markup=False, highlight=False, emoji=False)


def _line(error: BaseException) -> str:
    return mask_passwords(" ".join(str(error).split()))
