"""``python -m tests.simulation.reached``: the lines of the queue's code that simulated clusters reach."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import coverage

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("jobs/protocol", "producer/collect", "workers/queue")


@click.command()
@click.option("--first", default=1, show_default=True, metavar="SEED", help="First seed.")
@click.option("--seeds", default=30, show_default=True, metavar="N", help="How many seeds.")
def main(first: int, seeds: int) -> None:
    """Play some seeds, and list what of the queue's code none of them reached."""
    files = [str(ROOT / part / "*") for part in PARTS]
    measured = coverage.Coverage(branch=True, concurrency=["greenlet"], include=files, data_file=None)
    measured.start()
    from tests.simulation.scenario import Scenario, play  # its imports are measured, too

    for seed in range(first, first + seeds):
        play(Scenario.drawn(seed))
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
    print(f"{seeds} seeds reach {1 - missed / max(lines, 1):.0%} of {lines:,} lines")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.reached", *sys.argv[1:]])
    main()
