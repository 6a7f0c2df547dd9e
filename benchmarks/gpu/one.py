"""One of several processes that score on one device at a time; it waits for a word, and prints its speed."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.ways import device_precision, loaded, pairs_for, timed_forwards
from rankmill.workers.engine.work import prepare


def main() -> None:
    """Load, say so, wait, score for some seconds, print the pairs a second."""
    model, device, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        pairs = pairs_for("MiniLM-L6", Path(folder), 64 if device == "cpu" else 8192)
        engine = loaded(model, device, device_precision(device), Path(folder))
        work = prepare(engine.model, *pairs)
        timed_forwards(engine, work)
        print("ready", flush=True)
        sys.stdin.readline()
        done, taken = 0, 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            taken += timed_forwards(engine, work)[0]
            done += len(pairs[0])
    print(json.dumps({"pairs_per_second": done / taken}))


if __name__ == "__main__":
    main()
