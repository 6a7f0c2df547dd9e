"""Measures embedded score-file by its time for every pair minus that of the same command for one pair.

``load_seconds`` is the time of the command for one pair. Variants are precisions. The script runs in the
project's own environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from contract import arguments, report


def run(source: Path, model: Path, precision: str, folder: Path) -> tuple[float, dict[str, Any], Any]:
    """Seconds that the command took, its summary and the scores."""
    output = Path(tempfile.mkdtemp(dir=folder)) / "scored.parquet"
    command = [
        Path(sys.executable).parent / "score-file",
        source,
        "--model",
        model,
        "--precision",
        precision,
        "-o",
        output,
        "--json",
        "-q",
    ]
    started = time.perf_counter()
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.returncode)  # it has said why, in one line
    return seconds, json.loads(done.stdout), pq.read_table(output)["score"].to_numpy()


def main() -> None:
    """Both commands, one after the other."""
    args = arguments(choices=["auto", "int8"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = folder / "one.parquet"
        pq.write_table(pq.read_table(args.pairs).slice(0, 1), one)
        # twice, because the first run warms the disk's cache
        startup = min(run(one, args.model, args.variant, folder)[0] for _ in range(2))
        seconds, summary, scores = run(args.pairs, args.model, args.variant, folder)
    if seconds <= startup:
        sys.exit("one pair took longer than all of them: the machine is too busy, or the pairs too few")
    settings = (
        f"{summary['device']}, {summary['backend']}, {summary['precision']}; "
        f"{summary['real_token_share']:.1%} real tokens"
    )
    report(
        args,
        scores,
        startup,
        seconds - startup,
        summary["precision"],
        settings,
        ["rankmill", "rq", "pyarrow"],
    )


if __name__ == "__main__":
    main()
