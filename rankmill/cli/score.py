"""``score-file``, also ``rankmill score``: score files of pairs."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rankmill.cli import options
from rankmill.cli.common import version
from rankmill.cli.request import GROUPS, SETTINGS, file_options, refuse_stride
from rankmill.cli.show import echo, json_of
from rankmill.cli.standard_output import in_temporary_folder, pass_on
from rankmill.jobs.contract.errors import ExitCode
from rankmill.jobs.contract.file_request import STANDARD_STREAM, FileRequest
from rankmill.jobs.contract.shown import unscored
from rankmill.jobs.contract.spec import Precision
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.producer.local.embedded import EmbeddedCluster

if TYPE_CHECKING:
    from rankmill.score.summary import Summary

_WORTH_A_HINT = 1.3
"""The summary mentions int8 if it would be at least this many times as fast as the precision used."""

_HOW_GOOD = "rankmill check-precision says how it changes rankings"

_SAMPLE = 1000
"""Number of rows that --verify and --estimate score without --sample."""

_EPILOG = """\b
Exit codes:
  0    every row was scored
  1    failed, or no server answers. No output was written (except complete
       parts), the scores are kept. Or --verify found other scores
  2    wrong usage or input, found before any work
  3    done, but some rows have no score: OUTPUT.errors.jsonl names them
  130  interrupted; no output was written (except complete parts), the scores
       are kept

\b
Scores are kept in OUTPUT.rankmill/ until the output is complete. After a
failure, an interruption or a crash, the same command continues. With -o -
nothing is kept: rows, and nothing else, come to standard output at the end.

--workers, --device and --backend are for embedded workers; other workers have
their own settings. Every setting of configs/base.yaml can be set in a file
(--config), by RANKMILL_<NAME> in the environment, or by its flag. A flag
overrides the environment, and the environment overrides the file."""


@options.command("score-file", epilog=_EPILOG, interrupted="the output is not complete", groups=GROUPS)
@file_options
@options.flags(*SETTINGS, "workers", "device", "backend", redis_url=options.REDIS_OR_EMBEDDED)
@click.option("--verify", metavar="FILE", help="Score some rows of a scored Parquet file again, and compare.")
@click.option("--estimate", is_flag=True, help="Score only a sample, and tell what all rows would take.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Rows to verify or estimate from.  [default: 1000]",
)
@options.as_json
@options.quiet
@click.option("-v", "--verbose", is_flag=True, help="More messages, also for each chunk.")
@version
def score_file(
    request: FileRequest,
    config: str | None,
    verify: str | None,
    estimate: bool,
    sample: int | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Score the pairs of INPUT files with a cross-encoder.

    INPUT is a Parquet, Arrow, CSV, TSV or JSON file (text also gzipped or zstd-compressed), a directory, a
    glob, or - for standard input, with a query and a passage in each row. The output holds all columns of the
    input, in its order, and the score. With --top-k the output holds the best passages of each query. A TREC
    run holds ids, ranks and scores.

    With --run, --queries and --corpus, the pairs come from a run. The pairs' texts are looked up by id in an
    index, which is made once and kept beside the corpus, or in the cache folder if that is not possible.

    With --verify there is no INPUT: rows of FILE are scored again, with the settings in its metadata. A
    deterministic file must have the same bits, other files the same scores within the proven bound.

    With --estimate nothing is written. A sample of the first 100,000 rows is scored, to predict the time,
    tokens and memory of all rows, and how many pairs would be truncated or get no score.
    """
    given["log_level"] = "error" if quiet else "debug" if verbose else None
    settings = load_settings(given, config)
    options.refuse_of_workers(embedded=not settings.redis_url)
    refuse_stride(settings)
    set_up(settings.log_level, settings.log_format)
    if verify and estimate:
        raise click.UsageError("give either --estimate or --verify")
    if verify:
        _verify(verify, sample or _SAMPLE, request, settings, given, as_json=as_json, quiet=quiet)
    if sample and not estimate:
        raise click.UsageError("--sample has no effect without --verify or --estimate")
    pipes = request.output == STANDARD_STREAM
    target = in_temporary_folder(request) if pipes else nullcontext(request)
    embedded = nullcontext() if settings.redis_url else EmbeddedCluster(settings, models=len(request.models))
    with target as named, embedded as cluster:
        # These are imported only now, while the server and the workers are starting.
        from rankmill.jobs.contract.arrow import leave_out_pandas
        from rankmill.score.progress import progress_view
        from rankmill.score.score_file import score_file as run_score_file

        if estimate:
            _estimate(named, settings, sample or _SAMPLE, cluster, as_json=as_json)
            return
        leave_out_pandas()
        view = partial(progress_view, quiet=quiet)
        summary = run_score_file(named, settings, cluster=cluster, view=view)
        summary = pass_on(summary, quiet=quiet) if pipes else summary
    if as_json:
        echo(json_of(summary), err=pipes)
    elif not quiet:
        echo(describe(summary, request, settings.precision), err=pipes)
    sys.exit(ExitCode.ROW_ERRORS if summary.row_errors else 0)


def _verify(
    name: str,
    sample: int,
    request: FileRequest,
    settings: Settings,
    given: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
) -> NoReturn:
    if unused := next((field for field in FileRequest.model_fields if request.is_given(field)), None):
        shown = {"inputs": "INPUT", "models": "--model"}.get(unused, f"--{unused.replace('_', '-')}")
        raise click.UsageError(f"{shown} has no effect with --verify, whose file says how it was made")
    from rankmill.score.verify import read_scored, verify

    before = read_scored(name, settings, given)
    with nullcontext() if settings.redis_url else EmbeddedCluster(before.settings) as cluster:
        result = verify(before, sample, cluster)
    if as_json:
        echo(json_of(result))
    elif result.differ or not quiet:
        echo(str(result))
    sys.exit(ExitCode.FAILED if result.differ else 0)


def _estimate(
    request: FileRequest, settings: Settings, sample: int, cluster: EmbeddedCluster | None, *, as_json: bool
) -> None:
    from rankmill.cluster.tables import duration, size
    from rankmill.score.estimate import estimate

    whole = estimate(request, settings, sample, cluster)
    if as_json:
        echo(json_of(whole))
        return
    cut = "" if whole.truncated_share is None else f"; {whole.truncated_share:.1%} of the pairs are truncated"
    lines = [
        f"{whole.sampled:,} of {whole.rows:,} rows scored at {whole.pairs_per_second:,.0f} pairs/s "
        f"(workers: {whole.workers}; {whole.backend}, {whole.device}, {whole.precision})",
        f"all rows: about {duration(whole.seconds)}, {whole.tokens:,} tokens{cut}",
        f"rows without a score: {whole.error_share:.1%}, about {round(whole.error_share * whole.rows):,}",
        f"memory of a worker: {size(whole.worker_bytes)}",
    ]
    if whole.int8_gain is not None:
        lines.append(
            f"int8: about {duration(whole.seconds / whole.int8_gain)}, {whole.int8_gain:.1f} times as fast; "
            + _HOW_GOOD
        )
    echo("\n".join(lines))


def describe(summary: Summary, request: FileRequest, wanted: Precision = "auto") -> str:
    """Write the summary of score-file as text for a terminal."""
    place = "on standard output" if summary.output == STANDARD_STREAM else f"in {summary.output}"
    if not summary.rows:
        return f"no rows in the input; an empty output is {place}"
    scoring = summary.seconds - summary.startup_seconds - summary.load_seconds
    lines = [
        f"{summary.rows - summary.row_errors:,} of {summary.rows:,} rows scored at "
        f"{summary.pairs_per_second:,.0f} pairs/s: start {summary.startup_seconds:,.1f} s, "
        f"load {summary.load_seconds:,.1f} s, scoring {scoring:,.1f} s",
        f"model {summary.model}: {_how(summary)}",
        f"scores are {place}",
    ]
    lines += [f"{files}: {columns}" for files, columns in summary.taken.items()]
    if summary.windows:
        lines.append(f"texts over the limit were cut into {summary.windows:,} windows")
    if summary.reused_rows:
        lines.insert(1, f"{summary.reused_rows:,} of them have their score from {request.reuse}")
    if summary.resumed_rows:
        lines.insert(1, f"{summary.resumed_rows:,} of them had been scored by earlier, interrupted runs")
    if summary.row_errors:
        why = f"; {summary.errors_file} says which and why" if summary.errors_file else ""
        lines.append(unscored(summary.row_errors) + why)
    if wanted == "int8" and summary.precision in {"bf16", "fp32"}:
        scores = f"the scores are in {summary.precision}"
        why = "int8 is not worth it on these workers, so"
        lines.append(f"{scores}, as in {request.reuse}" if request.reuse else f"{why} {scores}")
    if summary.int8_gain is not None and summary.int8_gain >= _WORTH_A_HINT:
        lines.append(f"int8 would be about {summary.int8_gain:.1f} times as fast here; {_HOW_GOOD}")
    return "\n".join(lines)


def _how(summary: Summary) -> str:
    if not summary.backend or summary.reused_rows == summary.rows:
        return "no score was computed"
    beside = " of the model in its own precision" if summary.reference else ""
    proven = "" if summary.bound is None else f", proven to {summary.bound:.2g}{beside}"
    bits = ", deterministic" if summary.deterministic else ""
    return (
        f"{summary.backend}, {summary.device}, {summary.precision}{proven}{bits}; "
        f"{summary.real_token_share:.1%} of the computed tokens were real; {summary.retries} retries"
    )
