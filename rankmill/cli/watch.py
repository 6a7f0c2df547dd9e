"""Shows a cluster once, or repeatedly until Ctrl-C."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress

import click
import redis
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from rankmill.cli.show import console
from rankmill.cluster.snapshot import Snapshot, read_cluster
from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.system import system

LOOK_SECONDS = 2.0

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, a line each time.")
watching = click.option("--watch", is_flag=True, help=f"Refresh every {LOOK_SECONDS:.0f} s, until Ctrl-C.")


def show_cluster(
    client: redis.Redis,
    table: Callable[[Snapshot], RenderableType],
    text: Callable[[Snapshot], str],
    *,
    as_json: bool,
    watch: bool,
) -> None:
    """Print the state of a cluster: `table` makes a table of it, and `text` makes JSON of it.

    With `watch`, the state is printed every 2 s until Ctrl-C, even while the server does not answer.
    """

    def shown(cluster: Snapshot | str) -> RenderableType:
        return Text(cluster, style="bold red") if isinstance(cluster, str) else table(cluster)

    def show(cluster: Snapshot | str) -> None:
        if not as_json:
            console().print(shown(cluster))
        else:
            click.echo(json.dumps({"error": cluster}) if isinstance(cluster, str) else text(cluster))

    if not watch:
        show(read_cluster(client))
        return
    with suppress(KeyboardInterrupt):
        if as_json or not sys.stdout.isatty():
            while True:
                show(_look(client))
                system.sleep(LOOK_SECONDS)
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(shown(_look(client)), refresh=True)
                system.sleep(LOOK_SECONDS)


def _look(client: redis.Redis) -> Snapshot | str:
    try:
        return read_cluster(client)
    except (redis.RedisError, RedisUnavailable) as error:
        return f"trying again: {mask_passwords(' '.join(str(error).split()))}"
