"""Measures what two tenants get from the same workers if one has two hundred runs and the other has one.

    python -m benchmarks.tenants                    # workers with the shipped model
    python -m benchmarks.tenants --simulated 1      # workers that sleep a second for 1,000 pairs
    python -m benchmarks.tenants --simulated 1 --weight 3

All runs are bulk work, and have begun before the measurement. Pairs are those in the tenants' accounts. The
goal is that the tenants' shares are as their weights, within 10%.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import redis

from benchmarks.cluster import cluster, wait_until
from benchmarks.simulated import collect, simulated_cluster
from rankmill import Client
from rankmill.jobs.protocol.accounts import read_accounts

WINDOW = 1024
"""Chunks of a tenant that are in Redis at a time."""


def main() -> None:
    """Measure once and print a line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--simulated", type=float, help="workers that sleep so many seconds for 1,000 pairs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=200, help="of the greedy tenant")
    parser.add_argument("--weight", type=float, default=1.0, help="of the modest tenant")
    parser.add_argument("--chunk-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    slow = args.simulated
    place_of = simulated_cluster(args.workers, slow) if slow else cluster(args.workers, 1)
    with place_of as place:
        runs = {"greedy": (args.runs, 1.0), "modest": (1, args.weight)}
        for tenant, (many, weight) in runs.items():
            options = (place.url, tenant, many, {"weight": weight, "chunk_size": args.chunk_size})
            multiprocessing.get_context("spawn").Process(target=submit, args=options, daemon=True).start()
            wait_until(partial(used, place.url, tenant))
        time.sleep(5)
        before = {tenant: used(place.url, tenant) for tenant in runs}
        time.sleep(args.seconds)
        had = {tenant: used(place.url, tenant) - before[tenant] for tenant in runs}
    print(f"{had}: {had['modest'] / had['greedy']:.3f} to 1, goal {args.weight:g}")


def submit(url: str, tenant: str, runs: int, options: dict[str, Any]) -> None:
    """Begin endless runs, and read them."""
    client = Client(url, model="demo", tenant=tenant, window=max(WINDOW // runs, 4), **options)
    begun = [client.submit(pairs(), priority="bulk") for _ in range(runs)]
    threads = [threading.Thread(target=collect, args=(run,)) for run in begun]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def used(url: str, tenant: str) -> int:
    """Pairs in a tenant's account."""
    entries = read_accounts(redis.Redis.from_url(url), 2, tenant)
    return sum(entry.amounts.pairs for entry in entries)


def pairs() -> Iterator[tuple[str, str]]:
    """Pairs without an end."""
    for number in count():
        yield "how far is the moon", f"passage {number} says that it is far away"


if __name__ == "__main__":
    main()
