"""Shows a cluster once, or repeatedly until Ctrl-C."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

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


@dataclass(frozen=True)
class View:
    """Prints the state of a cluster: `table` makes a table of it, and `text` makes JSON of it."""

    table: Callable[[Snapshot], RenderableType]
    text: Callable[[Snapshot], str]

    def show(self, client: redis.Redis, *, as_json: bool, watch: bool) -> None:
        """Show the cluster; with `watch`, every 2 s until Ctrl-C, even while the server does not answer."""
        if not watch:
            self._print(read_cluster(client), as_json)
            return
        with suppress(KeyboardInterrupt):
            self._watch(client, as_json)

    def _watch(self, client: redis.Redis, as_json: bool) -> None:
        if as_json or not sys.stdout.isatty():
            while True:
                self._print(_look(client), as_json)
                system.sleep(LOOK_SECONDS)
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(self._shown(_look(client)), refresh=True)
                system.sleep(LOOK_SECONDS)

    def _shown(self, cluster: Snapshot | str) -> RenderableType:
        return Text(cluster, style="bold red") if isinstance(cluster, str) else self.table(cluster)

    def _print(self, cluster: Snapshot | str, as_json: bool) -> None:
        if not as_json:
            console().print(self._shown(cluster))
        elif isinstance(cluster, str):
            click.echo(json.dumps({"error": cluster}))
        else:
            click.echo(self.text(cluster))


def _look(client: redis.Redis) -> Snapshot | str:
    try:
        return read_cluster(client)
    except (redis.RedisError, RedisUnavailable) as error:
        return f"trying again: {mask_passwords(' '.join(str(error).split()))}"
