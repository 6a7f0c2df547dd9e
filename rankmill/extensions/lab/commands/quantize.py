"""``rankmill quantize``: make a model directory for 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.show import console
from rankmill.extensions.lab.agreement import TOP
from rankmill.extensions.lab.pairs import read_pairs
from rankmill.extensions.lab.precision import REFERENCE
from rankmill.extensions.lab.quantize import Quantized, check_output, require_quantizing
from rankmill.extensions.lab.quantize import quantize as make
from rankmill.jobs.contract.spec import RECIPE
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.formats.base import TextColumns


class QuantizeOptions(options.CommandOptions):
    """Options of quantize."""

    output: Annotated[Path, Field(title="DIR")]
    """Directory to make; it appears when it is complete."""
    pairs: options.File | None = None
    """Pairs of many queries, like the pairs to score, in any format of score-file.  [default: shipped
    pairs]
    """
    query_column: options.Column = "query"
    """Column with the query."""
    passage_column: options.Column = "passage"
    """Column with the passage."""
    label_column: options.Column | None = None
    """Column with the relevance as a number; with it, nDCG@10 is reported, too."""
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Lowest rank correlation with fp32 that the quantized model may have, as the mean over the queries."""
    sample: Annotated[int, Field(ge=2)] = 2000
    """Maximum number of pairs to measure with."""
    trials: Annotated[int, Field(ge=1)] = 16
    """Maximum number of variants of the model to measure; each leaves different layers out of 8 bits."""
    force: bool = False
    """Replace DIR if quantize has made it."""


@options.command("quantize", interrupted="nothing is left of it")
@click.argument("model")
@options.of(QuantizeOptions)
@options.settings("registry", "revision", "max_length", "threads", others=("model",))
@options.quiet
@options.as_json
def quantize(asked: QuantizeOptions, settings: Settings, quiet: bool, as_json: bool) -> None:
    """Make a model directory for 8 bits.

    The command calibrates MODEL on some of the pairs. With other pairs, the command compares the rankings in
    int8 with those in fp32. If the rankings differ too much for the threshold, the command keeps some layers
    out of 8 bits. Score with DIR as with any model: --model DIR --precision int8. In other precisions DIR
    scores as MODEL does. MODEL may be NAME@VERSION or NAME@ALIAS in the registry, and rankmill models push
    takes DIR.
    """
    require_quantizing()
    check_output(asked.output, asked.force)
    columns = TextColumns(asked.query_column, asked.passage_column)
    read = read_pairs(asked.pairs, columns, asked.label_column, asked.sample)
    made = make(
        settings, read, asked.output, threshold=asked.threshold, trials=asked.trials, force=asked.force,
        say=lambda line: None if quiet else click.echo(line, err=True),
    )  # fmt: skip
    if as_json:
        click.echo((asked.output / RECIPE).read_text(encoding="utf-8"), nl=False)
        return
    if not quiet:
        console().print(_table(made))
    if not quiet or not made.best.kept:
        click.echo(_verdict(made, asked.output, asked.threshold))


def _table(made: Quantized) -> Table:
    figures = "Spearman", f"top {TOP} shared", "nDCG@10"
    table = Table("", f"Spearman with {REFERENCE} (95% interval)", *figures[1:], box=SIMPLE_HEAD)
    for name, measured in (
        (REFERENCE, made.reference), ("int8 as it comes", made.plain), ("int8 quantized", made.best.measured)
    ):  # fmt: skip
        table.add_row(name, *(measured.figures[figure] for figure in figures))
    ranks = made.reference.agreement
    table.caption = f"{ranks.rows:,} rows of {ranks.queries:,} queries, none of them calibrated on"
    return table


def _verdict(made: Quantized, output: Path, threshold: float) -> str:
    best = made.best
    share = f"{1 - best.share:.1%} of its matrix products are in 8 bits"
    if best.kept:
        return f"{output} keeps {threshold:g}: {share}"
    better = " 8 bits as they come rank no worse." if made.plain.agreement.spearman >= best.spearman else ""
    return f"{output} is not shown to keep {threshold:g}: {share}.{better}"
