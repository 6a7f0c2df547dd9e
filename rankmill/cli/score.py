"""The command line."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
import pyarrow as pa
import redis

from jobs.errors import ConfigError, ConnectionFailed, InputError, RankmillError
from jobs.runtime.logs import set_up
from jobs.runtime.settings import load_settings
from producer.files.readers import TextColumns
from rankmill.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, fail
from rankmill.score_file import Request, Summary
from rankmill.score_file import score_file as run_score_file

EXIT_ROW_ERRORS = 3

_EPILOG = """\b
Exit codes:
  0    every row was scored
  1    failed; no output was written, what was scored is kept
  2    wrong usage or input, found before any work
  3    done, but some rows have no score: OUTPUT.errors.jsonl names them
  130  interrupted; no output was written, what was scored is kept

\b
What is scored is kept in OUTPUT.rankmill/ until the output is there. After a
failure, an interruption or a crash, the same command continues.

Every option that stands in configs/base.yaml can be set there (--config), by
RANKMILL_<NAME> in the environment, or by its flag; the flag wins."""


def _settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags that override settings; their names are the settings' names."""
    options = [
        click.option("--model", help="Hub id, local directory, or 'demo'."),
        click.option("--revision", help="Branch, tag or commit on the hub."),
        click.option("--precision", help="auto, fp32, bf16, fp16, int8 or int4."),
        click.option("--max-length", type=int, help="Longest pair in tokens; longer ones are truncated."),
        click.option("--activation", help="default (the model's own), identity or sigmoid."),
        click.option("--redis", "redis_url", help="Use this server and its workers; default: embedded ones."),
        click.option("--queue", help="The queue's name."),
        click.option("--chunk-size", type=int, help="Pairs in a job, at most."),
        click.option("--workers", help="Embedded workers; default: one for each GPU, else one."),
        click.option("--device", help="Of embedded workers: auto, cpu, cuda or mps."),
        click.option("--backend", help="Of embedded workers: auto, torch, openvino, onnx or mlx."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--output", help="Parquet file to make; default: <input stem>.scored.parquet.")
@click.option("--query-column", default="query", show_default=True)
@click.option("--passage-column", default="passage", show_default=True)
@click.option("--score-column", default="score", show_default=True, help="Name of the column to add.")
@click.option("--on-null", type=click.Choice(["error", "fail"]), default="error", show_default=True,
              help="A null text is that row's error, or stops before any work.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--restart", is_flag=True, help="Start over; drop what an interrupted run has scored.")
@_settings_options
@click.option("--config", help="YAML file of settings.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no messages but errors.")
@click.option("-v", "--verbose", is_flag=True, help="More messages: a line for each chunk.")
@click.version_option(package_name="rankmill")
def score_file(
    inputs: tuple[str, ...],
    output: str | None,
    query_column: str,
    passage_column: str,
    score_column: str,
    on_null: str,
    force: bool,
    restart: bool,
    config: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Score the query-passage pairs of INPUT with a cross-encoder.

    INPUT is a Parquet, CSV, TSV or JSONL file (text also gzipped or zstd-compressed), a directory
    or a glob. The output holds all columns of the input, in its order, and the score.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    request = Request(
        inputs=inputs,
        output=output,
        columns=TextColumns(query_column, passage_column),
        score_column=score_column,
        allow_nulls=on_null == "error",
        force=force,
        restart=restart,
        quiet=quiet,
    )
    flags["log_level"] = "error" if quiet else "debug" if verbose else None
    try:
        settings = load_settings(flags, config)
        set_up(settings.log_level, settings.log_format)
        summary = run_score_file(request, settings)
    except (InputError, ConfigError, ConnectionFailed) as error:
        if isinstance(error, ConnectionFailed):
            error.add_note("leave --redis and REDIS_URL out to start an embedded server")
        fail("score-file", error, EXIT_USAGE)
    except RankmillError as error:
        fail("score-file", error, EXIT_FAILED)
    except (OSError, pa.ArrowException, redis.RedisError) as error:  # a full disk, a server out of memory
        fail("score-file", error, EXIT_FAILED)
    except KeyboardInterrupt as error:
        error.args = ("interrupted; no output was written",)  # its notes say what is kept
        fail("score-file", error, EXIT_INTERRUPTED)
    if as_json:
        click.echo(json.dumps(asdict(summary)))
    elif not quiet:
        click.echo(describe(summary))
    sys.exit(EXIT_ROW_ERRORS if summary.row_errors else 0)


def describe(summary: Summary) -> str:
    """The summary for a person."""
    if not summary.rows:
        return f"no rows in the input; an empty output is in {summary.output}"
    lines = [
        f"{summary.rows - summary.row_errors:,} of {summary.rows:,} rows scored in {summary.seconds:,.1f} s, "
        f"of which start-up {summary.startup_seconds:,.1f} s: {summary.pairs_per_second:,.0f} pairs/s",
        f"model {summary.model}: {summary.backend}, {summary.device}, {summary.precision}; "
        f"{summary.real_token_share:.1%} of the computed tokens were real; {summary.retries} retries",
        f"scores are in {summary.output}",
    ]
    if summary.resumed_rows:
        lines.insert(1, f"{summary.resumed_rows:,} of them had been scored by earlier, interrupted runs")
    if summary.row_errors:
        lines.append(f"{summary.row_errors:,} rows have no score; {summary.errors_file} says which and why")
    return "\n".join(lines)
