"""``python -m tests.simulation.every_write``: kill, or cut off power, at each change of a file in turn.

A run of a few rows is played once for each of its writes, syncs, moves and deletions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import click

from tests.simulation.cluster import Submitted
from tests.simulation.faults import Fault
from tests.simulation.scenario import Scenario, play

_PAIRS = (("query", "passage 0"), (None, "passage 1"), ("query", "passage 2"))

WHOLE = {
    "file parquet": 2, "file parts": 2, "submitted parquet": 2, "submitted parts": 2, "batch": 2,
}  # fmt: skip
"""The kinds of runs that are played, and the chunk size of each."""


def scenarios(kind: str) -> Iterator[Scenario]:
    """A run of a kind that dies at each of its writes in turn: killed, then without power."""
    quiet = Scenario(
        workers=(0.01,),
        runs=(Submitted("run-0", _PAIRS, 1.0, kind),),
        chunk_size=WHOLE[kind],
        runners=() if kind.startswith("file") else (0.0, 0.0),
    )
    for number in range(play(quiet).writes):
        for fault in ("kill_at_write", "lose_power"):
            yield replace(quiet, faults=(Fault(0.5, fault, 0.0, number),))


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(WHOLE)), help="Only this kind of run.")
def main(kinds: tuple[str, ...]) -> None:
    """Let a process die at each of its writes."""
    played = failed = 0
    for kind in kinds or WHOLE:
        for scenario in scenarios(kind):
            played += 1
            if problems := play(scenario).problems:
                failed += 1
                print(f"{kind}, {scenario.faults[0]}: {'; '.join(problems)[:300]}", flush=True)
    print(f"{played:,} deaths, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
