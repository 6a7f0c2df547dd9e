"""The options that say which files are scored and how: those of score-file, and of submit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click
from pydantic import ValidationError

from rankmill.cli import options
from rankmill.jobs.protocol.submitted.request import DATASET, DELIMITERS, OUTPUT_FORMATS, FileRequest

Function = Callable[..., None]


def file_request(given: dict[str, Any]) -> FileRequest:
    """Take the request out of the options `given`; raises `UsageError` if its parts do not fit."""
    dataset = given.pop("dataset")
    if dataset:
        if all(given[name] for name in ("run", "queries", "corpus")):
            raise click.UsageError("--dataset has no effect beside --run, --queries and --corpus")
        given["queries"], given["corpus"] = given["queries"] or (dataset,), given["corpus"] or (dataset,)
        given["run"] = given["run"] or dataset
    models = given.pop("models")
    given["model"] = models[0] if models else None
    asked = {name: given.pop(name) for name in list(given) if name in FileRequest.model_fields}
    asked["models"] = models if len(models) > 1 else ()
    try:
        return FileRequest(**asked)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"][:1])
        raise click.UsageError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None


def _dataset(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given is None or given.startswith(DATASET):
        return given
    raise click.BadParameter(f"{given!r} is no dataset of ir_datasets, such as irds:beir/scifact/test")


def _names(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The names in all uses of an option, each of which is a list separated by commas."""
    return tuple(name for names in given for name in names.split(",") if name)


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


_OPTIONS: tuple[Callable[[Function], Function], ...] = (
    click.argument("inputs", nargs=-1, metavar="INPUT..."),
    click.option(
        "--run",
        metavar="FILE",
        help="Score a run: TREC, TSV, JSONL or Parquet with ids of queries and passages.",
    ),
    click.option(
        "--queries", multiple=True, metavar="FILE", help="Texts of the run's queries: TSV, JSONL or Parquet."
    ),
    click.option(
        "--corpus", multiple=True, metavar="FILE", help="Texts of the run's passages: TSV, JSONL or Parquet."
    ),
    click.option(
        "--dataset",
        metavar="irds:NAME",
        callback=_dataset,
        help="A dataset of ir_datasets: its queries, its passages and, without --run, its run.",
    ),
    click.option(
        "--depth",
        type=click.IntRange(min=1),
        metavar="N",
        help="Score only the first N passages of each query of the run, by rank.",
    ),
    click.option(
        "--qrels",
        metavar="FILE",
        help="Judgements: add labels, and the relevant passages that the run lacks.",
    ),
    click.option("--with-texts", is_flag=True, help="Include query and passage in the output of a run."),
    click.option(
        "-o",
        "--output",
        metavar="FILE",
        help="File to write: .parquet, .csv, .tsv, .jsonl, .trec; text also .gz or .zst.  "
        "[default: <input stem>.scored.parquet]",
    ),
    click.option(
        "--output-format",
        type=click.Choice(OUTPUT_FORMATS),
        help="Format of the output.  [default: as its name ends]",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=1),
        metavar="N",
        help="Keep the N best passages of each query, ranked.  [default: all]",
    ),
    click.option(
        "--tag", default="rankmill", show_default=True, metavar="NAME", help="Name of the run in TREC output."
    ),
    options.columns(),
    click.option(
        "--score-column",
        default="score",
        show_default=True,
        metavar="NAME",
        help="Column to add; of several models NAME_MODEL, or NAME,NAME,...",
    ),
    click.option(
        "--rank-column",
        default="rank",
        show_default=True,
        metavar="NAME",
        help="Column to add for the rank (--top-k).",
    ),
    click.option(
        "--query-id-column",
        metavar="NAME",
        help="Column with the query's id (--top-k, TREC).  [default: query_id, qid, ...]",
    ),
    click.option(
        "--passage-id-column",
        metavar="NAME",
        help="Column with the passage's id (TREC).  [default: passage_id, doc_id, ...]",
    ),
    click.option(
        "--text-columns",
        multiple=True,
        metavar="NAME,...",
        callback=_names,
        help="Columns to read as text, even if their values look like numbers.",
    ),
    click.option(
        "--list-columns",
        multiple=True,
        metavar="NAME,...",
        callback=_names,
        help="Lists, such as the passages of a query, to make a row of each item.",
    ),
    click.option(
        "--delimiter",
        metavar="TEXT",
        callback=_delimiter,
        help="Character between two fields of CSV or TSV.  [default: noticed]",
    ),
    click.option(
        "--max-field-mib",
        type=click.IntRange(1, 1024),
        metavar="N",
        help="Longest field of CSV or TSV, in MiB; a longer one is taken for an open quote.  [default: 16]",
    ),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Score only the first N rows."),
    click.option(
        "--shard",
        metavar="K/N",
        callback=_shard,
        help="Score only the K-th of N equal parts; rankmill merge puts them together.",
    ),
    click.option(
        "--rows-per-part",
        type=click.IntRange(min=1),
        metavar="N",
        help="Write a folder of files of N rows each, which appear whole, one by one.",
    ),
    click.option(
        "--reuse",
        metavar="FILE",
        help="Take scores from an earlier output of the same model; score only other pairs.",
    ),
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="TEXT",
        help=f"{options.HELP['model']} Several: a column for each.  [default: {options.DEFAULTS['model']}]",
    ),
    click.option(
        "--mean",
        type=click.Choice(["ranks", "scores"]),
        help="Of several models: add the mean of the ranks, or of the standardized scores, within a query.",
    ),
    click.option(
        "--on-null",
        type=click.Choice(["error", "fail"]),
        default="error",
        show_default=True,
        help="A null text: error gives that row an error, fail stops before any work.",
    ),
    click.option("--force", is_flag=True, help="Replace an existing output."),
    click.option("--restart", is_flag=True, help="Start over; drop the scores of an interrupted run."),
)


def file_options(function: Function) -> Function:
    """Add INPUT and the options of `FileRequest` to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


SETTINGS = (
    "revision", "precision", "max_length", "activation", "instruction", "prompt_template", "label",
    "all_labels", "long", "long_stride", "queue", "chunk_size",
)  # fmt: skip
"""Settings that say how files are scored, wherever that is."""
