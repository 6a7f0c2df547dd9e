"""``rankmill mine``: hard negatives from a scored run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from rankmill.cli import options
from rankmill.jobs.contract.errors import InputError
from rankmill.lab.mining.mine import FORMATS, Mined, Rules, mine, read_ids, training_rows, with_rows
from rankmill.producer.files.formats.table import TREC
from rankmill.producer.files.outputs import OutputFormat, check_target
from rankmill.producer.files.stores.writing import whole_file


@options.command("mine")
@click.argument("scored", type=options.PATH)
@click.option("-o", "--output", required=True, type=options.PATH, metavar="FILE",
              help="File to write: .parquet, .csv, .tsv or .jsonl.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(FORMATS), default="triplet", show_default=True,
              help="Rows to write.")  # fmt: skip
@click.option("--min-relevance", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Lowest grade of a relevant passage; one of a lower grade is left out.")  # fmt: skip
@click.option("--num-negatives", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
              help="Negatives of each query.")  # fmt: skip
@click.option("--range-min", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Skip the N hardest.")  # fmt: skip
@click.option("--range-max", type=click.IntRange(min=1), metavar="N",
              help="Take only the run's first N passages of each query.  [default: all]")  # fmt: skip
@click.option("--max-score", type=float, metavar="X", help="Highest score of a negative.")
@click.option("--min-score", type=float, metavar="X", help="Lowest score of a negative.")
@click.option("--absolute-margin", type=float, metavar="X",
              help="A negative scores at least X less than every relevant passage.")  # fmt: skip
@click.option("--relative-margin", type=float, metavar="X",
              help="The same, X times the relevant passage's score; 0.05 is 5%.")  # fmt: skip
@click.option("--sampling-strategy", type=click.Choice(["top", "random"]), default="top", show_default=True,
              help="Take the hardest, or any.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of random sampling.")
@click.option("--with-scores", is_flag=True, help="Write scores, to distil from; they replace labels.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def mine_negatives(
    scored: Path, output: Path, form: str, with_scores: bool, force: bool, **rules: Any
) -> None:
    """Choose hard negatives from a scored run.

    The rules are those of sentence-transformers' mine_hard_negatives. SCORED is a Parquet output of
    score-file --run RUN --queries QUERIES --corpus CORPUS --qrels QRELS --with-texts. It is scored once,
    and can be mined with any options.
    """
    target = OutputFormat()
    check_target(output, target)
    if target.of(output) is TREC:
        raise InputError(
            f"{output}: training data is no TREC run; name a .parquet, .csv, .tsv or .jsonl file"
        )
    if output.exists() and not force:
        raise InputError(f"{output} exists already; replace it with --force or name another with -o")
    chosen = Rules(**rules)
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
