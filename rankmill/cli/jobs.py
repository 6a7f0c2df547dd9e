"""``rankmill jobs``: list, retry and clear jobs that have failed or were set aside."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import click
import redis

from rankmill.cli import options
from rankmill.cli.show import console, echo
from rankmill.cluster import tables
from rankmill.cluster.failed import FailedJob, chosen, clear, failed_jobs, retry
from rankmill.jobs.contract.errors import ExitCode, InputError
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system


@options.group("jobs")
@options.as_json
def jobs(client: redis.Redis, as_json: bool) -> None:
    """List failed and set-aside jobs; retry or clear them.

    A failed job has used up its attempts. A job is set aside when no worker can read it. Failed and set-aside
    jobs stay in the counts of rankmill status until they expire or are cleared.
    """
    failed = failed_jobs(client)
    if as_json:
        echo(json.dumps([job.model_dump() for job in failed]))
    else:
        console().print(tables.failed_table(failed, system.now()))


def _command(name: str, do: Callable[[redis.Redis, FailedJob], str], text: str) -> None:
    @options.settings("redis_url")
    @click.argument("ids", metavar="[ID]...", nargs=-1)
    @click.option("--all", "every", is_flag=True, help="All jobs of the list.")
    def run(settings: Settings, ids: tuple[str, ...], every: bool) -> None:
        if bool(ids) == every:
            raise click.UsageError("name the jobs by their ids, or give --all")
        client = options.connection(settings)
        failed = False
        found = chosen(failed_jobs(client), ids)
        if not found:
            echo("No failed jobs, and none was set aside.")
        for job in found:
            try:
                echo(f"{job.id}: {do(client, job)}")
            except InputError as error:
                echo(f"{job.id}: {error}", err=True)
                failed = True
        if failed:
            sys.exit(ExitCode.FAILED)

    run.__doc__ = text
    jobs.add_command(options.command(name)(run))


_command(
    "retry",
    retry,
    """Put failed jobs back into their queue, for one more attempt.

    A chunk of a run cannot be retried: its run has its failure, and its rows have an error. Score the file
    again, with --reuse for the rows that have a score.
    """,
)
_command("clear", clear, "Remove jobs from the list, and from the counts of rankmill status.")
