"""``rankmill evaluate``: measure a ranking by relevance judgements."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from rankmill.cli import options
from rankmill.cli.show import echo
from rankmill.jobs.runtime.logs import set_up
from rankmill.producer.files.stores.paths import AnyPath

if TYPE_CHECKING:
    from rankmill.extensions.rankings.evaluate import Result


class EvaluateOptions(options.CommandOptions):
    """Options of evaluate."""

    qrels: options.File
    """Judgements: TREC (query 0 document relevance), BEIR's TSV, or irds:NAME."""
    run: options.StoredPath | None = None
    """The ranking to compare with.  [default: the run that was scored]"""
    measures: Annotated[str, Field(title="NAME,...")] = "nDCG@10,RR@10,R@100"
    """Measures of ir-measures; RR is MRR, R is recall."""
    score_column: options.Column | None = None
    """Column with the scores.  [default: the one that the metadata of Parquet names, or score]"""


@options.command("evaluate")
@click.argument("scored", type=options.PATH)
@options.of(EvaluateOptions)
@options.as_json
def evaluate(scored: AnyPath, asked: EvaluateOptions, as_json: bool) -> None:
    """Measure a ranking before and after reranking.

    SCORED is an output of score-file or a TREC run. A judged query that SCORED lacks counts as 0. If SCORED
    lacks judged queries, further lines have the means without these queries. p is the p-value of a paired
    t-test over all judged queries. With --json, the values of every query are printed, too.
    """
    from rankmill.extensions.rankings import evaluate as evaluation
    from rankmill.producer.files.corpus.datasets import source_path
    from rankmill.producer.files.corpus.rankings import read_qrels

    set_up("warning", "auto")
    after, before = evaluation.read_scored(scored, asked.score_column, asked.run)
    names = [name.strip() for name in asked.measures.split(",") if name.strip()]
    results = evaluation.evaluate(after, before, read_qrels(source_path(asked.qrels, "qrels")), names)
    echo(json.dumps([asdict(result) for result in results]) if as_json else "\n".join(_table(results)))


def _table(results: list[Result]) -> list[str]:
    lines = [_figures(result.measure, result.before, result.after) for result in results]
    if results[0].before is not None:
        lines = [
            f"{line}{_p(result)}  {result.better}, {result.worse}"
            for line, result in zip(lines, results, strict=True)
        ]
        lines.insert(0, f"{'':<12}{'before':>9}{'after':>9}{'change':>9}{'p':>9}  queries better, worse")
    if results[0].ranked < results[0].judged:
        lines.append(f"of the {results[0].ranked:,} of {results[0].judged:,} judged queries that are ranked:")
        lines += [_figures(result.measure, result.before_ranked, result.after_ranked) for result in results]
    return lines


def _figures(measure: str, before: float | None, after: float) -> str:
    if before is None:
        return f"{measure:<12}{after:>9.4f}"
    return f"{measure:<12}{before:>9.4f}{after:>9.4f}{after - before:>+9.4f}"


def _p(result: Result) -> str:
    p = result.p_value
    return f"{'-' if p is None else '<0.0001' if p < 0.0001 else f'{p:.4f}':>9}"
