"""``rankmill evaluate``: measure a ranking by relevance judgements."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankmill.cli import options
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.logs import set_up

if TYPE_CHECKING:
    from rankmill.lab.evaluation.evaluate import Result


@options.command("evaluate")
@click.argument("scored", type=options.PATH)
@click.option("--qrels", required=True, metavar="FILE",
              help="Judgements: TREC (query 0 document relevance), BEIR's TSV, or irds:NAME.")  # fmt: skip
@click.option("--run", "before", type=options.PATH, metavar="FILE",
              help="The ranking to compare with.  [default: the run that was scored]")  # fmt: skip
@click.option("--measures", default="nDCG@10,RR@10,R@100", show_default=True, metavar="NAME,...",
              help="Measures of ir-measures; RR is MRR, R is recall.")  # fmt: skip
@click.option(
    "--score-column", default="score", show_default=True, metavar="NAME", help="Column with the scores."
)
@click.option("--by-query", is_flag=True, help="Print the values of every query.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the changes into a file that ends in .svg, .png or .pdf.")  # fmt: skip
@options.as_json
def evaluate(
    scored: Path,
    qrels: str,
    before: Path | None,
    measures: str,
    score_column: str,
    by_query: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Measure a ranking before and after reranking.

    SCORED is an output of score-file or a TREC run. A judged query that it lacks counts as 0.
    """
    from rankmill.lab.evaluation import evaluate as evaluation
    from rankmill.lab.evaluation.rankings import ranking_frame, read_scored
    from rankmill.producer.files.corpus.datasets import source_path
    from rankmill.producer.files.corpus.rankings import read_qrels

    set_up("warning", "auto")
    if picture and find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'rankmill[bench]'")
    after, own = read_scored(scored, score_column)
    ranking = ranking_frame(before) if before else own
    names = [name.strip() for name in measures.split(",") if name.strip()]
    results = evaluation.evaluate(after, ranking, read_qrels(source_path(qrels, "qrels")), names)
    if picture:
        evaluation.plot(results, picture)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results]))
        return
    for line in _table(results):
        click.echo(line)
    if by_query:
        for line in _queries(results):
            click.echo(line)


def _table(results: list[Result]) -> list[str]:
    if results[0].before is None:
        return [f"{result.measure:<12}{result.after:>9.4f}" for result in results]
    lines = [f"{'':<12}{'before':>9}{'after':>9}{'change':>9}  queries better, worse"]
    for each in results:
        change = each.after - (each.before or 0)
        figures = f"{each.before:>9.4f}{each.after:>9.4f}{change:>+9.4f}"
        lines.append(f"{each.measure:<12}{figures}  {each.better}, {each.worse}")
    return lines


def _queries(results: list[Result]) -> list[str]:
    """One line for each query and measure, with tabs between the fields."""
    lines = ["query\tmeasure\tbefore\tafter"]
    for result in results:
        for query, (before, after) in result.by_query.items():
            lines.append(
                f"{query}\t{result.measure}\t{'' if before is None else f'{before:.4f}'}\t{after:.4f}"
            )
    return lines
