"""``python -m tests.simulation``: simulate clusters, and tell what went wrong in the first that failed."""

from __future__ import annotations

import os
import sys
import time

import click

from tests.simulation.found import FOUND
from tests.simulation.scenario import Outcome, Scenario, play, shrink


@click.command()
@click.option("--first", default=1, show_default=True, metavar="SEED", help="First seed.")
@click.option("--seeds", default=60, show_default=True, metavar="N", help="How many seeds, at most.")
@click.option("--seconds", default=3600.0, show_default=True, help="Begin no further seed after so long.")
@click.option("--found", is_flag=True, help="Play the failures that were found, instead of seeds.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failure.")
@click.option("--whole", is_flag=True, help="Do not make a failure smaller.")
@click.option("--needs", multiple=True, metavar="FEATURE", help="Only seeds with this; repeatable.")
@click.option(
    "--tail", default=100, show_default=True, metavar="N", help="Last events of a failure to print."
)
def main(
    first: int,
    seeds: int,
    seconds: float,
    found: bool,
    keep_going: bool,
    whole: bool,
    needs: tuple[str, ...],
    tail: int,
) -> None:
    """Simulate clusters, one for each seed."""
    began_cpu, began, outcomes, failed = time.process_time(), time.perf_counter(), list[Outcome](), 0
    drawn = (each for each in map(Scenario.drawn, range(first, first + seeds)) if each.has(*needs))
    for scenario in FOUND if found else drawn:
        if time.process_time() - began_cpu > seconds:
            break
        outcomes.append(outcome := play(scenario))
        if outcome.problems:
            failed += 1
            print(f"seed {scenario.seed}: {'; '.join(outcome.problems)}", flush=True)
            if not keep_going:
                _explain(scenario if whole else shrink(scenario), tail)
                break
    real = time.perf_counter() - began
    virtual = sum(each.seconds for each in outcomes)
    print(
        f"{len(outcomes):,} seeds, {failed} failed; {virtual:,.0f} s of virtual time in {real:,.1f} s "
        f"({virtual / real:,.0f} times); {sum(each.events for each in outcomes):,} events, "
        f"{sum(each.commands for each in outcomes):,} commands"
    )
    sys.exit(bool(failed))


def _explain(scenario: Scenario, tail: int) -> None:
    """Tell a failure: who was there, what went wrong, and the last events."""
    outcome = play(scenario)
    print(scenario)
    print("\n".join(outcome.trace[-tail:]))
    print("; ".join(outcome.problems))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # so that sets are walked through in the same order each time
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    main()
