"""``python -m tests.simulation.scale``: many workers and runs in virtual time: what they ask of their server.

Counted: commands at the server by name, chunks and rows by run, in some virtual seconds of a cluster in
which every worker's forward takes its time and nothing else does. With ``--measure``, a cluster of a few
processes on a real server (`benchmarks.engine.costs`) tells what a call of each command costs there; computed
from both: the server's load at this size.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from itertools import count
from statistics import mean, median

import click

import rankmill.workers.worker as worker_module
from rankmill.producer.client.sync_client import Client
from tests.simulation.cluster import Cluster
from tests.simulation.server import Server
from tests.simulation.world import World, living_in

_TOKENS = 5
"""Tokens of a pair."""


@click.command()
@click.option("--workers", default=1000, show_default=True)
@click.option("--runs", default=100, show_default=True)
@click.option("--chunk-seconds", default=4.0, show_default=True, help="Work in a chunk.")
@click.option("--rows", default=16, show_default=True, help="Pairs of a chunk.")
@click.option("--window", default=40, show_default=True, help="Chunks of a run in Redis.")
@click.option("--warm", default=15.0, show_default=True, help="Virtual seconds before counting.")
@click.option("--seconds", default=20.0, show_default=True, help="Virtual seconds of counting.")
@click.option("--measure", default=0, metavar="N", help="Measure commands on a real server, with N workers.")
def main(
    workers: int,
    runs: int,
    chunk_seconds: float,
    rows: int,
    window: int,
    warm: float,
    seconds: float,
    measure: int,
) -> None:
    """Count what a large cluster asks of its server."""
    logging.disable(logging.CRITICAL)
    world, real = World(1), time.perf_counter()
    world.most_events = sys.maxsize
    with living_in(world):
        world.redis = Server(world)
        world.history.fair = False  # nobody judges here
        world.patch(worker_module, "set_up", lambda *_, **__: None)
        world.patch(worker_module, "require_worker_packages", lambda: None)
        cluster = Cluster(world, chunk_size=rows, window=window, claim_ahead=2 * rows)
        world.patch_environ("RANKMILL_TOKEN_BUDGET", str(_TOKENS * rows))  # a batch for each chunk
        for number in range(runs):
            cluster.producer(f"run-{number}", _submit)
        for _ in range(workers):
            cluster.worker(row_seconds=chunk_seconds / rows)
        world.run(lambda: world.now >= warm, seconds=2 * warm)
        calls, trips, busy = Counter(world.redis.calls), world.redis.commands, list[int]()
        ended = world.history.results
        while world.now < warm + seconds:
            busy.append(len(world.history.computing))
            until = world.now + 0.5
            world.run(lambda until=until: world.now >= until, seconds=5.0)  # type: ignore[misc]
        if world.crashes:
            raise world.crashes[0][2]
        calls, trips = world.redis.calls - calls, world.redis.commands - trips
        begun = Counter(name.partition("-")[0] for name, job in world.history.jobs.items() if job.attempts)
        ended = world.history.results - ended
    told = f"{workers:,} workers, {runs} runs, chunks of {chunk_seconds:g} s, {seconds:g} s of virtual time"
    shares = sorted(begun.values())
    print(
        f"{told}: {ended / seconds:.0f} results/s; workers that compute: {mean(busy) / workers:.3f}; "
        f"{calls.total() / seconds:,.0f} commands/s in {trips / seconds:,.0f} round trips/s; chunks begun "
        f"of a run: {shares[0]} to {shares[-1]}, median {median(shares):g}, {len(shares)} runs; it took "
        f"{time.perf_counter() - real:,.0f} s"
    )
    logging.disable(logging.NOTSET)
    costs = _measured(measure, chunk_seconds, rows) if measure else {}
    print("| command | calls/s | µs a call, measured | ms a second |\n| --- | --- | --- | --- |")
    for name, each in calls.most_common(20):
        cost = costs.get(name.lower())
        priced = f"{cost:.1f} | {each / seconds * cost / 1000:.1f}" if cost is not None else "| "
        print(f"| {name} | {each / seconds:,.0f} | {priced} |")
    if costs:
        load = sum(each / seconds * costs.get(name.lower(), 0.0) for name, each in calls.items()) / 1e6
        print(f"computed: {load:.2f} of a core for the commands themselves")


def _submit(client: Client) -> None:
    for _ in client.submit((("a query", f"passage {number}") for number in count()), priority="bulk"):
        pass


def _measured(workers: int, chunk_seconds: float, rows: int) -> dict[str, float]:
    """Microseconds of a call on a real server, by command."""
    from benchmarks.engine.costs import measure

    found = measure(workers, 10.0, chunk_seconds, rows).busy.commands
    return {name: 1e6 * spent / calls for name, (calls, spent) in found.items() if calls}


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.scale", *sys.argv[1:]])
    main()
