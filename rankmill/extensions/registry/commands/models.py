"""``rankmill models``: describe and prove models, and keep them in a registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.common import CONTEXT
from rankmill.cli.show import console, echo
from rankmill.extensions.lab.ask import ask
from rankmill.extensions.registry.commands import aliases, listing, transfer
from rankmill.extensions.registry.commands.compare import compare
from rankmill.jobs.contract.proof import Proof
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
    which precisions can run the model on this host, and why others cannot. The command reads the model's
    small files, not its weights.
    """
    report = ask("report", {"spec": settings.spec().model_dump()}, "looking at the model", settings)
    echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))


@options.command("prove")
@click.argument("model")
@options.settings(
    "revision", "precision", "prompt_template", "backend", "threads", "registry", others=("model",)
)
@options.as_json
def prove(settings: Settings, as_json: bool) -> None:
    """Prove that the devices of this host compute MODEL's scores correctly, as workers do before they score.

    The command scores test pairs as a worker would, and compares the scores with those of transformers' own
    model in fp32. A check that a device has passed before is not repeated. The exit code is 1 if a device
    fails.
    """
    answer = ask("prove", {"spec": settings.spec().model_dump()}, "proving the model", settings)
    proofs = {device: Proof.model_validate(proof) for device, proof in answer["proofs"].items()}
    if as_json:
        echo(json.dumps(answer, indent=2))
    else:
        console().print(_table(proofs))
        for device, reason in answer["refused"].items():
            echo(f"{device} refuses it: {reason}")
    if answer["refused"]:
        raise SystemExit(1)


def _table(proofs: Mapping[str, Proof]) -> Table:
    names = "device", "backend", "precision", "way", "differs by", "allowed", "with its company"
    table = Table(*names, box=SIMPLE_HEAD)
    for device, proof in proofs.items():
        figures = (f"{number:.2g}" for number in (proof.difference, proof.bound, proof.company))
        table.add_row(device, proof.backend, proof.precision, proof.way, *figures)
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
