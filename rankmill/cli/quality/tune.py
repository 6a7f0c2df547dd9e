"""``rankmill tune``: find the best settings for this machine, and write them to a config file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, get_args

import click
import yaml

from rankmill.cli import options
from rankmill.cli.exits import MEASURED
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.settings import Settings, config_file, load_settings
from rankmill.lab.bench import Records
from rankmill.lab.pairs import fingerprint, sample
from rankmill.lab.tune import MAX_ROWS, Objective, Trials, Tuned, Tuner

_FIRST_LINE = "# Made by rankmill tune"
_UNITS = {"s": 1, "m": 60, "h": 3600}
_GRACE = 1800
"""Seconds beyond the budget after which workers are ended."""

_EPILOG = """\b
Exit codes:
  0    the config file was written
  1    failed; the measurements are kept
  2    wrong usage, found before any work
  130  interrupted; the measurements are kept

The same command continues after an interruption."""


def parse_seconds(text: str) -> float:
    """Seconds of ``90s``, ``2m`` or ``1h``; raises `ValueError` for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a duration; write 90s, 2m or 1h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@options.command("tune", epilog=_EPILOG, interrupted=MEASURED)
@click.argument("file", default="varied")
@click.option(
    "--objective",
    type=click.Choice(get_args(Objective)),
    default="throughput",
    show_default=True,
    help="Pairs a second in bulk, p95 latency of single requests of 20 pairs, or the workers' peak memory.",
)
@click.option(
    "--budget", default="2m", show_default=True, callback=_seconds, help="Most time to spend on measurements."
)
@options.settings("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("tuned.yaml"),
              show_default=True, help="Config file to write.")  # fmt: skip
@options.columns()
@click.option("--min-spearman", type=click.FloatRange(-1, 1), default=0.999, show_default=True,
              help="Mean rank correlation with fp32 within a query that a precision must reach.")  # fmt: skip
@click.option("--restart", is_flag=True, help="Ignore the measurements of an interrupted tuning.")
@options.quiet
def tune(
    file: str,
    objective: str,
    budget: float,
    model: str | None,
    config: str | None,
    output: Path,
    query_column: str,
    passage_column: str,
    min_spearman: float,
    restart: bool,
    quiet: bool,
) -> None:
    """Find the best settings for this machine.

    Tries backends, precisions, token budgets, workers and threads with a sample of FILE, and writes the best
    settings to a config file. FILE has pairs in any format that score-file reads; default: shipped pairs of
    many lengths. Settings that --config fixes do not change.
    """
    _check_output(output)
    settings = load_settings({"model": model}, config)
    pairs = sample(file, MAX_ROWS, (query_column, passage_column))
    asked = [version("rankmill"), settings.model_dump(), objective, min_spearman, fingerprint(pairs)]
    asked += [platform.node(), os.cpu_count()]
    records_file = output.with_name(output.name + ".tuning.jsonl")
    if restart:
        records_file.unlink(missing_ok=True)
    records = Records(records_file, hashlib.sha256(json.dumps(asked).encode()).hexdigest())
    with Trials(settings, pairs, cast("Objective", objective), budget + _GRACE) as trials:
        tuner = Tuner(
            settings,
            trials,
            cast("Objective", objective),
            records,
            budget=budget,
            min_spearman=min_spearman,
            say=lambda line: None if quiet else click.echo(mask_passwords(line), err=True),
        )
        tuned = tuner.tune()
    output.write_text(_config(tuned, settings, objective, file, config, output), encoding="utf-8")
    records_file.unlink(missing_ok=True)
    click.echo(f"the best settings are in {output}; use them: score-file INPUT --config {output}")


def _check_output(output: Path) -> None:
    if output.exists() and not output.read_text(encoding="utf-8", errors="replace").startswith(_FIRST_LINE):
        raise InputError(f"{output} exists and was not made by rankmill tune; choose another name with -o")


def _config(
    tuned: Tuned, settings: Settings, objective: str, file: str, config: str | None, output: Path
) -> str:
    """The text of a config file, with the steps of the tuning as comments."""
    values: dict[str, Any] = {"model": settings.model, **tuned.changes}
    base = config_file(config)
    if base:
        values = {"extends": os.path.relpath(base, output.resolve().parent), **values}
    day = time.strftime("%Y-%m-%d", time.gmtime())
    steps = "\n".join(f"#   {' '.join(line.split())}" for line in tuned.story)
    return mask_passwords(
        f"{_FIRST_LINE} --objective {objective} on {platform.node()}, {day}, with pairs of {file}.\n"
        f"# Use it: score-file INPUT --config {output.name}\n# Steps of the tuning:\n{steps}\n"
        + yaml.safe_dump(values, sort_keys=False)
    )
