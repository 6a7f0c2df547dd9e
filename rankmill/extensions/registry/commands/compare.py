"""``rankmill models compare``: compare two models on a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.show import console
from rankmill.extensions.lab.pairs import FileSample
from rankmill.extensions.registry.compare import ModelComparison, compare_models
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.formats.base import TextColumns

_SHOWN = 10


@options.command("compare")
@click.argument("first", metavar="NAME@V1")
@click.argument("second", metavar="NAME@V2")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...")
@options.of(options.SampleOptions, "pairs")
@click.option("--report", metavar="DIR", type=click.Path(path_type=Path),
              help="Folder for a report with plots; needs matplotlib.")  # fmt: skip
@options.settings("registry", "precision", "queue", "device", "backend", redis_url=options.REDIS_OR_EMBEDDED)
@options.as_json
def compare(
    first: str, second: str, inputs: tuple[str, ...], pairs: options.SampleOptions, report: Path | None,
    settings: Settings, as_json: bool,
) -> None:  # fmt: skip
    """Compare two versions on FILE.

    The command scores a sample of FILE with both versions. It compares how they rank the passages of each
    query, how fast they are and, with labels, their nDCG. The report shows the queries whose rankings differ
    most.
    """
    options.refuse_of_workers(embedded=not settings.redis_url)
    if report:
        options.require_plots()
    columns = TextColumns(pairs.query_column, pairs.passage_column)
    sample = FileSample(inputs, pairs.sample, columns, pairs.label_column)
    comparison = compare_models((first, second), sample, _SHOWN, settings)
    if as_json:
        click.echo(json.dumps(_as_json(comparison)))
    else:
        console().print(_table(comparison))
    if report:
        from rankmill.extensions.registry.report import write_report  # matplotlib is slow to import

        path = write_report(comparison, report)
        click.echo(f"the report is in {path}", err=as_json)


def _as_json(comparison: ModelComparison) -> dict[str, Any]:
    sides = [
        {"model": side.model, "pairs_per_second": round(side.pairs_per_second, 1), **side.measured.values}
        for side in comparison.sides
    ]
    return {"models": sides, "differences": [asdict(difference) for difference in comparison.differences]}


def _table(comparison: ModelComparison) -> Table:
    table = Table("", *(side.model for side in comparison.sides), box=SIMPLE_HEAD)
    for name in comparison.sides[0].figures:
        row = [side.figures[name] for side in comparison.sides]
        if any(row):
            table.add_row(name.replace("Spearman", "Spearman with the first"), *row)
    worst = comparison.differences[0]
    table.caption = f"least alike ({worst.spearman:.2f}): {worst.query[:60]}"
    return table
