"""Damaged bytes for everything that reads Redis, for minutes; a seed fixes what and in which order.

    python -m benchmarks.fuzz --minutes 10 --seed 1

Jobs, metadata, leases, payloads, results, reports, runs and lists are damaged while two workers, an
exporter, `rankmill status` and a producer read them. Nobody's process may end, no traceback may be
written, and runs that are left alone get all their scores. Each finding is a line; the exit code is 1
if there are any.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks.cluster import BIN, start_worker, valkey, wait_until
from benchmarks.damaged_jobs import DATES, JSONS, NUMBERS, TEXTS, put_damaged, put_leases
from benchmarks.kills import environment
from benchmarks.models import random_bert
from jobs import keys
from jobs.errors import RankmillError
from jobs.store.worker_report import queue_workers
from producer import Client

PAIRS = [("big cat", f"moon river {number}") for number in range(40)]
ANYTHING = [*DATES, *JSONS, *NUMBERS, *TEXTS, b"RKML", b"RKML\x02" + b"\xff" * 40]
RUN_FIELDS = [b"format", b"spec", b"queue", b"ttl", b"max_retries", b"created", b"rows", b"odd"]
RESULT_FIELDS = [b"chunk", b"scores", b"stats", b"failure", b"fatal", b"attempts", b"worker", b"died"]
REPORT_FIELDS = [b"queues", b"state", b"birth", b"death", b"last_heartbeat", b"scoring"]


_FAILED_ATTEMPT = "exception raised while executing"
"""RQ's log line for a failed attempt, with its traceback; no process ended."""


@dataclass
class Fuzz:
    """A server, the processes that read it, and the faults found."""

    url: str
    server: Any
    client: Client
    rng: random.Random
    expected: np.ndarray
    findings: list[str] = field(default_factory=list)
    rounds: int = 0

    def damage_jobs(self) -> None:
        """Damage jobs in the queue, and RQ's keys about them."""
        fields: Any = {b"data": b"", b"origin": b"rankmill"}
        sample = next(self.server.scan_iter("rq:job:*"), None)
        if sample and self.server.type(sample) == b"hash":
            fields = self.server.hgetall(sample)
        for _ in range(self.rng.randint(1, 20)):
            job = put_damaged(self.server, "rankmill", fields, self.rng)
            put_leases(self.server, "rankmill", job, self.rng)

    def damage_reports(self) -> None:
        """Damage the list of workers, and their reports."""
        client, name = self.server, self.rng.choice([b"ghost", b"\xff", b"odd name"])
        client.sadd("rq:workers", b"rq:worker:" + name, self.rng.choice(ANYTHING))
        client.sadd("rq:workers:rankmill", b"rq:worker:" + name)
        client.delete(b"rq:worker:" + name)
        client.hset(b"rq:worker:" + name, self.rng.choice(REPORT_FIELDS), self.rng.choice(ANYTHING))
        client.expire(b"rq:worker:" + name, 30)
        client.set(keys.worker("").encode() + name, self.rng.choice(ANYTHING), ex=30)

    def damage_lists(self) -> None:
        """Damage the lists of runs, of queues and of jobs set aside."""
        client = self.server
        score = self.rng.choice([0.0, 1e308, float("inf"), time.time() + 60])
        client.zadd(keys.runs(), {self.rng.choice(ANYTHING): score})
        client.sadd("rq:queues", self.rng.choice(ANYTHING))
        client.lpush(keys.set_aside(), self.rng.choice(ANYTHING))

    def damage_run(self) -> None:
        """Damage a separate run: its record, payloads, results, progress; its producer may fail."""
        client = self.server
        try:
            run = self.client.submit(PAIRS)
            meta = keys.run(run.id)
            for _ in range(self.rng.randint(1, 3)):
                value = self.rng.choice(ANYTHING)
                attack = self.rng.randrange(6)
                if attack == 0:
                    client.hset(meta, self.rng.choice(RUN_FIELDS), value)
                elif attack == 1:
                    client.set(keys.pairs(run.id, self.rng.randrange(4)), value, ex=60)
                elif attack == 2:
                    some = self.rng.sample(RESULT_FIELDS, self.rng.randint(1, 6))
                    client.xadd(keys.results(run.id), {name: self.rng.choice(ANYTHING) for name in some})
                    client.expire(keys.results(run.id), 60)
                elif attack == 3:
                    client.set(keys.progress(run.id), value, ex=60)
                elif attack == 4:
                    client.delete(keys.errors(run.id))
                    client.rpush(keys.errors(run.id), value)
                    client.expire(keys.errors(run.id), 60)
                else:
                    client.set(
                        self.rng.choice([meta, keys.results(run.id), keys.errors(run.id)]), value, ex=60
                    )
            run.scores(timeout=20)
        except (RankmillError, TimeoutError, redis.ResponseError):
            pass  # as it should: one line; or what is damaged already cannot be damaged so

    def look(self, url: str, processes: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
        """Check that all processes live and work, and that undamaged runs get their scores."""
        for name, process in processes.items():
            if process.poll() is not None:
                self.findings.append(f"{name} ended with {process.returncode}")
        for path in ("metrics", "healthz", "sd", "api/cluster.json"):
            try:
                with urllib.request.urlopen(f"{url}/{path}", timeout=20) as reply:
                    body = reply.read()
                if path.endswith("json"):
                    json.loads(body, parse_constant=lambda name: self.findings.append(f"JSON has {name}"))
            except OSError as error:
                self.findings.append(f"exporter, {path}: {error}")
        for log in logs.glob("*.log"):
            lines = log.read_text(errors="replace").splitlines()
            text = "\n".join(line for line in lines if _FAILED_ATTEMPT not in line)
            if "Traceback" in text:
                self.findings.append(f"{log.name}: {text[text.index('Traceback') :][:3000]}")
                log.write_text("")
        status = [str(BIN / "rankmill"), "status", "--redis", self.url]
        done = subprocess.run(status, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode or "Traceback" in done.stderr:
            self.findings.append(f"status: {done.returncode} {done.stderr[-1500:]}")
        scores = self.client.score(PAIRS, timeout=60)
        if not np.allclose(scores, self.expected, atol=1e-5):
            self.findings.append(f"scores differ: {scores}")


def fuzz(minutes: float, seed: int, directory: Path) -> Fuzz:
    """Damage keys for the given time; returns the faults found."""
    model = directory / "model"
    random_bert(model, hidden=16, layers=2)
    environ = environment({"RANKMILL_HEARTBEAT_SECONDS": "1", "RANKMILL_LEASE_SECONDS": "3"})
    exporter_log = directory / "exporter.log"
    with valkey() as url:
        server = redis.Redis.from_url(url)
        processes = {
            name: start_worker(url, directory / f"{name}.log", environ, name=name)
            for name in ("worker-1", "worker-2")
        }
        command = [str(BIN / "rankmill"), "exporter", "--redis", url, "--address", "127.0.0.1:0"]
        with exporter_log.open("ab") as out:
            processes["exporter"] = subprocess.Popen(command, stdout=out, stderr=out, env=environment())
        try:
            wait_until(lambda: len(queue_workers(server, "rankmill").scoring) == 2)
            wait_until(lambda: " at http" in exporter_log.read_text())
            page = exporter_log.read_text().strip().rpartition(" at ")[2]
            client = Client(url, model=str(model), chunk_size=10)
            found = Fuzz(url, server, client, random.Random(seed), client.score(PAIRS, timeout=60))
            attacks: list[Callable[[], None]] = [
                found.damage_jobs,
                found.damage_reports,
                found.damage_lists,
                found.damage_run,
            ]
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until:
                found.rounds += 1
                known = set(found.findings)
                attack = found.rng.choice(attacks)
                try:
                    attack()
                    found.look(page, processes, directory)
                except Exception as error:  # whatever it is, it is a finding
                    found.findings.append(f"{type(error).__name__}: {error}")
                found.findings = list(dict.fromkeys(found.findings))
                for line in found.findings:
                    if line not in known:
                        print(f"round {found.rounds}, {attack.__name__}: {line}", flush=True)
            return found
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def main() -> None:
    """Damage keys for the given number of minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = fuzz(options.minutes, options.seed, Path(name))
    print(f"{found.rounds} rounds, {len(found.findings)} findings")
    if found.findings:
        sys.exit(1)


if __name__ == "__main__":
    main()
