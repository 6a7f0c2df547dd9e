"""Compares rankmill serve with other rerank servers, by the same requests over HTTP, in turn.

    python -m benchmarks.comparison.served --model DIR --pairs FILE.parquet

The others are infinity's server and a plain one, which is FastAPI around sentence-transformers. All run all
the time, on this host, with all its cores and the same model. In each round every one gets the same requests,
a query with 20 documents each: one request after the other, then from 16 clients at once, each with a
connection of its own. It prints one JSON object of medians, and for each server the mean rank correlation
within a request with the scores of the plain fp32 server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from benchmarks.comparison.environments import HOME, ROOT, CannotInstall, python_for

_START_SECONDS = 180


@dataclass(frozen=True)
class Request:
    """A query with documents, as JSON."""

    body: bytes
    documents: int


@dataclass
class Server:
    """The address of a running server, and what was measured."""

    name: str
    port: int
    path: str
    lone_ms: list[float] = field(default_factory=list)
    pairs_per_second: list[float] = field(default_factory=list)

    def ask(self, line: http.client.HTTPConnection, request: Request) -> list[float]:
        line.request("POST", self.path, request.body, {"content-type": "application/json"})
        reply = line.getresponse()
        raw = reply.read()
        assert reply.status == 200, raw
        scores = [0.0] * request.documents
        for each in json.loads(raw)["results"]:
            scores[each["index"]] = each["relevance_score"]
        return scores

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_SECONDS)


def main() -> None:
    """Run all servers, measure them in turn, and print one JSON object."""
    args = _arguments()
    requests = _requests(args.pairs, args.requests, args.size)
    HOME.mkdir(exist_ok=True)
    with ExitStack() as ends:
        servers, missing = _started(ends, args.model.resolve(), args.precision, args.only)
        scores = {each.name: [each.ask(each.connect(), one) for one in requests[:40]] for each in servers}
        for number in range(args.repeats):
            print(f"round {number + 1}", file=sys.stderr, flush=True)
            for server in servers:
                server.lone_ms.append(_lone(server, requests[: args.lone]))
            for server in servers:
                server.pairs_per_second.append(_together(server, requests, args.clients))
            for server in servers:
                found = {"lone_ms": server.lone_ms[-1], "pairs_per_second": server.pairs_per_second[-1]}
                print(f"{server.name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    ours = servers[0]
    result: dict[str, Any] = {"cannot be had": missing} if missing else {}
    for each in servers:
        result[each.name] = {
            "lone_ms": round(statistics.median(each.lone_ms), 1),
            "pairs_per_second": round(statistics.median(each.pairs_per_second), 1),
            "rankmill_is_faster": round(_ratio(ours.pairs_per_second, each.pairs_per_second), 2),
            "rankmill_lone_takes": round(_ratio(ours.lone_ms, each.lone_ms), 2),
            "spearman_with_plain": round(_agreement(scores[each.name], scores.get("plain", [])), 4),
        }
    print(json.dumps(result, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparison.served", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of a cross-encoder")
    parser.add_argument("--pairs", type=Path, required=True, help="Parquet: query, passage")
    parser.add_argument("--requests", type=int, default=60, help="requests of a round")
    parser.add_argument("--size", type=int, default=20, help="documents in a request")
    parser.add_argument("--clients", type=int, default=16, help="clients at once")
    parser.add_argument("--lone", type=int, default=11, help="requests one after the other")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are printed")
    parser.add_argument("--precision", default="auto", help="rankmill's; the others compute in fp32")
    parser.add_argument("--only", nargs="+", choices=["infinity", "plain"], default=["infinity", "plain"])
    return parser.parse_args()


def _requests(source: Path, most: int, size: int) -> list[Request]:
    """Queries with `size` documents each, one request for a query at a time, in a fixed random order."""
    rows = pq.read_table(source, columns=["query", "passage"]).to_pandas()
    bodies = []
    for query, group in rows.groupby("query", sort=True):
        texts = group["passage"].tolist()
        parts = [texts[start : start + size] for start in range(0, len(texts) - size + 1, size)]
        bodies += [json.dumps({"query": query, "documents": part}).encode() for part in parts]
    chosen = np.random.default_rng(0).permutation(len(bodies))[:most]
    return [Request(bodies[place], size) for place in chosen]


def _started(
    ends: ExitStack, model: Path, precision: str, others: list[str]
) -> tuple[list[Server], dict[str, str]]:
    """Start the servers, rankmill's first; returns them, and why others cannot be had."""
    program = Path(sys.executable).with_name("rankmill")
    serve = [str(program), "serve", "--embedded", "--model", str(model), "--precision", precision, "--port"]
    servers = [ends.enter_context(_running("rankmill", serve, "/infinity/rerank"))]
    missing = {}
    for name, script in (("infinity", "infinity_server.py"), ("plain", "st_server.py")):
        path = ROOT / "benchmarks" / "peers" / script
        try:
            if name in others:
                command = [str(python_for(path)), str(path), str(model)]
                servers.append(ends.enter_context(_running(name, command, "/rerank")))
        except CannotInstall as error:
            missing[name] = str(error)
    return servers, missing


@contextmanager
def _running(name: str, command: list[str], path: str) -> Iterator[Server]:
    """Start a server at a free port, the last word of `command`, and wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = Server(name, free.getsockname()[1], path)
    with tempfile.TemporaryFile() as log:
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen([*command, str(server.port)], stdout=log, stderr=log, env=environ)
        try:
            probe = Request(json.dumps({"query": "moon", "documents": ["far"]}).encode(), 1)
            deadline = time.monotonic() + _START_SECONDS
            while True:
                try:
                    server.ask(server.connect(), probe)
                    break
                except (OSError, http.client.HTTPException):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(os.pread(log.fileno(), 1 << 16, 0).decode()) from None
                    time.sleep(0.2)
            print(f"{name} answers", file=sys.stderr, flush=True)
            yield server
        finally:
            process.terminate()
            process.wait()


def _lone(server: Server, requests: list[Request]) -> float:
    """Median time (ms) of requests that come one after the other."""
    line, took = server.connect(), []
    for request in requests:
        started = time.perf_counter()
        server.ask(line, request)
        took.append(1000 * (time.perf_counter() - started))
    return statistics.median(took)


def _together(server: Server, requests: list[Request], clients: int) -> float:
    """Pairs a second of clients that take the requests in turn."""
    waiting, done = iter(requests), []

    def work() -> None:
        line = server.connect()
        for request in waiting:
            done.append(len(server.ask(line, request)))

    threads = [threading.Thread(target=work) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == len(requests)
    return sum(done) / (time.perf_counter() - started)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _agreement(found: list[list[float]], plain: list[list[float]]) -> float:
    """The mean of Spearman's correlation within a request; NaN without the plain server."""
    each = [
        pd.Series(one).corr(pd.Series(other), method="spearman")
        for one, other in zip(found, plain, strict=False)
    ]
    return float(np.mean(each)) if each else float("nan")


if __name__ == "__main__":
    main()
