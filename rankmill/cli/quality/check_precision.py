"""``rankmill check-precision``: measure how much a precision changes rankings before it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rankmill.cli import options
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.runtime.settings import load_settings
from rankmill.lab.tuning.agreement import TOP
from rankmill.lab.tuning.precision_check import REFERENCE, Measured, check_precisions
from rankmill.producer.files.formats.base import TextColumns


class PrecisionRefused(RankmillError):
    """A precision ranks too differently from fp32, or loses rows."""


@options.command("check-precision")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...")
@click.option("--precision", "precisions", multiple=True, metavar="NAME",
              help="Precision to check; may be given several times.  [default: the settings']")  # fmt: skip
@click.option("--threshold", type=click.FloatRange(0, 1), default=0.999, show_default=True,
              help="Mean rank correlation with fp32 within a query that a precision must reach.")  # fmt: skip
@click.option("--report-only", is_flag=True, help="Exit with 0 whatever the verdict.")
@click.option(
    "--label-column", metavar="NAME", help="Column with the relevance as a number; also report nDCG@10."
)
@click.option("--sample", type=click.IntRange(min=2), default=2000, show_default=True,
              help="Number of rows to score: random ones, up to 50 of each query first.")  # fmt: skip
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

    Scores a sample of FILE in fp32 and in each precision, and compares how they rank the passages of each
    query. The exit code is 1 if a precision is below the threshold, may be below it, or loses rows; 2 if
    nothing could be compared.
    """
    columns = TextColumns(query_column, passage_column)
    settings = load_settings(flags, config)
    asked = [load_settings({**flags, "precision": each}, config).precision for each in precisions]
    found = check_precisions(inputs, columns, label_column, sample, asked or [settings.precision], settings)
    if as_json:
        click.echo(json.dumps([_as_json(each, threshold) for each in found]))
    else:
        Console().print(_table(found))
    bad = [each for each in found[1:] if each.agreement.verdict(threshold) != "kept" or each.lost]
    if bad and not report_only:
        raise PrecisionRefused(_refusal(bad, threshold))


def _as_json(measured: Measured, threshold: float) -> dict[str, Any]:
    found = asdict(measured)
    ranks = found.pop("agreement")
    return {**found, **ranks, "verdict": measured.agreement.verdict(threshold)}


def _table(found: Sequence[Measured]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    spearman = f"Spearman with {REFERENCE} (95% interval)"
    for heading in ("precision", "runs on", spearman, f"same top {TOP}", f"top {TOP} shared", "nDCG@10",
                    "rows lost"):  # fmt: skip
        table.add_column(heading)
    for each in found:
        ranks = each.agreement
        quality = "" if each.ndcg is None else f"{each.ndcg:.4f}"
        where = f"{each.backend}, {each.device}"
        tops = [_share(ranks.same_top), _share(ranks.top_overlap)]
        table.add_row(each.precision, where, str(ranks), *tops, quality, f"{each.lost:,}")
    ranks = found[0].agreement
    table.caption = f"{ranks.rows:,} rows of {ranks.queries:,} queries"
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _refusal(bad: Sequence[Measured], threshold: float) -> str:
    reasons = [_reason(each, threshold) for each in bad]
    return f"{'; '.join(reasons)}: use another precision, lower --threshold, or give --report-only"


def _reason(measured: Measured, threshold: float) -> str:
    ranks, name = measured.agreement, measured.precision
    match ranks.verdict(threshold):
        case "lost":
            return f"{name} has rank correlation {ranks} with {REFERENCE}, below {threshold:g}"
        case "undecided":
            return (
                f"{name} is undecided: it has rank correlation {ranks} with {REFERENCE}, which may be below "
                f"{threshold:g}; take a larger sample, about --sample {ranks.rows_wanted(threshold)}"
            )
    return f"{name} gives no score for {measured.lost:,} rows that have one in {REFERENCE}"
