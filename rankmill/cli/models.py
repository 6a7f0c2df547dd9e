"""``rankmill models``: what workers make of a model, and the registry of models."""

from __future__ import annotations

import click

from rankmill.cli import options
from rankmill.cli.registry import aliases, listing, transfer
from rankmill.cli.registry.compare import compare
from rankmill.jobs.runtime.settings import Settings
from rankmill.registry.trial import ModelReport, model_report


@click.group(context_settings=options.CONTEXT)
def models() -> None:
    """Look at models, and keep them in a registry."""


@options.command("describe")
@click.argument("model")
@options.settings(
    "revision", "max_length", "activation", "instruction", "prompt_template", "label", "device", "registry",
    others=("model",),
)  # fmt: skip
@options.as_json
def describe(settings: Settings, as_json: bool) -> None:
    """Show how MODEL is scored, and what can run it here.

    Its family, prompt, outputs, activation and length; for each backend the precisions that can run it on
    this host, or why they cannot. Reads the model's small files, not its weights.
    """
    report = model_report(settings)
    click.echo(report.model_dump_json(indent=2) if as_json else "\n".join(_lines(report)))


for _command in (
    describe,
    transfer.push,
    transfer.pull,
    listing.list_models,
    listing.show,
    aliases.alias,
    aliases.promote,
    aliases.rollback,
    aliases.remove,
    compare,
):
    models.add_command(_command)


def _lines(report: ModelReport) -> list[str]:
    outputs = ", ".join(report.outputs) if len(report.outputs) > 1 else "1"
    lines = [
        f"family      {report.family}: {report.kind}",
        f"revision    {report.revision or 'a directory'}",
        f"pooling     {report.pooling}",
        f"outputs     {outputs}",
        f"activation  {report.activation or 'sigmoid for one output, none for several'}",
        f"length      {report.max_length:,} tokens",
        f"instruction {report.instruction or 'none'}",
        f"prompt      {'the query and the passage' if report.prompt is None else repr(report.prompt)}",
    ]
    others = [f"{name}: {text!r}" for name, text in report.prompts.items() if text]
    lines += [f"its prompts {', '.join(others)}"] if others else []
    for name, precisions in report.backends.items():
        able = [precision for precision, obstacle in precisions.items() if obstacle is None]
        why = "; ".join(dict.fromkeys(obstacle for obstacle in precisions.values() if obstacle))
        shown = ", ".join(able) + (f" ({why})" if able and why else "") or f"no: {why}"
        lines.append(f"{name:<11} {shown}")
    lines.append(f"cannot be scored so: {report.refused}" if report.refused else "can be scored")
    return lines
