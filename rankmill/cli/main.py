"""Defines the command group ``rankmill``. A command is imported when it is used, not when it is listed."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import click

from rankmill.cli.common import CONTEXT, version
from rankmill.cli.exits import OneKindOfLine
from rankmill.jobs.contract.errors import ConfigError
from rankmill.plugins import load_each

Listed = tuple[str, str, str]
"""A command for the list of ``rankmill --help``: its purpose (one of `_PURPOSES`), the first line of its
help, and the place of its function as ``MODULE:FUNCTION``.
"""

_PURPOSES = ("Score", "Serve", "Cluster", "Models", "Measure")
"""Purposes of commands, in the order in which --help lists them."""

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
  3    score, merge, wait: done, but some rows have no score
  130  interrupted"""


def listed_commands() -> tuple[dict[str, Listed], list[str]]:
    """Return all commands by name, the core's first, and a message for each package whose commands cannot be
    listed.

    Raises
    ------
    click.UsageError
        This code of rankmill is not the one that is installed.
    """
    commands = dict(_CORE)
    problems: list[str] = []
    try:
        for extension, package, added in load_each("rankmill.commands"):
            if isinstance(added, ConfigError):
                problems.append(str(added))
            elif not _is_listing(added):
                repair = f"repair or uninstall {package}"
                problems.append(
                    f"{extension!r} of rankmill.commands is not a dictionary of commands; {repair}"
                )
            else:
                commands |= {name: facts for name, facts in added.items() if name not in commands}
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    return commands, problems


def _is_listing(added: object) -> bool:
    return isinstance(added, dict) and all(
        isinstance(name, str) and isinstance(facts, tuple) and [*map(type, facts)] == [str] * 3
        for name, facts in added.items()
    )


def _commands() -> dict[str, Listed]:
    """Return all commands by name. Standard error gets a message for each package whose commands cannot be
    listed.
    """
    commands, problems = listed_commands()
    for problem in problems:
        click.echo(f"rankmill: {problem}", err=True)
    return commands


def _purposes(commands: dict[str, Listed]) -> list[str]:
    used = dict.fromkeys(purpose for purpose, _, _ in commands.values())
    return [*filter(used.__contains__, _PURPOSES), *(other for other in used if other not in _PURPOSES)]


class _Commands(OneKindOfLine, click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        commands, _ = listed_commands()
        purposes = _purposes(commands)
        return sorted(commands, key=lambda name: purposes.index(commands[name][0]))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click itself suggests only commands that are already imported
            possibilities = self.list_commands(ctx)
            raise click.NoSuchCommand(error.command_name, possibilities=possibilities, ctx=ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        listed = _CORE.get(cmd_name) or _commands().get(cmd_name)
        if listed is None:
            return None
        try:
            command: click.Command = EntryPoint(cmd_name, listed[2], "rankmill.commands").load()
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except Exception as error:
            if cmd_name in _CORE:
                raise
            reason = f"{listed[2]} cannot be imported ({error}); repair or uninstall its package"
            raise click.UsageError(reason) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = _commands()
        width = max(map(len, commands))
        for purpose in _purposes(commands):
            rows = [(name.ljust(width), text) for name, (of, text, _) in commands.items() if of == purpose]
            with formatter.section(purpose):
                formatter.write_dl(rows)


@click.group(cls=_Commands, epilog=_EPILOG, context_settings=CONTEXT)
@version
def rankmill() -> None:
    """Score pairs with cross-encoders, watch workers and runs, and find the best settings."""
