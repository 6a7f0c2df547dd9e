"""``rankmill check-precision``: measure what a precision does to rankings before it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jobs.errors import RankmillError
from jobs.runtime.settings import load_settings
from producer.files.readers import TextColumns
from rankmill.cli import options
from rankmill.tuning.precision_check import REFERENCE, Measured, check_precisions


class PrecisionRefused(RankmillError):
    """A precision ranks too differently from fp32, or loses rows."""


@options.command("check-precision")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...")
@click.option("--precision", "precisions", multiple=True, metavar="NAME",
              help="To be checked; may be given several times.  [default: the settings']")  # fmt: skip
@click.option("--threshold", type=click.FloatRange(0, 1), default=0.999, show_default=True,
              help="Mean rank correlation with fp32 within a query that a precision must reach.")  # fmt: skip
@click.option("--report-only", is_flag=True, help="Exit with 0 whatever is found.")
@click.option("--label-column", metavar="NAME", help="Relevance as a number; also report nDCG@10.")
@click.option("--sample", type=click.IntRange(min=2), default=2000, show_default=True,
              help="Rows to score, from the beginning.")  # fmt: skip
@options.columns()
@options.settings(
    "model", "revision", "max_length", "queue", "device", "backend", redis_url=options.REDIS_OR_EMBEDDED
)
@options.as_json
def check_precision(
    inputs: tuple[str, ...],
    precisions: tuple[str, ...],
    threshold: float,
    report_only: bool,
    label_column: str | None,
    sample: int,
    query_column: str,
    passage_column: str,
    config: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Compare the rankings of precisions with those of fp32.

    Scores FILE in fp32 and in the others, and compares how they rank the passages of a query.
    Exits with 1 where a precision stays below the threshold or loses rows, with 2 where nothing could
    be compared.
    """
    columns = TextColumns(query_column, passage_column)
    settings = load_settings(flags, config)
    asked = [load_settings({**flags, "precision": each}, config).precision for each in precisions]
    found = check_precisions(inputs, columns, label_column, sample, asked or [settings.precision], settings)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
    else:
        Console().print(_table(found))
    bad = [each for each in found[1:] if each.spearman < threshold or each.lost]
    if bad and not report_only:
        raise PrecisionRefused(_refusal(bad, threshold))


def _table(found: Sequence[Measured]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("precision", "runs on", f"Spearman with {REFERENCE}", "nDCG@10", "rows lost"):
        table.add_column(heading)
    for each in found:
        quality = "" if each.ndcg is None else f"{each.ndcg:.4f}"
        where = f"{each.backend}, {each.device}"
        table.add_row(each.precision, where, f"{each.spearman:.5f}", quality, f"{each.lost:,}")
    return table


def _refusal(bad: Sequence[Measured], threshold: float) -> str:
    reasons = [
        f"{each.precision} ranks as {REFERENCE} does to {each.spearman:.5f}, below {threshold:g}"
        if each.spearman < threshold
        else f"{each.precision} gives no score for {each.lost:,} rows that have one in {REFERENCE}"
        for each in bad
    ]
    return f"{'; '.join(reasons)}: use another precision, or --threshold or --report-only if that will do"
