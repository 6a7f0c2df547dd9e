"""``rankmill models``: describe and prove models, and keep them in a registry."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.common import CONTEXT
from rankmill.cli.show import console, echo, json_of
from rankmill.extensions.registry.commands import aliases, listing, transfer
from rankmill.extensions.registry.commands.compare import compare
from rankmill.extensions.registry.trial import Proven, model_report, prove_model
from rankmill.jobs.runtime.settings import Settings


@click.group(context_settings=CONTEXT)
def models() -> None:
    """Describe and prove models, and keep them in a registry."""


@options.command("describe")
@click.argument("model")
@options.settings(
    "revision", "max_length", "activation", "instruction", "prompt_template", "label", "device", "registry",
    others=("model",),
)  # fmt: skip
@options.as_json
def describe(settings: Settings, as_json: bool) -> None:
    """Show how MODEL is scored, and what can run it here.

    The command shows the model's family, prompt, outputs, activation and length. For each backend, it shows
    which precisions can run the model on this host, and why others cannot. It reads the model's small files,
    not its weights.
    """
    report = model_report(settings)
    echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))


@options.command("prove")
@click.argument("model")
@options.settings(
    "revision", "precision", "prompt_template", "backend", "threads", "registry", others=("model",)
)
@options.as_json
def prove(settings: Settings, as_json: bool) -> None:
    """Prove that the devices of this host compute MODEL's scores correctly, as workers do before they score.

    The command scores probe pairs as a worker would, and compares the scores with those of transformers' own
    model in fp32. A check that a device has passed before is not repeated. The exit code is 1 if a device
    fails.
    """
    proven = prove_model(settings)
    if as_json:
        echo(json_of(proven, indent=2))
    else:
        console().print(_table(proven))
        for device, reason in proven.refused.items():
            echo(f"{device} refuses it: {reason}")
    if proven.refused:
        raise SystemExit(1)


def _table(proven: Proven) -> Table:
    names = "device", "backend", "precision", "way", "differs by", "allowed", "with its company", "Spearman"
    table = Table(*names, box=SIMPLE_HEAD)
    for device, proof in proven.proofs.items():
        figures = (f"{number:.2g}" for number in (proof.difference, proof.bound, proof.company))
        table.add_row(device, proof.backend, proof.precision, proof.way, *figures, f"{proof.spearman:.4f}")
    return table


for _command in (
    describe, prove, transfer.push, transfer.pull, listing.list_models, listing.show, aliases.alias,
    aliases.promote, aliases.rollback, aliases.remove, compare,
):  # fmt: skip
    models.add_command(_command)


def _lines(report: dict[str, Any]) -> list[str]:
    outputs, length, prompt = report["outputs"], report["max_length"], report["prompt"]
    lines = [
        f"family      {report['family']}: {report['kind']}",
        f"revision    {report['revision'] or 'a directory'}",
        f"pooling     {report['pooling']}",
        f"outputs     {', '.join(outputs) if len(outputs) > 1 else '1'}",
        f"activation  {report['activation'] or 'sigmoid for one output, none for several'}",
        f"length      {'any' if length is None else f'{length:,}'} tokens",
        f"instruction {report['instruction'] or 'none'}",
        f"prompt      {'the query and the passage' if prompt is None else repr(prompt)}",
    ]
    others = [f"{name}: {text!r}" for name, text in report["prompts"].items() if text]
    lines += [f"its prompts {', '.join(others)}"] if others else []
    for name, precisions in report["backends"].items():
        able = [precision for precision, obstacle in precisions.items() if obstacle is None]
        why = "; ".join(dict.fromkeys(obstacle for obstacle in precisions.values() if obstacle))
        shown = ", ".join(able) + (f" ({why})" if able and why else "") or f"no: {why}"
        lines.append(f"{name:<11} {shown}")
    refused = report["refused"]
    return [*lines, f"cannot be scored so: {refused}" if refused else "can be scored"]
