"""``score-file``, also ``rankmill score``: score files of pairs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import asdict
from typing import Any

import click

from jobs.errors import ExitCode
from jobs.runtime.logs import set_up
from jobs.runtime.settings import load_settings
from producer.files.outputs import FORMATS, OutputFormat
from producer.files.readers import TextColumns
from producer.files.readers.delimited import DELIMITERS
from rankmill.cli import options
from rankmill.score_file import score_file as run_score_file
from rankmill.scoring.request import Request, RunRequest
from rankmill.scoring.summary import Summary

_WORTH_A_HINT = 1.3
"""The summary mentions int8 if it would be at least this many times as fast."""

_EPILOG = """\b
Exit codes:
  0    every row was scored
  1    failed, or no server answers; no output was written (of one in parts,
       those that were complete), the scores are kept
  2    wrong usage or input, found before any work
  3    done, but some rows have no score: OUTPUT.errors.jsonl names them
  130  interrupted; no output was written (of one in parts, those that were
       complete), the scores are kept

\b
Scores are kept in OUTPUT.rankmill/ until the output is complete. After a
failure, an interruption or a crash, the same command continues.

--workers, --device and --backend are for embedded workers; other workers have
their own settings. Every setting of configs/base.yaml can be set in a file
(--config), by RANKMILL_<NAME> in the environment, or by its flag. A flag
overrides the environment, and the environment overrides the file."""


def _names(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The names in all uses of an option, each of which is a list separated by commas."""
    return tuple(name for names in given for name in names.split(",") if name)


def _run(
    run: str | None, queries: tuple[str, ...], corpus: tuple[str, ...], **others: Any
) -> RunRequest | None:
    if run and queries and corpus:
        return RunRequest(run, queries, corpus, **others)
    if run or queries or corpus or any(others.values()):
        raise click.UsageError("--run, --queries and --corpus belong together")
    return None


def _shard(context: click.Context, option: click.Parameter, given: str | None) -> tuple[int, int] | None:
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{given!r} is no part of a whole, such as 3/8")
    return int(found[1]), int(found[2])


def _delimiter(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given is None or given in DELIMITERS or (len(given) == 1 and given.isascii() and given not in '"\r\n'):
        return given
    raise click.BadParameter(f"{given!r} is not one character, or one of {', '.join(DELIMITERS)}")


@options.command("score-file", epilog=_EPILOG, interrupted="the output is not complete")
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option(
    "--run", metavar="FILE", help="Score a run: TREC, TSV, JSONL or Parquet with ids of queries and passages."
)
@click.option(
    "--queries", multiple=True, metavar="FILE", help="Texts of the run's queries: TSV, JSONL or Parquet."
)
@click.option(
    "--corpus", multiple=True, metavar="FILE", help="Texts of the run's passages: TSV, JSONL or Parquet."
)
@click.option("--depth", type=click.IntRange(min=1), metavar="N",
              help="Score only the first N passages of each query of the run, by rank.")  # fmt: skip
@click.option("--qrels", metavar="FILE",
              help="Judgements: add labels, and the relevant passages that the run lacks.")  # fmt: skip
@click.option("--with-texts", is_flag=True, help="Include query and passage in the output of a run.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write: .parquet, .csv, .tsv, .jsonl, .trec; text also .gz or .zst.  "
    "[default: <input stem>.scored.parquet]",
)
@click.option(
    "--output-format", type=click.Choice(FORMATS), help="Format of the output.  [default: as its name ends]"
)
@click.option("--top-k", type=click.IntRange(min=1), metavar="N",
              help="Keep the N best passages of each query, ranked.  [default: all]")  # fmt: skip
@click.option(
    "--tag", default="rankmill", show_default=True, metavar="NAME", help="Name of the run in TREC output."
)
@options.columns()
@click.option("--score-column", default="score", show_default=True, metavar="NAME", help="Column to add.")
@click.option("--rank-column", default="rank", show_default=True, metavar="NAME",
              help="Column to add for the rank (--top-k).")  # fmt: skip
@click.option("--query-id-column", metavar="NAME",
              help="Column with the query's id (--top-k, TREC).  [default: query_id, qid, ...]")  # fmt: skip
@click.option("--passage-id-column", metavar="NAME",
              help="Column with the passage's id (TREC).  [default: passage_id, doc_id, ...]")  # fmt: skip
@click.option("--text-columns", multiple=True, metavar="NAME,...", callback=_names,
              help="Columns to read as text, even if their values look like numbers.")  # fmt: skip
@click.option("--list-columns", multiple=True, metavar="NAME,...", callback=_names,
              help="Lists, such as the passages of a query, to make a row of each item.")  # fmt: skip
@click.option("--delimiter", metavar="TEXT", callback=_delimiter,
              help="Character between two fields of CSV or TSV.  [default: noticed]")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Score only the first N rows.")
@click.option("--shard", metavar="K/N", callback=_shard,
              help="Score only the K-th of N equal parts; rankmill merge puts them together.")  # fmt: skip
@click.option("--rows-per-part", type=click.IntRange(min=1), metavar="N",
              help="Write a folder of files of N rows each, which appear whole, one by one.")  # fmt: skip
@click.option("--on-null", type=click.Choice(["error", "fail"]), default="error", show_default=True,
              help="A null text: error gives that row an error, fail stops before any work.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--restart", is_flag=True, help="Start over; drop the scores of an interrupted run.")
@options.settings(
    "model", "revision", "precision", "max_length", "activation", "instruction", "prompt_template", "label",
    "long", "long_stride", "queue", "chunk_size", "workers", "device", "backend",
    redis_url=options.REDIS_OR_EMBEDDED,
)  # fmt: skip
@options.as_json
@options.quiet
@click.option("-v", "--verbose", is_flag=True, help="More messages: one for each chunk.")
@options.version
def score_file(
    inputs: tuple[str, ...],
    run: str | None,
    queries: tuple[str, ...],
    corpus: tuple[str, ...],
    depth: int | None,
    qrels: str | None,
    with_texts: bool,
    output: str | None,
    output_format: str | None,
    top_k: int | None,
    tag: str,
    query_column: str,
    passage_column: str,
    score_column: str,
    rank_column: str,
    query_id_column: str | None,
    passage_id_column: str | None,
    text_columns: tuple[str, ...],
    list_columns: tuple[str, ...],
    delimiter: str | None,
    limit: int | None,
    shard: tuple[int, int] | None,
    rows_per_part: int | None,
    on_null: str,
    force: bool,
    restart: bool,
    config: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Score the pairs of INPUT files with a cross-encoder.

    INPUT is a Parquet, CSV, TSV or JSON file (text also gzipped or zstd-compressed), a directory, a glob,
    or - for standard input, with a query and a passage in each row. The output holds all columns of the
    input, in its order, and the score; with --top-k, the best passages of each query; as a TREC run, ids,
    ranks and scores.

    With --run, --queries and --corpus, the pairs are those of a run, and their texts are looked up by id in
    an index that is made once and kept beside the corpus.
    """
    request = Request(
        inputs=inputs,
        output=output,
        columns=TextColumns(query_column, passage_column),
        score_column=score_column,
        text_columns=text_columns,
        allow_nulls=on_null == "error",
        force=force,
        restart=restart,
        quiet=quiet,
        form=OutputFormat(output_format, top_k, rank_column, query_id_column, passage_id_column, tag),
        delimiter=delimiter,
        list_columns=list_columns,
        limit=limit,
        shard=shard,
        rows_per_part=rows_per_part,
        run=_run(run, queries, corpus, depth=depth, with_texts=with_texts, qrels=qrels),
    )
    flags["log_level"] = "error" if quiet else "debug" if verbose else None
    settings = load_settings(flags, config)
    set_up(settings.log_level, settings.log_format)
    summary = run_score_file(request, settings)
    if as_json:
        click.echo(json.dumps(asdict(summary)))
    elif not quiet:
        click.echo(describe(summary, request))
    sys.exit(ExitCode.ROW_ERRORS if summary.row_errors else 0)


def describe(summary: Summary, request: Request) -> str:
    """The summary as text for a person."""
    if not summary.rows:
        return f"no rows in the input; an empty output is in {summary.output}"
    lines = [
        f"{summary.rows - summary.row_errors:,} of {summary.rows:,} rows scored in {summary.seconds:,.1f} s, "
        f"including {summary.startup_seconds:,.1f} s of start-up: {summary.pairs_per_second:,.0f} pairs/s",
        f"model {summary.model}: {summary.backend}, {summary.device}, {summary.precision}; "
        f"{summary.real_token_share:.1%} of the computed tokens were real; {summary.retries} retries",
        f"scores are in {summary.output}",
    ]
    if summary.windows:
        lines.append(f"passages over the limit were cut into {summary.windows:,} windows; the best counts")
    if summary.resumed_rows:
        lines.insert(1, f"{summary.resumed_rows:,} of them had been scored by earlier, interrupted runs")
    if summary.row_errors:
        lines.append(f"{summary.row_errors:,} rows have no score; {summary.errors_file} says which and why")
    is_files = not (request.run or request.reads_stdin)  # those check-precision can read
    if is_files and summary.int8_gain is not None and summary.int8_gain >= _WORTH_A_HINT:
        lines.append(
            f"int8 would be about {summary.int8_gain:.1f} times as fast here; to see how much it changes "
            f"your rankings, run: {_check_int8(summary, request)}"
        )
    return "\n".join(lines)


def _check_int8(summary: Summary, request: Request) -> str:
    """The command that compares the rankings of int8 with those of fp32, on the same input."""
    columns = request.columns
    named = [] if columns.query == "query" else ["--query-column", columns.query]
    named += [] if columns.passage == "passage" else ["--passage-column", columns.passage]
    command = ["rankmill", "check-precision", *request.inputs, "--precision", "int8"]
    return shlex.join([*command, "--model", summary.model, *named])
