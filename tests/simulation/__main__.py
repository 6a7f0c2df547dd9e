"""``python -m tests.simulation --seeds 100``: simulate clusters, and tell what went wrong in the first that failed."""

from __future__ import annotations

import os
import sys
import time

import click

from tests.simulation.scenario import Scenario, play, shrink


@click.command()
@click.option("--first", default=1, help="First seed.")
@click.option("--seeds", default=60, help="How many seeds.")
@click.option("--trace", is_flag=True, help="Print all events of the first seed.")
@click.option("--tail", default=200, help="Events to print of a failure.")
@click.option("--stop/--go-on", default=True, help="Whether to stop at the first failure.")
@click.option("--small/--whole", default=True, help="Whether to shrink a failure.")
def main(first: int, seeds: int, trace: bool, stop: bool, small: bool, tail: int) -> None:
    """Simulate clusters."""
    began, virtual, events, commands, failed = time.perf_counter(), 0.0, 0, 0, 0
    for seed in range(first, first + seeds):
        scenario = Scenario.drawn(seed)
        outcome = play(scenario, traced=trace)
        virtual, events = virtual + outcome.seconds, events + outcome.events
        commands += outcome.commands
        if trace:
            print("\n".join(outcome.trace))
        if outcome.problems:
            failed += 1
            print(f"seed {seed}: " + "; ".join(outcome.problems), flush=True)
            if stop:
                if small:
                    scenario = shrink(scenario)
                    outcome = play(scenario, traced=True)
                    print(
                        f"{len(scenario.workers)} workers, runs {[(r.name, r.kind, len(r.pairs), round(r.at, 2)) for r in scenario.runs]}, chunks of {scenario.chunk_size}, faults:"
                    )
                    print("\n".join(f"  {fault}" for fault in scenario.faults))
                    print("\n".join(outcome.trace[-tail:]))
                    print("; ".join(outcome.problems))
                break
    real = time.perf_counter() - began
    print(
        f"{seed - first + 1} seeds, {failed} failed; {virtual:,.0f} s of virtual time in {real:,.1f} s "
        f"({virtual / real:,.0f} times); {events:,} events, {commands:,} commands"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets are walked through in the same order each time
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    main()
