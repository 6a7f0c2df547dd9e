"""``rankmill``: the command group. A command is imported when it is used; listing them imports nothing."""

from __future__ import annotations

from importlib import import_module

import click

from rankmill.cli.common import CONTEXT, version
from rankmill.jobs.contract.errors import ConfigError
from rankmill.plugins import load, names

Listed = tuple[str, str, str]
"""Facts about a command: its purpose, the first line of its help, and ``MODULE:FUNCTION``."""

_PURPOSES = ("Score", "Serve", "Cluster", "Models", "Measure")
"""Purposes of commands; --help lists the commands by purpose, in this order."""

_CORE: dict[str, Listed] = {
    "score": (
        "Score", "Score the pairs of INPUT files with a cross-encoder.", "rankmill.cli.score:score_file",
    ),
    "merge": ("Score", "Merge the outputs of score-file --shard.", "rankmill.cli.merge:merge_shards"),
    "wait": ("Score", "Wait for a submitted run, or for a detached one.", "rankmill.cli.wait:wait"),
    "status": ("Cluster", "Show queues, workers and runs; or a submitted run.", "rankmill.cli.status:status"),
    "workers": (
        "Cluster", "List the live workers; start, drain or warm some.", "rankmill.cli.live_workers:workers",
    ),
    "runs": ("Cluster", "List unfinished runs and submitted runs.", "rankmill.cli.status:runs"),
    "errors": ("Cluster", "List the rows of a run without a score.", "rankmill.cli.status:errors"),
    "cancel": ("Cluster", "Cancel a run, or a submitted run.", "rankmill.cli.status:cancel"),
    "jobs": ("Cluster", "List failed and set-aside jobs; retry or clear them.", "rankmill.cli.jobs:jobs"),
    "usage": ("Cluster", "Show how much each tenant has used.", "rankmill.cli.usage:usage"),
    "exporter": (
        "Cluster", "Serve the live page, and metrics to Prometheus.", "rankmill.cli.exporter:exporter",
    ),
    "config": ("Cluster", "Show and describe settings.", "rankmill.cli.config:config"),
}  # fmt: skip

_EPILOG = """\b
Exit codes:
  0    done
  1    failed, or no server answers
  2    wrong usage or input
  3    score: done, but some rows have no score
  130  interrupted"""


def listed_commands() -> dict[str, Listed]:
    """All commands by name, the core's first; extensions add theirs through ``rankmill.commands``.

    Raises
    ------
    click.UsageError
        An extension cannot be imported.
    """
    commands = dict(_CORE)
    try:
        for extension in names("rankmill.commands"):
            added: dict[str, Listed] = load("rankmill.commands", extension)
            commands |= {name: command for name, command in added.items() if name not in commands}
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    return commands


def _purposes(commands: dict[str, Listed]) -> list[str]:
    used = dict.fromkeys(purpose for purpose, _, _ in commands.values())
    return [*filter(used.__contains__, _PURPOSES), *(each for each in used if each not in _PURPOSES)]


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        commands = listed_commands()
        purposes = _purposes(commands)
        return sorted(commands, key=lambda name: purposes.index(commands[name][0]))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click knows only commands that are already imported
            possibilities = self.list_commands(ctx)
            raise click.NoSuchCommand(error.command_name, possibilities=possibilities, ctx=ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = _CORE.get(cmd_name) or listed_commands().get(cmd_name)
        if command is None:
            return None
        module, _, function = command[2].partition(":")
        found: click.Command = getattr(import_module(module), function)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = listed_commands()
        width = max(map(len, commands))
        for purpose in _purposes(commands):
            rows = [(name.ljust(width), text) for name, (of, text, _) in commands.items() if of == purpose]
            with formatter.section(purpose):
                formatter.write_dl(rows)


@click.group(cls=_Commands, epilog=_EPILOG, context_settings=CONTEXT)
@version
def rankmill() -> None:
    """Score pairs with cross-encoders, watch workers and runs, and find the best settings."""
