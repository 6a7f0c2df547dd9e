"""``rankmill status``, ``runs``, ``errors`` and ``cancel``: show a cluster's state, cancel a run."""

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
from jobs.runtime.connection import connect
from jobs.runtime.passwords import mask_passwords
from jobs.runtime.settings import load_settings
from jobs.store.runs import RunStore
from rankmill.cli import options
from rankmill.cluster import tables
from rankmill.cluster.snapshot import PAGE_RUNS, Snapshot, read_cluster

_LOOK_SECONDS = 2.0
_STATUS_RUNS = 10
_WAIT_SECONDS = 5


@options.command("status")
@options.settings("redis_url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, a line every time.")
@click.option("--watch", is_flag=True, help=f"Refresh every {_LOOK_SECONDS:.0f} s, until Ctrl-C.")
def status(redis_url: str | None, config: str | None, as_json: bool, watch: bool) -> None:
    """Show queues, workers and runs."""
    store = _store(redis_url, config)
    if not watch:
        _show_status(read_cluster(store.redis), as_json)
        return
    with suppress(KeyboardInterrupt):  # the way to end it
        _watch(store, as_json)


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
    _console().print(tables.runs_table(cluster.runs, cluster.at))
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
    _console().print(tables.errors_table(found))
    if len(found) >= MAX_ROW_ERRORS:
        click.echo(
            f"these are the first {len(found)}; OUTPUT.errors.jsonl will list all when the run is done"
        )


def _store(redis_url: str | None, config: str | None) -> RunStore:
    """The run store of the server that the options name."""
    return RunStore(connect(options.server(load_settings({"redis_url": redis_url}, config)), _WAIT_SECONDS))


def _watch(store: RunStore, as_json: bool) -> None:
    """Show the status repeatedly."""
    if as_json or not sys.stdout.isatty():
        while True:
            _show_status(_look(store), as_json)
            time.sleep(_LOOK_SECONDS)
    with Live(console=_console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_status(_look(store)), refresh=True)
            time.sleep(_LOOK_SECONDS)


def _look(store: RunStore) -> Snapshot | str:
    """A snapshot of the cluster, or the reason why there is none now."""
    try:
        return read_cluster(store.redis)
    except (redis.RedisError, RedisUnavailable) as error:
        return f"trying again: {_line(error)}"


def _status(found: Snapshot | str) -> RenderableType:
    return Text(found, style="bold red") if isinstance(found, str) else tables.overview(found, _STATUS_RUNS)


def _show_status(found: Snapshot | str, as_json: bool) -> None:
    if not as_json:
        _console().print(_status(found))
    elif isinstance(found, str):
        click.echo(json.dumps({"error": found}))
    else:
        click.echo(found.model_dump_json())


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


def _console() -> Console:
    """A console on standard output that does not read texts from Redis as markup."""
    return Console(markup=False, highlight=False, emoji=False)


def _line(error: BaseException) -> str:
    return mask_passwords(" ".join(str(error).split()))
