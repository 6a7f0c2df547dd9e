"""``rankmill check-precision``: measure how much a precision changes rankings before it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import click
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.show import console
from rankmill.extensions.lab.pairs import FileSample
from rankmill.extensions.lab.precision import REFERENCE, Measured, check_precisions
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.files.formats.base import TextColumns


class PrecisionRefused(RankmillError):
    """Raised if a precision ranks too differently from fp32, or loses rows."""


class PrecisionOptions(options.CommandOptions):
    """Options of check-precision."""

    precisions: Annotated[tuple[str, ...], Field(title="NAME")] = Field((), alias="precision")
    """Precision to check; repeat the option for several.  [default: the setting]"""
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Lowest rank correlation with fp32 that a precision may have, as the mean over the queries."""
    report_only: bool = False
    """Exit with 0 even if a precision ranks too differently or loses rows."""


@options.command("check-precision")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...")
@options.of(PrecisionOptions)
@options.of(options.SampleOptions, "pairs")
@options.flags(
    "model", "revision", "max_length", "queue", "device", "backend", redis_url=options.REDIS_OR_EMBEDDED
)
@options.as_json
def check_precision(
    inputs: tuple[str, ...],
    asked: PrecisionOptions,
    pairs: options.SampleOptions,
    config: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Compare the rankings of precisions with those of fp32.

    The command scores a sample of FILE in fp32 and in each precision, and compares how they rank the passages
    of each query. The exit code is 1 if a precision is not certain to reach the threshold, or gives some rows
    no score. The exit code is 2 if nothing could be compared.
    """
    columns = TextColumns(pairs.query_column, pairs.passage_column)
    settings = load_settings(flags, config)
    options.refuse_of_workers(embedded=not settings.redis_url)
    precisions = [load_settings({**flags, "precision": each}, config).precision for each in asked.precisions]
    wanted = precisions or [settings.precision]
    sample = FileSample(inputs, pairs.sample, columns, pairs.label_column)
    results = check_precisions(sample, wanted, settings)
    if as_json:
        rows = [each.values | {"verdict": each.agreement.verdict(asked.threshold)} for each in results]
        click.echo(json.dumps(rows))
    else:
        console().print(_table(results))
    bad = [each for each in results[1:] if each.agreement.verdict(asked.threshold) != "kept" or each.lost]
    if bad and not asked.report_only:
        reasons = "; ".join(_reason(each, asked.threshold) for each in bad)
        raise PrecisionRefused(f"{reasons}: use another precision, lower --threshold, or give --report-only")


def _table(results: Sequence[Measured]) -> Table:
    _, *others = results[0].figures
    spearman = f"Spearman with {REFERENCE} (95% interval)"
    table = Table("precision", "runs on", spearman, *others, box=SIMPLE_HEAD)
    for result in results:
        table.add_row(result.precision, f"{result.backend}, {result.device}", *result.figures.values())
    ranks = results[0].agreement
    table.caption = f"{ranks.rows:,} rows of {ranks.queries:,} queries"
    return table


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
