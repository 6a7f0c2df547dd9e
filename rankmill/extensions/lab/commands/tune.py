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
from typing import Annotated, Any

import click
import yaml
from pydantic import AfterValidator, Field

from rankmill.cli import options
from rankmill.cli.exits import MEASURED
from rankmill.extensions.lab.bench import Records
from rankmill.extensions.lab.pairs import fingerprint, sample
from rankmill.extensions.lab.tune import MAX_ROWS, Objective, Trials, Tuned, Tuner
from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.settings import Settings, config_file, load_settings
from rankmill.producer.files.manifest import content_here
from rankmill.producer.files.stores.writing import whole_file

_FIRST_LINE = "# Made by rankmill tune"
_UNITS = {"s": 1, "m": 60, "h": 3600}
_EPILOG = """\b
Exit codes:
  0    the config file was written
  1    failed; the measurements are kept
  2    wrong usage, found before any work
  130  interrupted; the measurements are kept

The same command continues after an interruption."""


def parse_seconds(text: str) -> float:
    """Return the number of seconds of a duration such as ``90s``, ``90``, ``2m`` or ``1h``. Raises
    `ValueError` for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a duration; write 90s, 2m or 1h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _check_duration(text: str) -> str:
    parse_seconds(text)
    return text


class TuneOptions(options.CommandOptions):
    """Options of tune."""

    objective: Objective = "throughput"
    """What to optimize: pairs a second in bulk, p95 latency of single requests of 20 pairs, or the workers'
    peak memory.
    """
    budget: Annotated[str, AfterValidator(_check_duration)] = "2m"
    """Time limit for all measurements."""
    output: Path = Path("tuned.yaml")
    """Config file to write."""
    query_column: options.Column = "query"
    """Column with the query."""
    passage_column: options.Column = "passage"
    """Column with the passage."""
    min_spearman: Annotated[float, Field(ge=-1, le=1)] = 0.999
    """Lowest rank correlation with fp32 that a precision may have, as the mean over the queries."""
    restart: bool = False
    """Delete the measurements of an interrupted tuning, and begin again."""


@options.command("tune", epilog=_EPILOG, interrupted=MEASURED)
@click.argument("file", default="varied")
@options.of(TuneOptions)
@options.flags("model")
@options.quiet
def tune(file: str, asked: TuneOptions, model: str | None, config: str | None, quiet: bool) -> None:
    """Find the best settings for this machine.

    The command tries backends, precisions, token budgets, workers and threads with a sample of FILE, and
    writes the best settings to a config file. FILE has pairs in any format that score-file reads; default:
    shipped pairs of many lengths. Settings that --config fixes do not change.
    """
    _check_output(asked.output)
    settings = load_settings({"model": model}, config)
    pairs = sample(file, MAX_ROWS, (asked.query_column, asked.passage_column))
    fixed = [version("rankmill"), settings.model_dump(), asked.objective, asked.min_spearman]
    fixed += [fingerprint(pairs), platform.node(), os.cpu_count()]
    fixed += [content_here(settings.model, cache_folder(settings.cache_dir))]
    records_file = asked.output.with_name(asked.output.name + ".tuning.jsonl")
    if asked.restart:
        records_file.unlink(missing_ok=True)
    records = Records(records_file, hashlib.sha256(json.dumps(fixed).encode()).hexdigest())
    budget = parse_seconds(asked.budget)
    with Trials(settings, pairs, asked.objective, budget) as trials:
        tuner = Tuner(
            settings, trials, asked.objective, records, budget=budget, min_spearman=asked.min_spearman,
            say=lambda line: None if quiet else click.echo(mask_passwords(line), err=True),
        )  # fmt: skip
        tuned = tuner.tune()
    text = _config(tuned, settings, asked.objective, file, config, asked.output)
    with whole_file(asked.output) as partial:
        partial.write_text(text, encoding="utf-8")
    records_file.unlink(missing_ok=True)
    if not quiet:
        click.echo(
            f"the best settings are in {asked.output}; use them: score-file INPUT --config {asked.output}"
        )


def _check_output(output: Path) -> None:
    if output.exists() and not output.read_text(encoding="utf-8", errors="replace").startswith(_FIRST_LINE):
        raise InputError(f"{output} exists and was not made by rankmill tune; choose another name with -o")


def _config(
    tuned: Tuned, settings: Settings, objective: str, file: str, config: str | None, output: Path
) -> str:
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
