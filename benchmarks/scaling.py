"""Compares two workers of one thread with one such worker, in turn.

    python -m benchmarks.scaling --model MODEL --pairs PAIRS.parquet

Both clusters run from beginning to end, and each worker scores the whole sample each time, as one chunk. So
the ratio says what another core is worth, without the end of a run, at which one worker has no chunk left.
"""

from __future__ import annotations

import argparse
from statistics import median

from rankmill.extensions.lab.machine import markdown_table
from rankmill.extensions.lab.pairs import sample
from rankmill.extensions.lab.tune import Trials
from rankmill.jobs.runtime.settings import load_settings

TIMEOUT = 1800


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", required=True, help="a file: query, passage")
    parser.add_argument("--sample", type=int, default=800, help="pairs for each worker")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    base = load_settings({"model": args.model, "threads": 1, "chunk_size": args.sample})
    rows = []
    with Trials(base, sample(args.pairs, args.sample), "throughput", TIMEOUT) as trials:
        one, two = trials.warm({"workers": 1}), trials.warm({"workers": 2})
        for number in range(args.rounds + 1):
            order = (one, two) if number % 2 else (two, one)
            speeds = {bench.workers: args.sample / trials.bulk(bench).seconds for bench in order}
            if number:  # the first one warms up
                rows.append((speeds[1], speeds[2], speeds[2] / speeds[1]))
    found = [(f"{one:.1f}", f"{two:.1f}", f"{ratio:.2f}") for one, two, ratio in rows]
    found.append(("", "median", f"{median(ratio for *_, ratio in rows):.2f}"))
    print(markdown_table(("one worker, pairs/s", "two", "times"), found))


if __name__ == "__main__":
    main()
