"""``rankmill``: the command group."""

from __future__ import annotations

from importlib import import_module

import click

from rankmill.cli import options

_COMMANDS = {
    "score": "score.score_file",
    "submit": "submitted.submit.submit",
    "wait": "submitted.wait.wait",
    "runner": "submitted.runner.runner",
    "serve": "gateway.serve.serve",
    "merge": "files.merge.merge_shards",
    "evaluate": "files.evaluate.evaluate",
    "mine": "files.mine.mine_negatives",
    "workers": "live_workers.workers",
    "status": "status.status",
    "runs": "status.runs",
    "errors": "status.errors",
    "cancel": "status.cancel",
    "jobs": "jobs.jobs",
    "tune": "quality.tune.tune",
    "experiment": "quality.experiment.experiment",
    "check-precision": "quality.check_precision.check_precision",
    "quantize": "quality.quantize.quantize",
    "models": "models.models",
    "keys": "gateway.keys.keys",
    "usage": "usage.usage",
    "exporter": "exporter.exporter",
    "config": "config.config",
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
        found: click.Command | None = getattr(import_module(f"rankmill.cli.{module}"), name) if name else None
        return found


@click.group(cls=_Commands, epilog=_EPILOG, context_settings=options.CONTEXT)
@options.version
def rankmill() -> None:
    """Score pairs with cross-encoders, watch workers and runs, and find the best settings."""
