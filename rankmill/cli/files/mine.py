"""``rankmill mine``: hard negatives from a scored run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
import numpy as np
import pandas as pd
from pydantic import Field

from rankmill.cli import options
from rankmill.jobs.contract.errors import InputError
from rankmill.lab.mine import Form, Mined, Rules, mine, read_ids, training_rows, with_rows
from rankmill.producer.files.stores.writing import whole_file

_Score = Annotated[float, Field(title="X")]


class MineOptions(options.NewTable):
    """Which negatives to take, by the names of `Rules`, and what is made of them."""

    format: Form = "triplet"
    """Rows to write."""
    min_relevance: options.Number = 1
    """Lowest grade of a relevant passage; one of a lower grade is left out."""
    num_negatives: options.Number = 3
    """Negatives of each query."""
    range_min: Annotated[int, Field(ge=0, title="N")] = 0
    """Skip the N hardest."""
    range_max: options.Number | None = None
    """Take only the run's first N passages of each query.  [default: all]"""
    max_score: _Score | None = None
    """Highest score of a negative."""
    min_score: _Score | None = None
    """Lowest score of a negative."""
    absolute_margin: _Score | None = None
    """A negative scores at least X less than every relevant passage."""
    relative_margin: _Score | None = None
    """The same, X times the relevant passage's score; 0.05 is 5%."""
    sampling_strategy: Literal["top", "random"] = "top"
    """Take the hardest, or any."""
    seed: Annotated[int, Field(title="N")] = 0
    """Seed of random sampling."""
    with_scores: bool = False
    """Write scores, to distil from; they replace labels."""


@options.command("mine")
@click.argument("scored", type=options.PATH)
@options.of(MineOptions)
@options.force
def mine_negatives(scored: Path, asked: MineOptions, force: bool) -> None:
    """Choose hard negatives from a scored run.

    The rules are those of sentence-transformers' mine_hard_negatives. SCORED is a Parquet output of
    score-file --run RUN --queries QUERIES --corpus CORPUS --qrels QRELS --with-texts. It is scored once,
    and can be mined with any options.
    """
    output, form, with_scores = asked.output, asked.format, asked.with_scores
    target = options.new_table(output, "training data is no TREC run", force=force)
    chosen = Rules(**asked.model_dump(exclude={"output", "format", "with_scores"}))
    ids = read_ids(scored)
    found = list(mine(ids, chosen))
    used = with_rows(found, form, chosen)
    table = training_rows(used, ids, scored, form, chosen, with_scores=with_scores)
    if not len(table):
        raise InputError(f"{scored}: no negatives are left; are the margins or thresholds too strict?")
    with whole_file(output) as partial:
        writer = target.writer(partial, output, table.schema, "score")
        writer.write(table)
        writer.close({})
    queries = ids["query_id"].nunique()
    click.echo(f"{len(table):,} rows from {len(used):,} of {queries:,} queries are in {output}")
    click.echo(_positives(used, ids, chosen))
    if len(used) < queries:
        click.echo(
            f"without rows: {queries - len(found):,} queries that have no scored relevant passage, and "
            f"{len(found) - len(used):,} that have too few negatives"
        )


def _positives(used: list[Mined], ids: pd.DataFrame, rules: Rules) -> str:
    """What counted as relevant, by grade."""
    rows = np.concatenate([each.positives for each in used])
    grades, numbers = np.unique(ids["relevance"].to_numpy()[rows].astype(int), return_counts=True)
    by_grade = ", ".join(
        f"{number:,} of grade {grade}" for grade, number in zip(grades, numbers, strict=True)
    )
    more = "" if grades[-1] == rules.min_relevance else " (--min-relevance says which count)"
    return f"relevant passages: {by_grade}{more}"
