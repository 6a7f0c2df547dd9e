"""``rankmill status``, ``runs``, ``errors`` and ``cancel``: show a cluster's state, cancel a run."""

from __future__ import annotations

import json

import click

from rankmill.cli import options, watch
from rankmill.cli.show import console, echo, json_of
from rankmill.cluster import tables
from rankmill.cluster.runs import cancel_run, find_run
from rankmill.cluster.snapshot import PAGE_RUNS, read_cluster
from rankmill.cluster.verdict import with_verdict
from rankmill.cluster.watch import ask_extensions, find_watched
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunExpired
from rankmill.jobs.contract.run import MAX_ROW_ERRORS
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.durability import read_durability
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.collect.driver import collect_detached

_STATUS_RUNS = 5


@options.command("status")
@click.argument("run_id", metavar="[RUN]", required=False)
@options.settings("redis_url", "file_queue")
@watch.as_json
@watch.watching
def status(run_id: str | None, settings: Settings, **shown_as: bool) -> None:
    """Show queues, workers and runs; or a submitted run.

    RUN is the id of a submitted run, or the beginning of it.
    """
    if run_id and shown_as["watch"]:
        raise click.UsageError("--watch has no effect on one run; rankmill wait shows its progress")
    client = options.connection(settings)
    if run_id:
        run = find_watched(client, settings, run_id)
        if run is None:
            raise RunExpired(
                f"there is no submitted run {run_id}: it has expired, the server has lost its data, or there "
                "never was one"
            )
        state = run.status()
        echo(json_of(state.data) if shown_as["as_json"] else state.text)
        return
    durability = {"durability": read_durability(client)}
    watch.show_cluster(
        client,
        lambda cluster: tables.Overview(cluster.model_copy(update=durability), _STATUS_RUNS),
        lambda cluster: json_of(with_verdict(cluster.model_copy(update=durability))),
        **shown_as,
    )


@options.command("runs")
@options.settings("redis_url", "file_queue")
@click.option(
    "--page", type=click.IntRange(min=1), default=1, help=f"Page number; a page has {PAGE_RUNS} runs."
)
@options.as_json
def runs(settings: Settings, page: int, as_json: bool) -> None:
    """List unfinished runs and submitted runs.

    The runs with the most recent activity come first. A submitted run is listed until it expires. While a
    runner works on a submitted run, the run of its pairs is listed, too. A detached run is not listed.
    """
    client = options.connection(settings)
    cluster = read_cluster(client, page=page - 1)
    added = [listed for listed in ask_extensions(lambda watch: watch.runs(client, settings)) if listed]
    if as_json:
        listed_runs = [run.model_dump() for run in cluster.runs]
        others = {section.name: [run.model_dump(mode="json") for run in section.data] for section in added}
        echo(json.dumps({"total": cluster.runs_total, "page": page, "runs": listed_runs, **others}))
        return
    for section in added:
        if section.data:
            console().print(section.table)
    console().print(tables.runs_table(cluster.runs, cluster.at))
    pages = -(-cluster.runs_total // PAGE_RUNS)
    if pages > 1:
        echo(f"page {page} of {pages}, {cluster.runs_total:,} runs: --page N")


@options.command("cancel")
@click.argument("run_id", metavar="RUN")
@options.settings("redis_url", "file_queue")
def cancel(run_id: str, settings: Settings) -> None:
    """Cancel a run, or a submitted run.

    A submitted run is a run of files that a runner scores. RUN is the run's id or the beginning of it; of a
    detached run, the whole id. The run's waiting chunks leave the queue. Its producer and its workers stop
    within seconds. The scores of score-file and of a submitted run are kept: the same command, or submitting
    the same files again, continues from them.
    """
    echo(cancel_run(options.connection(settings), settings, run_id))


@options.command("errors")
@click.argument("run_id", metavar="RUN")
@options.settings("redis_url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line for each row.")
def errors(run_id: str, settings: Settings, as_json: bool) -> None:
    """List the rows of a run without a score.

    Each row has its reason, the number of attempts, and the worker of the last attempt. RUN is the run's id
    or the beginning of it; of a detached run, the whole id.
    """
    store = RunStore(options.connection(settings))
    run = find_run(store, run_id)
    chunks = store.detached_chunks(run.id)
    if chunks is not None:
        failed_rows, damaged = collect_detached(store, run, chunks).row_errors(), 0
    else:
        failed_rows, damaged = store.row_errors(run.id)
    if damaged:
        echo(f"{damaged} entries of {keys.errors(run.id)} are damaged and are not shown", err=True)
    if as_json:
        for error in failed_rows:
            echo(json_of(error))
        return
    if not failed_rows and not damaged:
        echo(f"run {run.id}: every row finished so far has a score")
        return
    console().print(tables.errors_table(failed_rows))
    if chunks is None and len(failed_rows) >= MAX_ROW_ERRORS:
        echo(
            f"these are the first {len(failed_rows)}; OUTPUT.errors.jsonl will list all when the run is done"
        )
