"""Measures padding, throughput and latency of many small requests at once, and of a lone one.

    python -m benchmarks.requests --model MODEL --pairs PAIRS.parquet
    python -m benchmarks.requests --simulated 1 --pairs PAIRS.parquet

The command compares, in turn and several times, the pairs as one bulk run with the same pairs as requests of
20 that arrive together, from one thread and from one asyncio client. Then it compares, in turn again, a lone
request of 100 pairs on an idle worker with scoring the same pairs in process, than which no queue can be
faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.cluster import cluster
from benchmarks.simulated import simulated_cluster
from rankmill import AsyncClient, Client
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.producer.client.runs import ScoringRun
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import resolve_device, use_threads
from rankmill.workers.models.loading import load_model

Pairs = list[tuple[str, str]]


def main() -> None:
    """Run all parts and print one JSON object of medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--simulated", type=float, help="a worker that sleeps so many seconds for 1,000 pairs"
    )
    parser.add_argument("--pairs", type=Path, required=True, help="parquet: query, passage")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--size", type=int, default=20, help="pairs in a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lone", type=int, default=31, help="lone requests")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = pq.read_table(args.pairs, columns=["query", "passage"]).slice(0, args.requests * args.size)
    pairs = list(zip(rows["query"].to_pylist(), rows["passage"].to_pylist(), strict=True))
    rounds = []
    slow = args.simulated
    with simulated_cluster(1, slow) if slow else cluster(1, args.threads) as place:
        client = Client(place.url, model=args.model, window=10_000)
        client.score(pairs[:200])  # the model is loaded
        for _ in range(args.repeats):
            asked = at_once(place.url, args.model, pairs, args.size)
            rounds.append({**bulk(client, pairs), **together(client, pairs, args.size), **asked})
        result: dict[str, Any] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for kind in ("requests", "asyncio"):
            shares = [r[f"{kind}_pairs_per_second"] / r["bulk_pairs_per_second"] for r in rounds]
            result[f"{kind}_over_bulk"] = statistics.median(shares)
        if not slow:
            result |= alone(client, engine_of(args.model, args.threads), pairs[:100], args.lone)
    print(json.dumps({key: round(value, 4) for key, value in result.items()}, indent=2))


def bulk(client: Client, pairs: Pairs) -> dict[str, float]:
    """One run of all pairs."""
    started = time.perf_counter()
    share = real_share([client.submit(pairs)])
    seconds = time.perf_counter() - started
    return {"bulk_pairs_per_second": len(pairs) / seconds, "bulk_real_tokens": share}


def together(client: Client, pairs: Pairs, size: int) -> dict[str, float]:
    """All pairs as requests that arrive at once."""
    started = time.perf_counter()
    runs = [client.submit(pairs[start : start + size]) for start in range(0, len(pairs), size)]
    share = real_share(runs)
    seconds = time.perf_counter() - started
    return {"requests_pairs_per_second": len(pairs) / seconds, "requests_real_tokens": share}


def at_once(url: str, model: str, pairs: Pairs, size: int) -> dict[str, float]:
    """All pairs as requests of one asyncio client, each awaited by a task of its own."""

    async def main() -> dict[str, float]:
        async with AsyncClient(url, model=model) as client:
            await client.score(pairs[:size])
            before = time.process_time()
            started = time.perf_counter()
            requests = [pairs[start : start + size] for start in range(0, len(pairs), size)]
            scores = await asyncio.gather(*(client.score(each) for each in requests))
            seconds = time.perf_counter() - started
            assert all(len(each) == len(asked) for each, asked in zip(scores, requests, strict=True))
            assert not any(each.errors for each in scores)
            cpu = 1000 * (time.process_time() - before) / len(requests)
            return {"asyncio_pairs_per_second": len(pairs) / seconds, "asyncio_cpu_ms_per_request": cpu}

    return asyncio.run(main())


def alone(client: Client, engine: Engine, pairs: Pairs, times: int) -> dict[str, float]:
    """Median latencies of a lone request and of scoring it in process, and the median of the difference."""
    queries, passages = [q for q, _ in pairs], [p for _, p in pairs]
    engine.score(queries, passages)
    lone: list[float] = []
    here: list[float] = []
    for _ in range(times):
        lone.append(milliseconds(lambda: client.score(pairs)))
        here.append(milliseconds(lambda: engine.score(queries, passages)))
    more = statistics.median(one - other for one, other in zip(lone, here, strict=True))
    medians = {"lone_request_ms": statistics.median(lone), "in_process_ms": statistics.median(here)}
    return {**medians, "lone_request_takes_more_ms": more}


def milliseconds(score: Callable[[], object]) -> float:
    """Milliseconds that a call takes, after a pause."""
    time.sleep(0.2)
    started = time.perf_counter()
    score()
    return 1000 * (time.perf_counter() - started)


def engine_of(model: str, threads: int) -> Engine:
    """An engine in this process with the worker's settings."""
    use_threads(threads)
    device = resolve_device("auto")
    return Engine(load_model(ScoreSpec(model=model), device), first_budget("auto", device))


def real_share(runs: list[ScoringRun]) -> float:
    """Wait for the runs; returns the share of the computed tokens that were real."""
    stats = [part.stats for run in runs for part in run.tables() if part.stats]
    return sum(s.tokens for s in stats) / sum(s.padded_tokens for s in stats)


if __name__ == "__main__":
    main()
