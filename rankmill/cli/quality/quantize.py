"""``rankmill quantize``: a model directory for 8 bits, calibrated and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rankmill.cli import options
from rankmill.jobs.contract.spec import RECIPE
from rankmill.jobs.runtime.settings import load_settings
from rankmill.lab.quantization.calibration import require_packages
from rankmill.lab.quantization.make import Quantized, check_output
from rankmill.lab.quantization.make import quantize as make
from rankmill.lab.quantization.pairs import read_pairs
from rankmill.lab.tuning.agreement import TOP
from rankmill.lab.tuning.precision_check import REFERENCE, Measured
from rankmill.producer.files.formats.base import TextColumns


@options.command("quantize", interrupted="nothing is left of it")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Directory to make; it appears whole.")  # fmt: skip
@click.option("--pairs", metavar="FILE", help="Pairs like those to be scored, of many queries, as score-file "
              "takes them.  [default: some that rankmill ships]")  # fmt: skip
@options.columns()
@click.option("--label-column", metavar="NAME", help="Relevance as a number; also report nDCG@10.")
@click.option("--threshold", type=click.FloatRange(0, 1), default=0.999, show_default=True,
              help="Mean rank correlation with fp32 within a query that is to be kept.")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=2), default=2000, show_default=True,
              help="Pairs to measure with, at most.")  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), default=16, show_default=True,
              help="Models to measure, at most: each with other layers left out of 8 bits.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace DIR if quantize has made it.")
@options.settings("registry", "revision", "max_length", "threads")
@options.quiet
@options.as_json
def quantize(
    model: str,
    output: Path,
    pairs: str | None,
    query_column: str,
    passage_column: str,
    label_column: str | None,
    threshold: float,
    sample: int,
    trials: int,
    force: bool,
    config: str | None,
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Make a model directory for 8 bits.

    Calibrates MODEL on some of the pairs, measures on others how int8 ranks beside fp32, and leaves layers
    out of 8 bits where that keeps the threshold. Score with it as with any model: --model DIR --precision
    int8. Its other precisions are MODEL's. MODEL may be NAME@VERSION or NAME@ALIAS in the registry, and
    rankmill models push takes DIR.
    """
    settings = load_settings({"model": model, **flags}, config)
    require_packages()
    check_output(output, force)
    read = read_pairs(pairs, TextColumns(query_column, passage_column), label_column, sample)
    made = make(
        settings, read, output, threshold=threshold, trials=trials, force=force,
        say=lambda line: None if quiet else click.echo(line, err=True),
    )  # fmt: skip
    if as_json:
        click.echo((output / RECIPE).read_text(encoding="utf-8"), nl=False)
    else:
        Console().print(_table(made))
        click.echo(_verdict(made, output, threshold))


def _table(made: Quantized) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", f"Spearman with {REFERENCE} (95% interval)", f"top {TOP} shared", "nDCG@10"):
        table.add_column(heading)
    rows: dict[str, Measured] = {
        REFERENCE: made.reference, "int8 as it comes": made.plain, "int8 quantized": made.best.measured
    }  # fmt: skip
    for name, each in rows.items():
        ranks = each.agreement
        shared = "" if ranks.top_overlap is None else f"{ranks.top_overlap:.1%}"
        table.add_row(name, str(ranks), shared, "" if each.ndcg is None else f"{each.ndcg:.4f}")
    ranks = made.reference.agreement
    table.caption = f"{ranks.rows:,} rows of {ranks.queries:,} queries, none of them calibrated on"
    return table


def _verdict(made: Quantized, output: Path, threshold: float) -> str:
    best = made.best
    share = f"{1 - best.share:.1%} of its matrix products are in 8 bits"
    if best.kept:
        return f"{output} keeps {threshold:g}: {share}"
    others = len(made.trials) - 1
    nor = f", nor is any of {others} with layers left out" if others else ""
    better = " 8 bits as they come rank no worse." if made.plain.agreement.spearman >= best.spearman else ""
    return f"{output} is not shown to keep {threshold:g}{nor}: {share}.{better}"
