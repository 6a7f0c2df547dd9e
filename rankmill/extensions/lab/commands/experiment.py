"""``rankmill experiment``: measure grids of settings, and write a report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from rankmill.cli import options
from rankmill.cli.exits import MEASURED
from rankmill.cli.show import echo
from rankmill.extensions.lab.bench import Records
from rankmill.extensions.lab.experiment import Experiment, load_experiment, shipped
from rankmill.extensions.lab.grid import RECORDS, CellResult, Plan, label, plan, run
from rankmill.extensions.lab.pairs import sample
from rankmill.extensions.lab.statistics import measurements
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.producer.files.stores.writing import whole_file

_EPILOG = f"""\b
rankmill ships: {", ".join(shipped())}

\b
Exit codes:
  0    done; the report lists cells that could not be measured, with reasons
  1    failed; the measurements are kept
  2    wrong usage, found before any work
  130  interrupted; the measurements are kept

The same command continues after an interruption."""


class ExperimentOptions(options.CommandOptions):
    """Options of experiment."""

    output: Path = Path("experiments")
    """Folder for report, plots and measurements."""
    pairs: options.File | None = None
    """File of pairs, or 'varied' or 'example' (shipped pairs).  [default: the experiment's]"""
    query_column: options.Column | None = None
    """Column with the query.  [default: the experiment's]"""
    passage_column: options.Column | None = None
    """Column with the passage.  [default: the experiment's]"""
    model: Annotated[str, Field(title="TEXT")] | None = None
    """Hub id, local directory, or 'demo'.  [default: the experiment's]"""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor by which to multiply the numbers of rows and requests in the experiment files."""
    repeats: int | None = None
    """Number of measurements of each cell with the same workers.  [default: the experiment's]"""
    rounds: int | None = None
    """Number of passes over the grid; in each pass, a cell gets fresh workers.  [default: the
    experiment's]
    """
    restart: bool = False
    """Delete the measurements in the folder, and measure all cells again."""


@options.command("experiment", epilog=_EPILOG, interrupted=MEASURED)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@options.of(ExperimentOptions)
@options.quiet
def experiment(files: tuple[str, ...], asked: ExperimentOptions, quiet: bool) -> None:
    """Measure grids of settings, and write a report.

    The command measures each cell of each experiment FILE with fresh workers, one after the other. FILE is a
    YAML file, or the name of a shipped experiment; default: all shipped experiments.
    """
    options.require_plots()
    experiments = [load_experiment(file) for file in files or shipped()]
    _check_names(experiments)
    measure = {"pairs", "query_column", "passage_column", "repeats", "rounds"}
    given = asked.model_dump(include=measure, exclude_none=True)
    plans = plan(experiments, {"model": asked.model} if asked.model else {}, given, asked.scale)
    if asked.restart:
        (asked.output / RECORDS).unlink(missing_ok=True)
    results = _run(plans, asked.output, quiet)
    from rankmill.extensions.lab.report import write_report  # matplotlib is slow to import

    table = asked.output / "measurements.parquet"
    with whole_file(table) as partial:
        measurements(results).to_parquet(partial, index=False)
    path = write_report(asked.output, experiments, results)
    if not quiet:
        click.echo(f"the report is in {path}, every measurement in {table}")


def _run(plans: Sequence[Plan], folder: Path, quiet: bool) -> list[CellResult]:
    records, draw = Records(folder / RECORDS), cache(sample)
    results = []
    for number, planned in enumerate(plans, 1):
        result, was_known = run(planned, records, draw)
        results.append(result)
        if not quiet:
            outcome = "was measured before" if was_known else _outcome(result)
            where = f"{planned.experiment.name}: {label(planned.cell)}"
            echo(f"[{number}/{len(plans)}] {where}: {outcome}", err=True)
    return results


def _outcome(result: CellResult) -> str:
    if result.status != "measured":
        return f"{result.status}: {mask_passwords(result.reason)}"
    statistics = measurements([result]).median(numeric_only=True)
    parts = []
    if statistics["pairs_per_second"] > 0:
        parts.append(f"{statistics['pairs_per_second']:,.0f} pairs/s")
    if statistics["p95_ms"] > 0:
        parts.append(
            f"p95 {statistics['p95_ms']:,.0f} ms at {statistics['requests_per_second']:,.1f} requests/s"
        )
    return ", ".join(parts)


def _check_names(experiments: Sequence[Experiment]) -> None:
    names = [experiment.name for experiment in experiments]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the experiments are named {name!r}; give each a name of its own")
