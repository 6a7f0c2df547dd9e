"""Measures what taking and cancelling jobs of a long queue costs, and what share each tenant gets.

    python -m benchmarks.waiting

The command prints the server's microseconds for a take of 1,000 runs with 1,000,000 chunks, and of one run
with 10 (goal: at most 1.2 times); the longest PING while 100,000 waiting chunks are cancelled (goal: 10 ms),
and the longest of the commands, as PINGs also wait for the host; and what four tenants with weights 1, 1, 2
and 4 got, one of them with 200 runs, of eight takers that differ in speed (goal: within 3%), as chunks are
handed back now and then. Nothing is scored: the takers sleep.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import threading
import time
from collections import Counter
from statistics import median
from typing import Any

import redis

from benchmarks.cluster import valkey
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.priority import Tenant
from rankmill.jobs.contract.run import Run, new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.runs import RunStore

WEIGHTS = {"many runs": 1.0, "one run": 1.0, "weight 2": 2.0, "weight 4": 4.0}
SPEEDS = (1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 5.0, 8.0)


def main() -> None:
    """Measure each once."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the shares")
    args = parser.parse_args()
    with valkey() as url:
        store = Client(url, model="m").store
        few, many = take_costs(store)
        print(f"take: {few:.1f} us of one run with 10 chunks, {many:.1f} us of 1,000 runs with 1,000,000 "
              f"({many / few:.2f}, goal 1.2)")  # fmt: skip
        store.redis.flushall()
        seconds, command, longest, idle = cancel(store, url)
        print(f"cancel 100,000: {seconds:.2f} s; longest command {command * 1e3:.1f} ms, longest PING "
              f"{longest * 1e3:.1f} ms (goal 10), {idle * 1e3:.1f} ms before")  # fmt: skip
        store.redis.flushall()
        print(shares(store, url, args.seconds))


def put(store: RunStore, tenant: str, weight: float, chunks: int, rows: int, queue: str = "q") -> Run:
    """A run whose chunks wait."""
    run = new_run(ScoreSpec(model="m"), queue=queue, ttl=3600, max_retries=1, priority="bulk",
                  tenant=Tenant(tenant, weight))  # fmt: skip
    for first in range(0, chunks, 500):
        some: dict[ChunkId, Payload] = {
            number: Payload(b"", rows) for number in range(first, min(first + 500, chunks))
        }
        store.enqueue(run, some, new=not first)
    return run


def take_costs(store: RunStore) -> tuple[float, float]:
    """Microseconds of the server's CPU for a take: with little, and with much that waits."""
    small, large = store.queue("small"), store.queue("large")
    mine = put(store, "t", 1.0, 1, 1024, "small")
    for number in range(1000):
        run = put(store, f"t{number % 100}", 1.0, 1, 1024, "large")
        large.add(store.redis, [keys.job_id(run.id, chunk) for chunk in range(1, 1000)])
    few, many = list[float](), list[float]()
    for _ in range(300):
        small.add(store.redis, [keys.job_id(mine.id, chunk) for chunk in range(10)])
        few.append(cost(small, 8))
        many.append(cost(large, 8))
        cost(small, 3)
    return median(few), median(many)


def cost(queue: OrderedQueue, takes: int) -> float:
    """Microseconds of the server's CPU for one of some takes."""
    connection: Any = queue.connection
    connection.config_resetstat()
    for _ in range(takes):
        queue.take(["request", "bulk"], worker="w")
    return float(connection.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def cancel(store: RunStore, url: str) -> tuple[float, float, float, float]:
    """Seconds to cancel 100,000 chunks; the longest command and PING meanwhile, and a PING without that."""
    run = put(store, "t", 1.0, 100_000, 1024)
    processes = multiprocessing.get_context("spawn")
    longest, over = processes.Value("d", 0.0), processes.Event()
    pinging = processes.Process(target=ping, args=(url, longest, over))
    pinging.start()
    time.sleep(5)
    idle, longest.value = longest.value, 0.0
    store.redis.config_set("slowlog-log-slower-than", 100)
    store.redis.config_set("slowlog-max-len", 100_000)
    store.redis.slowlog_reset()
    began = time.perf_counter()
    store.delete(run, range(100_000))
    seconds = time.perf_counter() - began
    over.set()
    pinging.join()
    command = max(each["duration"] for each in store.redis.slowlog_get(100_000)) / 1e6
    return seconds, command, longest.value, idle


def ping(url: str, longest: Any, over: Any) -> None:
    """Note how long the longest PING took, in a process of its own."""
    client = redis.Redis.from_url(url)
    while not over.is_set():
        began = time.perf_counter()
        client.ping()
        longest.value = max(longest.value, time.perf_counter() - began)
        time.sleep(0.0005)


def shares(store: RunStore, url: str, seconds: float) -> str:
    """A line with what each tenant got, and what its part is."""
    tenants = dict[str, str]()
    sizes = dict[str, int]()
    dice = random.Random(1)
    for tenant, weight in WEIGHTS.items():
        runs = 200 if tenant == "many runs" else 1
        for _ in range(runs):
            rows = dice.choice([64, 256, 512, 1024]) if runs > 1 else 512
            run = put(store, tenant, weight, 40_000 // runs, rows)
            tenants[run.id], sizes[run.id] = tenant, rows
    had, counts, lock, over = Counter[str](), Counter[str](), threading.Lock(), threading.Event()

    def score(number: int) -> None:
        queue, chance = Client(url, model="m").store.queue("q"), random.Random(number)
        while not over.is_set():
            job = queue.take(["request", "bulk"], worker=f"w{number}").job_id.decode()
            run_id = job.rpartition("-")[0]
            if chance.random() < 0.02:
                queue.place(queue.connection, job, at_front=True)
                counts["handed back"] += 1
                continue
            time.sleep(sizes[run_id] / (SPEEDS[number] * 8000))
            with lock:
                had[tenants[run_id]] += sizes[run_id]
                counts["chunks"] += 1

    threads = [threading.Thread(target=score, args=(number,)) for number in range(len(SPEEDS))]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    total, weights = had.total(), sum(WEIGHTS.values())
    off = {
        tenant: f"{had[tenant] / total / (weight / weights) - 1:+.2%}" for tenant, weight in WEIGHTS.items()
    }
    return f"shares of {counts['chunks']:,} chunks, {counts['handed back']} handed back: {off} (goal 3%)"


if __name__ == "__main__":
    main()
