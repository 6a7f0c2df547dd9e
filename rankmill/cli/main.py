"""``rankmill``: the command group."""

from __future__ import annotations

from importlib import import_module

import click

from rankmill.cli import options

_COMMANDS = {
    "score": "rankmill.cli.score.score_file",
    "submit": "rankmill.extensions.runners.commands.submit.submit",
    "wait": "rankmill.extensions.runners.commands.wait.wait",
    "runner": "rankmill.extensions.runners.commands.runner.runner",
    "serve": "rankmill.extensions.gateway.commands.serve.serve",
    "merge": "rankmill.cli.merge.merge_shards",
    "evaluate": "rankmill.extensions.rankings.commands.evaluate.evaluate",
    "mine": "rankmill.extensions.rankings.commands.mine.mine_negatives",
    "workers": "rankmill.cli.live_workers.workers",
    "status": "rankmill.cli.status.status",
    "runs": "rankmill.cli.status.runs",
    "errors": "rankmill.cli.status.errors",
    "cancel": "rankmill.cli.status.cancel",
    "jobs": "rankmill.cli.jobs.jobs",
    "tune": "rankmill.extensions.lab.commands.tune.tune",
    "experiment": "rankmill.extensions.lab.commands.experiment.experiment",
    "check-precision": "rankmill.extensions.lab.commands.check_precision.check_precision",
    "quantize": "rankmill.extensions.lab.commands.quantize.quantize",
    "models": "rankmill.extensions.registry.commands.models.models",
    "keys": "rankmill.extensions.gateway.commands.keys.keys",
    "usage": "rankmill.cli.usage.usage",
    "exporter": "rankmill.cli.exporter.exporter",
    "config": "rankmill.cli.config.config",
}
"""Module and name of each command; a module is imported when its command is used."""

_EPILOG = """\b
Exit codes:
  0    done
  1    failed, or no server answers
  2    wrong usage or input
  3    score: done, but some rows have no score
  130  interrupted"""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click knows only commands that are imported already
            raise click.NoSuchCommand(error.command_name, possibilities=_COMMANDS, ctx=ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, _, name = _COMMANDS.get(cmd_name, "").rpartition(".")
        found: click.Command | None = getattr(import_module(module), name) if name else None
        return found


@click.group(cls=_Commands, epilog=_EPILOG, context_settings=options.CONTEXT)
@options.version
def rankmill() -> None:
    """Score pairs with cross-encoders, watch workers and runs, and find the best settings."""
