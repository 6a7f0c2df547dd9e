"""``python -m tests.simulation``: simulate clusters, and tell what went wrong in the first that failed."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice

import click

from tests.simulation.found import FOUND
from tests.simulation.promises import PROMISES
from tests.simulation.scenario import Outcome, Scenario, play, shrink

_AT_ONCE = 8
"""Scenarios for each process that are handed out before their time."""


@click.command()
@click.option("--first", default=1, show_default=True, metavar="SEED", help="First seed.")
@click.option("--seeds", default=60, show_default=True, metavar="N", help="How many seeds, at most.")
@click.option("--seconds", default=3600.0, show_default=True, help="Begin no further seed after so long.")
@click.option("--cpu-seconds", default=1e9, help="Nor after so many seconds of this process's CPU time.")
@click.option("--processes", default=1, show_default=True, help="0: one for each CPU core.")
@click.option("--found", is_flag=True, help="Play the failures that were found, the newest first, not seeds.")
@click.option("--needs", multiple=True, metavar="FEATURE", help="Only seeds with this; repeatable.")
@click.option(
    "--workers", default=0, metavar="N", help="So many workers in each scenario, instead of 1 to 4."
)
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failure.")
@click.option("--whole", is_flag=True, help="Do not make a failure smaller.")
@click.option("--report", is_flag=True, help="Also tell what was simulated, and what it came near to.")
@click.option(
    "--tail", default=100, show_default=True, metavar="N", help="Last events of a failure to print."
)
def main(
    first: int,
    seeds: int,
    seconds: float,
    cpu_seconds: float,
    processes: int,
    found: bool,
    needs: tuple[str, ...],
    workers: int,
    keep_going: bool,
    whole: bool,
    report: bool,
    tail: int,
) -> None:
    """Simulate clusters, one for each seed."""
    began = time.perf_counter()
    drawn = (Scenario.drawn(seed, workers or None) for seed in range(first, first + seeds))
    scenarios = reversed(FOUND) if found else (each for each in drawn if each.has(*needs))
    in_time = _while_time(scenarios, began + seconds, time.process_time() + cpu_seconds)
    failed, played = list[Scenario](), list[tuple[Scenario, Outcome]]()
    for scenario, outcome in _play_all(in_time, processes or os.cpu_count() or 1):
        played.append((scenario, outcome))
        if outcome.problems:
            failed.append(scenario)
            print(f"seed {scenario.seed}: {'; '.join(outcome.problems)}", flush=True)
            if not keep_going:
                break
    if report:
        _report(played)
    real = time.perf_counter() - began
    virtual = sum(each.seconds for _, each in played)
    print(
        f"{len(played):,} seeds, {len(failed)} failed; {virtual:,.0f} s of virtual time in {real:,.1f} s "
        f"({virtual / real:,.0f} times); {sum(each.events for _, each in played):,} events, "
        f"{sum(each.commands for _, each in played):,} commands"
    )
    seldom = [
        each.__name__
        for each in PROMISES
        if sum(each.__name__ in outcome.loaded for _, outcome in played) < len(played) / 20
    ]
    if seldom and len(played) >= 20 and not (found or needs):
        print(f"loaded in less than one scenario of twenty: {', '.join(seldom)}")
    if failed and tail:
        _explain(failed[0] if whole else shrink(failed[0]), tail)
    missed = [f"seed {each.seed}, {fault}" for each, outcome in played for fault in outcome.missed]
    if found:  # a failure that was kept is lost if the product has become too fast for it
        missed += [
            f"seed {each.seed}, {fault}, too late" for each, outcome in played for fault in outcome.late
        ]
    if missed:
        print(f"{len(missed)} faults found nothing to strike: {'; '.join(missed)}")
    sys.exit(bool(failed or missed))


def _while_time(scenarios: Iterator[Scenario], until: float, cpu_until: float) -> Iterator[Scenario]:
    for scenario in scenarios:
        if time.perf_counter() > until or time.process_time() > cpu_until:
            return
        yield scenario


def _play_all(scenarios: Iterator[Scenario], processes: int) -> Iterator[tuple[Scenario, Outcome]]:
    """The scenarios with their outcomes, in order."""
    if processes == 1:
        _prepare()
        yield from ((each, play(each)) for each in scenarios)
        return
    with ProcessPoolExecutor(processes, initializer=_prepare) as pool:
        waiting: list[tuple[Scenario, Future[Outcome]]] = []
        try:
            while True:
                fresh = list(islice(scenarios, _AT_ONCE * processes - len(waiting)))
                waiting += [(each, pool.submit(_outcome, each)) for each in fresh]
                if not waiting:
                    return
                scenario, future = waiting.pop(0)
                yield scenario, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare() -> None:
    """Spend no time on what lives for ever when a world's garbage is collected."""
    gc.collect()
    gc.freeze()


def _outcome(scenario: Scenario) -> Outcome:
    """Without the trace, which is played again when it is wanted."""
    outcome = play(scenario)
    outcome.trace = []
    return outcome


def _report(played: Iterable[tuple[Scenario, Outcome]]) -> None:
    """Tell what was simulated, how near it came to the bounds, and what was lost on the way."""
    outcomes = list(played)
    faults = Counter(fault.kind for scenario, _ in outcomes for fault in scenario.faults)
    combined = Counter(len({fault.kind for fault in scenario.faults}) for scenario, _ in outcomes)
    kinds = Counter(
        f"{run.kind}{' bulk' * (run.priority == 'bulk')}" for scenario, _ in outcomes for run in scenario.runs
    )
    print("faults: " + ", ".join(f"{kind} {count:,}" for kind, count in faults.most_common()))
    print("kinds of faults in a scenario: " + ", ".join(f"{n}: {combined[n]:,}" for n in sorted(combined)))
    print("runs: " + ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()))
    print("| promise | bound | seen | seed | in 99 of 100 scenarios |\n| --- | --- | --- | --- | --- |")
    for promise in PROMISES if outcomes else ():
        name = promise.__name__
        values = sorted((each.worst.get(name, 0.0), scenario.seed) for scenario, each in outcomes)
        most, seed = values[-1]
        usual = values[int(0.99 * (len(values) - 1))][0]
        if promise.bound:
            print(f"| {name} | {promise.bound:g} | {most:.1f} | {seed} | {usual:.1f} |")


def _explain(scenario: Scenario, tail: int) -> None:
    """Tell a failure: who was there, what went wrong and who ended when, and the last events."""
    outcome = play(scenario, traced=True)
    print(scenario)
    marks = ("FAULT", "BROKEN PROMISE", "ends with status", "raised ")
    told = [line for line in outcome.trace if any(mark in line for mark in marks)]
    print("\n".join(line for line in told if " world " not in line[:36] or "FAULT" in line))
    print(f"the last {tail} of {len(outcome.trace):,} events:")
    print("\n".join(outcome.trace[-tail:]))
    print("; ".join(outcome.problems))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # so that sets are walked through in the same order each time
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    main()
