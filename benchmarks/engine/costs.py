"""Measures what simulated workers cost their server, and estimates what 1,000 of them would.

    python -m benchmarks.engine.costs --workers 8 64 --seconds 15

For each number of workers, the command prints the server's CPU time a second while nobody submits anything
(heartbeats, cleaning, waiting for jobs), then for each chunk of an endless run, and its most expensive
commands in both. Two numbers of workers tell what each worker adds, and so the server's load for any number
of them.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import wait_until
from benchmarks.simulated import WARM_UP, collect, endless_pairs, finished, server_cpu, simulated_cluster
from rankmill import Client

TOP = 8
"""Commands that are printed."""

Commands = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Phase:
    """CPU time (s) of the server in `seconds`; chunks finished; calls and time (s) by command."""

    seconds: float
    cpu: float
    chunks: int
    commands: Commands

    @property
    def load(self) -> float:
        """CPU seconds of the server a second."""
        return self.cpu / self.seconds


@dataclass(frozen=True)
class Costs:
    """The cost of a number of workers while they wait, and while they score."""

    workers: int
    idle: Phase
    busy: Phase

    @property
    def chunk_ms(self) -> float:
        """CPU milliseconds of a chunk, without what the workers cost anyway."""
        return 1000 * (self.busy.load - self.idle.load) * self.busy.seconds / max(self.busy.chunks, 1)


def measure(workers: int, seconds: float, chunk_seconds: float, chunk_size: int) -> Costs:
    """Measure a cluster of workers whose chunks take `chunk_seconds`."""
    with simulated_cluster(workers, chunk_seconds * 1000 / chunk_size) as cluster:
        time.sleep(WARM_UP)
        idle = _phase(cluster.client, seconds, None)
        run = Client(cluster.url, model="demo", chunk_size=chunk_size).submit(endless_pairs())
        producer = threading.Thread(target=collect, args=(run,), daemon=True)
        producer.start()
        wait_until(lambda: finished(cluster.client, run.id))
        time.sleep(WARM_UP)
        busy = _phase(cluster.client, seconds, run.id)
        run.cancel()
        producer.join()
    return Costs(workers, idle, busy)


def _phase(client: Any, seconds: float, run_id: str | None) -> Phase:
    def chunks() -> int:
        return finished(client, run_id) if run_id else 0

    before, began, done, since = _commands(client), server_cpu(client), chunks(), time.monotonic()
    time.sleep(seconds)
    after = _commands(client)
    none = (0.0, 0.0)
    used = {
        name: (after[name][0] - before.get(name, none)[0], after[name][1] - before.get(name, none)[1])
        for name in after
    }
    return Phase(time.monotonic() - since, server_cpu(client) - began, chunks() - done, used)


def _commands(client: Any) -> Commands:
    found = client.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): (each["calls"], each["usec"] / 1e6) for name, each in found.items()
    }


def report(found: Costs) -> list[str]:
    """The costs in lines."""
    lines = [
        f"{found.workers} workers: idle {1000 * found.idle.load:.1f} ms of CPU a second; "
        f"{found.busy.chunks / found.busy.seconds:.1f} chunks/s, {found.chunk_ms:.2f} ms for each"
    ]
    for name, phase in (("idle", found.idle), ("busy", found.busy)):
        costly = sorted(phase.commands.items(), key=lambda item: -item[1][1])[:TOP]
        told = (
            f"{command} {calls / phase.seconds:.0f}/s at {1e6 * spent / calls:.0f} us"
            for command, (calls, spent) in costly
            if calls
        )
        lines.append(f"  {name}: {', '.join(told)}")
    return lines


def extrapolate(small: Costs, large: Costs, workers: int) -> str:
    """A line with the server's load for this many workers."""
    each = (large.idle.load - small.idle.load) / (large.workers - small.workers)
    fixed = max(small.idle.load - each * small.workers, 0.0)
    idle = fixed + each * workers
    left = max(0.8 - idle, 0.0)
    return (
        f"a worker adds {1000 * each:.3f} ms a second; {workers} workers: "
        f"{idle:.2f} of a core while they wait, and {1000 * left / large.chunk_ms:.0f} chunks/s "
        "until the server uses 0.8 of one"
    )


def main() -> None:
    """Measure, print, extrapolate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs=2, default=[8, 64])
    parser.add_argument("--seconds", type=float, default=15, help="for each measurement")
    parser.add_argument("--chunk-seconds", type=float, default=1.0)
    parser.add_argument("--chunk-size", type=int, default=1000)
    parser.add_argument("--to", type=int, default=1000, help="workers to extrapolate to")
    options = parser.parse_args()
    found = [
        measure(workers, options.seconds, options.chunk_seconds, options.chunk_size)
        for workers in options.workers
    ]
    for each in found:
        print("\n".join(report(each)))
    print(extrapolate(found[0], found[1], options.to))


if __name__ == "__main__":
    main()
