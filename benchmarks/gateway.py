"""Measures what HTTP costs a lone request, and how the gateway serves many clients and large requests.

    python -m benchmarks.gateway                    # with the shipped model
    python -m benchmarks.gateway --simulated 1      # with a worker that sleeps a second for 1,000 pairs
    python -m benchmarks.gateway --overload         # 40 requests of 2,000 documents at 200 pairs a second

The command compares in turn: a lone request of 20 pairs through HTTP and through `Client`, and ``/health``;
the pairs as one bulk run and as requests of 20 by 16 clients, each with a connection of its own, with the CPU
time that each process took for a request. Then it sends one request of 10,000 documents, and 1,000 requests
at once, each until it is answered with 200, and looks at the gateway's memory.

With ``--overload``, all requests come at once, to a gateway and a worker that have just started, and those
that are refused come again when they are told to. A request that was taken must not time out.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rq import Worker

from benchmarks.cluster import cluster
from benchmarks.simulated import simulated_cluster
from rankmill import Client

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pairs.jsonl"

Pairs = list[tuple[str, str]]


def main() -> None:
    """Run all parts and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--simulated", type=float, help="a worker that sleeps so many seconds for 1,000 pairs"
    )
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--size", type=int, default=20, help="pairs in a request")
    parser.add_argument("--lone", type=int, default=41, help="lone requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--crowd", type=int, default=1000, help="requests at once")
    parser.add_argument("--overload", action="store_true", help="send more than the worker can do")
    args = parser.parse_args()
    if args.overload:
        print(json.dumps(overload(requests=40, documents=2000, pairs_per_second=200, seconds=100), indent=2))
        return
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    known = [(row["query"], row["passage"]) for row in rows]
    pairs = [known[number % len(known)] for number in range(args.pairs)]
    place_of = simulated_cluster(1, args.simulated) if args.simulated else cluster(1, 2)
    with place_of as place, gateway(place.url, args.model, backlog_seconds=600) as (port, process):
        client = Client(place.url, model=args.model)
        client.score(pairs[:200])  # the model is loaded
        result = lone(client, port, pairs[: args.size], args.lone)
        processes = processes_of(client, process)
        rounds = []
        for _ in range(args.repeats):
            whole, before = bulk(client, pairs), cpu_seconds(processes)
            rounds.append((whole, by_clients(port, pairs, args.size, args.clients)))
            for name, seconds in cpu_seconds(processes).items():
                each = 1000 * (seconds - before[name]) * args.size / len(pairs)
                result[f"cpu_ms_of_{name}"] = each  # of the last round
        result["clients_over_bulk"] = statistics.median(each / whole for whole, each in rounds)
        result["bulk_pairs_per_second"] = statistics.median(whole for whole, _ in rounds)
        result |= large(port, args.documents)
        result |= asyncio.run(crowd(port, pairs[: args.size], args.crowd, process))
    print(json.dumps({key: round(value, 4) for key, value in result.items()}, indent=2))


@contextmanager
def gateway(url: str, model: str, **settings: float) -> Iterator[tuple[int, psutil.Process]]:
    """Start a gateway, with `settings` in place of its defaults; yields its port and process."""
    program = Path(sys.executable).with_name("rankmill")
    options = ["--redis", url, "--model", model, "--port", "0", "--log-level", "warning"]
    given = {f"RANKMILL_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
    environ = {**os.environ, **given}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(program), "serve", *options], stderr=log, env=environ)
        try:
            while not (found := re.search(rb" at http://127\.0\.0\.1:(\d+)", _read(log))):
                assert process.poll() is None, _read(log).decode()
                time.sleep(0.05)
            yield int(found[1]), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _read(log: Any) -> bytes:
    return os.pread(log.fileno(), 1 << 16, 0)


def body_of(pairs: Pairs) -> bytes:
    """A request for the scores of pairs."""
    queries, documents = zip(*pairs, strict=True)
    return json.dumps({"queries": list(queries), "documents": list(documents)}).encode()


def ask(line: http.client.HTTPConnection, body: bytes) -> list[float]:
    """The scores of a request."""
    line.request("POST", "/score", body, {"content-type": "application/json"})
    reply = line.getresponse()
    found = json.loads(reply.read())
    assert reply.status == 200, found
    return [each["score"] for each in found["data"]]


def lone(client: Client, port: int, pairs: Pairs, times: int) -> dict[str, float]:
    """Median latencies (ms) of a lone request by both ways, and of ``/health``, and how much HTTP adds."""
    line = http.client.HTTPConnection("127.0.0.1", port)
    body = body_of(pairs)
    ask(line, body)
    by_http, by_client, by_health = [], [], []
    for _ in range(times):
        time.sleep(0.1)
        started = time.perf_counter()
        ask(line, body)
        between = time.perf_counter()
        time.sleep(0.1)
        again = time.perf_counter()
        client.score(pairs)
        by_http.append(1000 * (between - started))
        by_client.append(1000 * (time.perf_counter() - again))
        time.sleep(0.1)
        begun = time.perf_counter()
        line.request("GET", "/health")
        line.getresponse().read()
        by_health.append(1000 * (time.perf_counter() - begun))
    more = statistics.median(one - other for one, other in zip(by_http, by_client, strict=True))
    health = statistics.median(by_health)
    medians = {"lone_http_ms": statistics.median(by_http), "lone_client_ms": statistics.median(by_client)}
    return {**medians, "http_takes_more_ms": more, "health_ms": health, "more_over_health": more / health}


def processes_of(client: Client, gateway: psutil.Process) -> dict[str, psutil.Process]:
    """The processes that work on a request, by name."""
    server: Any = client.store.redis
    (worker,) = Worker.all(connection=server)
    return {
        "clients": psutil.Process(),
        "gateway": gateway,
        "server": psutil.Process(int(server.info("server")["process_id"])),
        "worker": psutil.Process(worker.pid),
    }


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """CPU time that each process has taken so far."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def bulk(client: Client, pairs: Pairs) -> float:
    """Pairs a second of one run of all pairs."""
    started = time.perf_counter()
    client.score(pairs, priority="bulk")
    return len(pairs) / (time.perf_counter() - started)


def by_clients(port: int, pairs: Pairs, size: int, clients: int) -> float:
    """Pairs a second of clients that send requests one after the other."""
    bodies = [body_of(pairs[start : start + size]) for start in range(0, len(pairs), size)]
    shares = [bodies[number::clients] for number in range(clients)]
    counts: list[int] = []

    def work(share: list[bytes]) -> None:
        line = http.client.HTTPConnection("127.0.0.1", port)
        counts.append(sum(len(ask(line, body)) for body in share))

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    assert sum(counts) == len(pairs)
    return len(pairs) / seconds


def large(port: int, documents: int) -> dict[str, float]:
    """Seconds that one request with many documents takes."""
    line = http.client.HTTPConnection("127.0.0.1", port)
    started = time.perf_counter()
    body = body_of([("how far is the moon", f"text {number}") for number in range(documents)])
    assert len(ask(line, body)) == documents
    return {"large_request_seconds": time.perf_counter() - started}


async def crowd(port: int, pairs: Pairs, requests: int, process: psutil.Process) -> dict[str, float]:
    """Send requests at once, each again while it is told to come back; the gateway's memory is in MiB."""
    body = body_of(pairs)
    head = "POST /score HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    refused = 0

    async def one() -> int:
        nonlocal refused
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
            status = int(answer[9:12])
            if status != 429:
                assert status == 200, answer
                return len(json.loads(answer.partition(b"\r\n\r\n")[2])["data"])
            assert b"retry-after: " in answer.lower()
            refused += 1
            await asyncio.sleep(1)

    before = most = process.memory_info().rss
    started = time.perf_counter()
    working = asyncio.gather(*(one() for _ in range(requests)))
    while not working.done():
        await asyncio.sleep(0.1)
        most = max(most, process.memory_info().rss)
    assert await working == [len(pairs)] * requests
    return {
        "crowd_answered": requests,
        "crowd_refused_first": refused,
        "crowd_seconds": time.perf_counter() - started,
        "crowd_memory_mib": (most - before) / 2**20,
        "gateway_memory_mib": most / 2**20,
    }


def overload(
    requests: int, documents: int, pairs_per_second: float, seconds: float
) -> dict[str, float | dict[str, int]]:
    """Send all requests at once, and repeat refused ones for `seconds`; returns the number of answers by
    status. ``waited_seconds`` is the longest time from the moment when a request was taken to its answer 200.
    """
    body = body_of([("how far is the moon", f"text {number}") for number in range(documents)])
    found: Counter[str] = Counter()
    waited = [0.0]
    started = time.monotonic()

    def one(port: int) -> None:
        status = 429
        while status == 429 and time.monotonic() - started < seconds:
            line = http.client.HTTPConnection("127.0.0.1", port)
            sent = time.monotonic()
            line.request("POST", "/score", body, {"content-type": "application/json"})
            reply = line.getresponse()
            reply.read()
            status = reply.status
            found[str(status)] += 1
            if status == 200:
                waited.append(time.monotonic() - sent)
            elif status == 429:
                time.sleep(int(reply.headers["retry-after"]))

    with simulated_cluster(1, 1000 / pairs_per_second) as place, gateway(place.url, "demo") as (port, _):
        Client(place.url, model="demo").score([("moon", "far")])  # the model is loaded
        threads = [threading.Thread(target=one, args=(port,)) for _ in range(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    took = time.monotonic() - started
    return {
        "answers": dict(found),
        "waited_seconds": max(waited),
        "pairs_per_second": found["200"] * documents / took,
        "seconds": took,
    }


if __name__ == "__main__":
    main()
