"""``rankmill mine``: choose hard negatives from a scored run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import pandas as pd

from rankmill.cli import options
from rankmill.cli.show import echo
from rankmill.cli.standard_output import new_table
from rankmill.extensions.rankings.mine import Mined, Rules, mine, read_scored
from rankmill.extensions.rankings.scored import lacks_passages
from rankmill.extensions.rankings.training_data import Corpus, Form, text_keys, training_rows, with_rows
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import Columns, Files, OnDuplicate
from rankmill.producer.files.corpus.datasets import source_path
from rankmill.producer.files.corpus.texts import TextFields
from rankmill.producer.files.formats.delimited import TSV, TsvWriter
from rankmill.producer.files.formats.table import format_of, split_ending
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.writing import whole_file

if TYPE_CHECKING:
    import pyarrow as pa

    from rankmill.producer.files.formats.base import Writer
    from rankmill.producer.files.outputs import OutputFormat


class MineOptions(Rules, options.NewTable):
    """Options of ``rankmill mine``: which negatives to choose, and which rows to make of them."""

    format: Form = "triplet"
    """Form of the rows, as the trainer reads them."""
    qrels: options.File | None = None
    """Judgements: TREC, BEIR's TSV, or irds:NAME.  [default: the column relevance]"""
    queries: Files = ()
    """Files with the texts of the queries, if SCORED has none."""
    corpus: Files = ()
    """Files with the texts of the passages, if SCORED has none."""
    queries_id: options.Column | None = None
    """Column with the queries' ids.  [default: the only column with a known name]"""
    queries_text: Columns = ()
    """Column with the queries' texts. If you name several, their texts are joined.
    [default: the only column with a known name]"""
    corpus_id: options.Column | None = None
    """Column with the passages' ids.  [default: the only column with a known name]"""
    corpus_text: Columns = ()
    """Column with the passages' texts. If you name several, their texts are joined.
    [default: title, if it exists, and the only column with a known name]"""
    columns: Columns = ()
    """Names of all columns of a corpus in CSV or TSV without a header, in order."""
    on_duplicate: OnDuplicate = "error"
    """If an id has two texts in the queries or the corpus: stop with an error, or take the first or
    the last.
    """
    score_column: options.Column | None = None
    """Column with the scores.  [default: the one that the metadata of Parquet names, or score]"""
    with_scores: bool = False
    """Write scores to distil from, in place of labels. flagembedding and pylate always have scores."""

    def source(self, scored: AnyPath) -> AnyPath | Corpus:
        """Return the files of ``--queries`` and ``--corpus``, or `scored` if these options are not given.

        Raises `InputError` if a file does not exist, or if an option is given without another option that it
        needs, such as ``--queries`` without ``--corpus``.
        """
        if bool(self.queries) != bool(self.corpus):
            raise InputError("--queries and --corpus belong together")
        if not self.queries:
            named = (self.queries_id, self.queries_text, self.corpus_id, self.corpus_text, self.columns)
            if any(named) or self.on_duplicate != "error":
                raise InputError(
                    "--queries-id, --queries-text, --corpus-id, --corpus-text, --columns and --on-duplicate "
                    "need --queries and --corpus"
                )
            return scored
        queries = find_files([str(source_path(name, "queries")) for name in self.queries])
        corpus = find_files([str(source_path(name, "docs")) for name in self.corpus])
        return Corpus(
            [file.path for file in queries],
            [file.path for file in corpus],
            TextFields("queries", self.queries_id, self.queries_text),
            TextFields("corpus", self.corpus_id, self.corpus_text, self.columns),
            self.on_duplicate,
        )


@options.command("mine")
@click.argument("scored", type=options.PATH)
@options.of(MineOptions)
@options.force
def mine_negatives(scored: AnyPath, asked: MineOptions, force: bool) -> None:
    """Choose hard negatives from a scored run.

    The rules are those of sentence-transformers' mine_hard_negatives. SCORED is an output of score-file --run
    RUN --queries QUERIES --corpus CORPUS --qrels QRELS --with-texts. SCORED may also be any other scored run;
    --qrels, --queries and --corpus then give the judgements and texts that it lacks. A run that was scored
    once can be mined again with other options.
    """
    form = asked.format
    with new_table(asked, format_of(scored), "training data is not a TREC run", force=force) as (
        output,
        target,
    ):
        source = asked.source(scored)
        qrels = source_path(asked.qrels, "qrels") if asked.qrels else None
        ids = read_scored(scored, asked.score_column, qrels)
        if asked.range_max and lacks_passages(ids):
            raise InputError(
                f"{scored}: --range-max counts passages of the run, and the file lacks some, as after --top-k"
            )
        keys = text_keys(source, ids)
        mined = list(mine(ids, asked, keys))
        used = with_rows(mined, form, asked.num_negatives)
        table = training_rows(used, ids, source, form, with_scores=asked.with_scores)
        if not len(table):
            raise InputError(f"{scored}: no negatives are left; are the margins or thresholds too strict?")
        with whole_file(output) as unfinished:
            writer = _writer(unfinished, target, output, table.schema, form)
            writer.write(table)
            writer.close({})
    say = partial(echo, err=output != asked.output)
    queries = ids["query_id"].nunique()
    place = f"in {output}" if output == asked.output else "on standard output"
    say(f"{len(table):,} rows from {len(used):,} of {queries:,} queries are {place}")
    say(_positives(used, ids, asked.min_relevance))
    if line := _same_texts(mined) if keys else f"texts are not compared, as {scored} has none":
        say(line)
    for files, columns in source.taken.items() if isinstance(source, Corpus) else ():
        say(f"{files}: {columns}")
    if len(used) < queries:
        say(
            f"without rows: {queries - len(mined):,} queries that have no scored relevant passage, and "
            f"{len(mined) - len(used):,} that have too few negatives"
        )


def _writer(unfinished: Path, target: OutputFormat, output: AnyPath, schema: pa.Schema, form: Form) -> Writer:
    """Make the writer of a file of training data. A TSV file of MS MARCO's triples of ids has no header."""
    if form == "msmarco" and target.of(output) is TSV:
        return TsvWriter(unfinished, schema, split_ending(output)[1], header=False)
    return target.writer(unfinished, output, schema, "score")


def _same_texts(mined: list[Mined]) -> str:
    """Return a sentence that says how many passages were left out because another passage has their text;
    empty if no passage was left out.
    """
    copies, repeats = sum(query.copies for query in mined), sum(query.repeats for query in mined)
    if not copies and not repeats:
        return ""
    return (
        f"left out as their text is there already: {copies:,} passages that are relevant under another id, "
        f"{repeats:,} that repeat another candidate"
    )


def _positives(used: list[Mined], ids: pd.DataFrame, min_relevance: int) -> str:
    rows = np.concatenate([query.positives for query in used])
    grades, numbers = np.unique(ids["relevance"].to_numpy()[rows].astype(int), return_counts=True)
    by_grade = ", ".join(
        f"{number:,} of grade {grade}" for grade, number in zip(grades, numbers, strict=True)
    )
    more = "" if grades[-1] == min_relevance else " (--min-relevance says which count)"
    return f"relevant passages: {by_grade}{more}"
