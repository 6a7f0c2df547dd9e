"""``rankmill models compare``: two models side by side on a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.watch import console
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.files.formats.base import TextColumns
from rankmill.registry.compare import Comparison, Side, compare_models

_SHOWN = 10


@options.command("compare")
@click.argument("first", metavar="NAME@V1")
@click.argument("second", metavar="NAME@V2")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--label-column", metavar="NAME", help="Column with the relevance as a number; also report nDCG@10."
)
@click.option("--sample", type=click.IntRange(min=2), default=2000, show_default=True,
              help="Number of rows to score: random ones, up to 50 of each query first.")  # fmt: skip
@click.option("--report", metavar="DIR", type=click.Path(path_type=Path),
              help="Folder for a report with plots; needs matplotlib.")  # fmt: skip
@options.columns()
@options.settings("registry", "precision", "queue", "device", "backend", redis_url=options.REDIS_OR_EMBEDDED)
@options.as_json
def compare(
    first: str,
    second: str,
    inputs: tuple[str, ...],
    label_column: str | None,
    sample: int,
    report: Path | None,
    query_column: str,
    passage_column: str,
    config: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Compare two versions on FILE.

    Scores a sample of FILE with both, and compares how they rank the passages of each query, their speed and,
    with labels, their nDCG. The report shows the queries that differ most.
    """
    if report and find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'rankmill[bench]'")
    columns = TextColumns(query_column, passage_column)
    settings = load_settings(flags, config)
    found = compare_models((first, second), inputs, columns, label_column, sample, _SHOWN, settings)
    if as_json:
        click.echo(json.dumps(_as_json(found)))
    else:
        console().print(_table(found))
    if report:
        from rankmill.registry.report import write_report  # matplotlib

        path = write_report(found, report)
        click.echo(f"the report is in {path}", err=as_json)


def _as_json(found: Comparison) -> dict[str, Any]:
    sides = [
        {
            "model": side.model,
            "pairs_per_second": round(side.pairs_per_second, 1),
            **{name: value for name, value in asdict(side.measured).items() if name != "agreement"},
            **asdict(side.measured.agreement),
        }
        for side in found.sides
    ]
    return {"models": sides, "differences": [asdict(each) for each in found.differences]}


def _table(found: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for side in found.sides:
        table.add_column(side.model)
    for name, row in zip(_ROWS, zip(*map(_figures, found.sides), strict=True), strict=True):
        if any(row):
            table.add_row(name, *row)
    worst = found.differences[0]
    table.caption = f"least alike ({worst.spearman:.2f}): {worst.query[:60]}"
    return table


_ROWS = ("runs on", "pairs/s", "Spearman with the first", "top 10 shared", "nDCG@10", "rows lost")


def _figures(side: Side) -> list[str]:
    measured, ranks = side.measured, side.measured.agreement
    return [
        f"{measured.backend}, {measured.device}, {measured.precision}",
        f"{side.pairs_per_second:,.0f}",
        str(ranks),
        "" if ranks.top_overlap is None else f"{ranks.top_overlap:.1%}",
        "" if measured.ndcg is None else f"{measured.ndcg:.4f}",
        f"{measured.lost:,}",
    ]
