"""``python -m tests.simulation.reached``: the lines of the queue's code that simulated clusters reach.

It plays the failures that were found, some seeds, and then the next seed with each thing that none of these
has: no line is told of only because what reaches it is rare.
"""

from __future__ import annotations

import os
import sys
from itertools import chain, count, islice
from pathlib import Path

import click
import coverage

ROOT = Path(__file__).resolve().parents[2]
PARTS = tuple(
    f"rankmill/{part}" for part in ("jobs/protocol", "producer/collect", "workers/queue", "workers/rq")
)


@click.command()
@click.option("--first", default=1, show_default=True, metavar="SEED", help="First seed.")
@click.option("--seeds", default=30, show_default=True, metavar="N", help="How many seeds.")
def main(first: int, seeds: int) -> None:
    """Play scenarios, and list what of the queue's code none of them reached."""
    files = [str(ROOT / part / "*") for part in PARTS]
    measured = coverage.Coverage(branch=True, concurrency=["greenlet"], include=files, data_file=None)
    measured.start()
    from tests.simulation.found import FOUND
    from tests.simulation.scenario import FEATURES, KINDS, RUN_KINDS, Scenario, play  # measured, too

    played = 0
    rare = {*KINDS, *RUN_KINDS, *FEATURES}
    scenarios = map(Scenario.drawn, count(first))
    for scenario in chain(FOUND, islice(scenarios, seeds), scenarios):
        has = {each for each in rare if scenario.has(each)}
        if has or played < len(FOUND) + seeds:
            play(scenario)
            played, rare = played + 1, rare - has
        if played >= len(FOUND) + seeds and not rare:
            break
    measured.stop()
    print("| module | lines | reached | never reached |\n| --- | --- | --- | --- |")
    lines = missed = 0
    for path in sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py")):
        if str(path) not in measured.get_data().measured_files():
            print(f"| {path.relative_to(ROOT)} | | not imported | |")
            continue
        _, statements, _, missing, text = measured.analysis2(str(path))
        lines, missed = lines + len(statements), missed + len(missing)
        share = 1 - len(missing) / max(len(statements), 1)
        print(f"| {path.relative_to(ROOT)} | {len(statements)} | {share:.0%} | {text} |")
    print(f"{played} scenarios reach {1 - missed / max(lines, 1):.0%} of {lines:,} lines")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.reached", *sys.argv[1:]])
    main()
