"""``rankmill usage``: shows how much each tenant has used the workers."""

from __future__ import annotations

import json
from typing import get_args

import click

from rankmill.cli import options
from rankmill.cli.show import console
from rankmill.cluster.usage import By, listed, usage_table
from rankmill.jobs.protocol.accounts import KEPT_DAYS, read_accounts
from rankmill.jobs.runtime.settings import Settings


@options.command("usage")
@click.option("--by", type=click.Choice(get_args(By)), help="What each line adds up.  [default: key]")
@click.option(
    "--days",
    type=click.IntRange(1, KEPT_DAYS),
    default=30,
    show_default=True,
    help="Number of days (UTC), including today.",
)
@options.settings("redis_url")
@options.as_json
def usage(by: By | None, days: int, settings: Settings, as_json: bool) -> None:
    """Show how much each tenant has used.

    Accounts are kept for 400 days. --json prints an entry for each day, key, model and device.
    """
    if as_json and by:
        raise click.UsageError("--by has no effect with --json, which prints all")
    entries = read_accounts(options.connection(settings), days)
    if as_json:
        click.echo(json.dumps(listed(entries)))
    elif entries:
        console().print(usage_table(entries, by or "key"))
    else:
        click.echo(f"Nothing was used in the last {days} days.")
