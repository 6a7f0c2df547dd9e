"""Damages the data of everything that reads Redis, for minutes; a seed fixes what and in which order.

    python -m benchmarks.faults.fuzz --minutes 10 --seed 1

Jobs, metadata, leases, payloads, results, reports, runs and lists are damaged while two workers, an
exporter, `rankmill status`, score-file and a producer read them. No process may end, no thread may stop, no
traceback may be written, memory stays bounded, a damaged run gives its scores or one clear error, and runs
that are left alone get all their scores, from either worker. What a run stands on is attacked, too: keys
vanish, the server comes back empty with its clock behind, a model's directory changes, links are planted
beside an output, and options are mixed (`benchmarks.faults.surroundings`). Each finding is a line; the exit
code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import redis
from rq.job import Job

import rankmill.producer.collect.driver
from benchmarks.cluster import BIN, start_worker, valkey, wait_until
from benchmarks.engine.models import random_bert
from benchmarks.faults.damaged_jobs import put_damaged, put_leases
from benchmarks.faults.damaged_runs import ANYTHING, RunDamages, put
from benchmarks.faults.kills import environment, start
from benchmarks.faults.surroundings import Surroundings
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RankmillError, WireError
from rankmill.jobs.protocol.worker_report import queue_workers, worker_reports

CHUNK = 10
PAIRS = [("big cat", f"moon river {number}") for number in range(40)]
REPORT_FIELDS = [b"queues", b"state", b"birth", b"death", b"last_heartbeat", b"scoring", b"pid"]
WORKERS = ("worker-1", "worker-2")

MAX_GROWTH = 600 << 20
"""Bytes that a process may take beyond those it had at the start."""

STATUS_EVERY, ALONE_EVERY, FILE_EVERY = 4, 10, 15
"""Rounds between two checks of rankmill status, of each worker by itself, and of a file that is scored."""

_FAILED_ATTEMPT = "exception raised while executing"
"""RQ's log line for a failed attempt, after which a traceback does not mean that a process ended."""


@dataclass
class Fuzz:
    """A server, the processes that read it, and the faults found."""

    url: str
    page: str
    model: Path
    folder: Path
    server: Any
    client: Client
    rng: random.Random
    processes: dict[str, subprocess.Popen[bytes]]
    findings: list[str] = field(default_factory=list)
    rounds: int = 0
    failed_attempts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.expected = self.client.score(PAIRS, timeout=300)
        self.sizes = {name: self._memory(name) for name in self.processes}
        self.threads = {name: psutil.Process(each.pid).num_threads() for name, each in self.processes.items()}
        workers = {name: self.processes[name] for name in WORKERS}
        place = self.folder / "surroundings"
        self.surroundings = Surroundings(self.url, self.server, self.model, place, self.rng, workers)
        with self.stopped(*WORKERS):
            run = self.client.submit(PAIRS[:CHUNK])
            self.job = self.server.hgetall(Job.key_for(keys.job_id(run.id, 0)))
            assert b"data" in self.job
            run.cancel()

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """Stop workers within the ``with`` block."""
        for name in names:
            self.processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self.processes[name].send_signal(signal.SIGCONT)

    def attack_surroundings(self) -> None:
        """Remove or change what a run needs."""
        around = self.surroundings
        attacks = [
            around.lose_keys, around.lose_keys, around.lose_all_and_the_time, around.change_model,
            around.plant, around.mix_options,
        ]  # fmt: skip
        attack = self.rng.choice(attacks)
        self.findings += [f"{attack.__name__}: {complaint}" for complaint in attack()]
        self.ends[attack.__name__] += 1

    def damage_jobs(self) -> None:
        for _ in range(self.rng.randint(1, 20)):
            job = put_damaged(self.server, "rankmill", self.job, self.rng)
            put_leases(self.server, "rankmill", job, self.rng)

    def damage_reports(self) -> None:
        client, name = self.server, self.rng.choice([b"ghost", b"\xff", b"odd name", b"worker-1"])
        client.sadd("rq:workers", b"rq:worker:" + name, self.rng.choice(ANYTHING))
        client.sadd("rq:workers:rankmill", b"rq:worker:" + name)
        client.hset(b"rq:worker:" + name, self.rng.choice(REPORT_FIELDS), self.rng.choice(ANYTHING))
        client.expire(b"rq:worker:" + name, 30)
        client.set(keys.worker("").encode() + name, self.rng.choice(ANYTHING), ex=30)
        client.set(keys.capacity("rankmill"), self.rng.choice(ANYTHING), ex=30)

    def damage_lists(self) -> None:
        client = self.server
        score = self.rng.choice([0.0, 1e308, float("inf"), time.time() + 60])
        with suppress(redis.ResponseError):  # the list itself is damaged already
            client.zadd(keys.runs(), {self.rng.choice(ANYTHING): score})
            client.lpush(keys.set_aside(), self.rng.choice(ANYTHING))
            client.sadd("rq:queues", self.rng.choice(ANYTHING))

    def replace_lists(self) -> None:
        """Give whole lists another type, while everybody reads them, and then remove them."""
        named = [keys.runs(), keys.set_aside(), "rq:queues", "rq:workers", "rq:workers:rankmill",
                 "rq:queue:rankmill", "rq:wip:rankmill", "rq:scheduled:rankmill", "rq:failed:rankmill",
                 "rq:finished:rankmill", "rq:queue:rankmill:intermediate", "rq:worker:worker-2",
                 keys.capacity("rankmill"), keys.waits("rankmill"),
                 keys.turns("rankmill", "bulk")]  # fmt: skip
        chosen = self.rng.sample(named, 2)
        for key in chosen:
            put(self.server, key, self.rng)
        time.sleep(self.rng.uniform(0, 2))
        with suppress(urllib.error.URLError):
            self._fetch("api/cluster.json")
        self.server.delete(*chosen)

    def damage_run(self) -> None:
        """Damage a run that is made for this; its producer must get its scores, or one clear error."""
        with self.stopped(*WORKERS):
            run = self.client.submit(PAIRS)
            damages = RunDamages(self.server, self.rng, run.id, len(PAIRS) // CHUNK, CHUNK)
            done = []
            for _ in range(self.rng.randint(1, 3)):
                done.append(self.rng.choice(damages.all))
                with suppress(redis.ResponseError):  # the key has another type by now
                    done[-1]()
        names = ", ".join(each.__name__ for each in done)
        try:
            scores = run.scores(timeout=90)
        except TimeoutError:
            self.findings.append(f"a producer waits for ever after: {names}")
        except RankmillError as error:
            self._check_message(str(error))
            self.ends[type(error).__name__] += 1
        else:
            self.ends["scores"] += 1
            self._check_scores(scores, run.errors, damages.altered, names)
        with suppress(RankmillError):
            run.cancel()

    def damage_file(self) -> None:
        """Damage the runs of score-file, which must end with an exit code; then the same command must
        succeed.
        """
        source, output = self.folder / "in.jsonl", self.folder / "out.parquet"
        source.write_text("".join(json.dumps({"query": q, "passage": p}) + "\n" for q, p in PAIRS))
        command = [source, "-o", output, "--force", "--redis", self.url, "--model", self.model]
        command += ["--precision", "fp32", "--chunk-size", CHUNK, "--json"]
        with self.stopped(*WORKERS):
            known = set(self.server.zrange(keys.runs(), 0, -1))
            process = start(*command, environ={"RANKMILL_MAX_RETRIES": "1"})
            with suppress(SystemExit):
                wait_until(lambda: set(self.server.zrange(keys.runs(), 0, -1)) - known)
            for run_id in set(self.server.zrange(keys.runs(), 0, -1)) - known:
                damages = RunDamages(self.server, self.rng, run_id.decode(), len(PAIRS) // CHUNK, CHUNK)
                with suppress(redis.ResponseError):
                    self.rng.choice(damages.all)()
        self._end_of(process, {0, 1, 2, 3})
        self._end_of(start(*command), {0})
        scores = pq.read_table(output)["score"].to_pylist()
        if not np.allclose(scores, self.expected, atol=1e-5):
            self.findings.append(f"score-file, a second time: {scores}")

    def look(self) -> None:
        """Check that all processes live and work, and that undamaged runs get their scores."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                self.findings.append(f"{name} ended with {process.returncode}: {log[-3000:]}")
                return
            if self._memory(name) > self.sizes[name] + MAX_GROWTH:
                self.findings.append(f"{name} took {self._memory(name) >> 20} MiB")
                self.sizes[name] = self._memory(name)
            if psutil.Process(process.pid).num_threads() < self.threads[name]:
                self.findings.append(f"{name} has lost a thread")
        self._check_page()
        self._check_logs()
        if self.rounds % STATUS_EVERY == 0:
            self._check_status()
        self._check_good_run("")
        if self.rounds % ALONE_EVERY == 0:
            for name in WORKERS:
                with self.stopped(*{*WORKERS} - {name}):
                    self._check_good_run(f"with {name} alone, ")

    def _check_good_run(self, which: str) -> None:
        try:
            scores = self.client.score(PAIRS, timeout=90)
        except TimeoutError:
            self.findings.append(f"{which}a good run gets no scores")
            return
        if not np.allclose(scores, self.expected, atol=1e-5):
            self.findings.append(f"{which}scores differ: {scores}")
        for name in WORKERS:
            with suppress(WireError):  # damaged since its last beat
                beats = worker_reports(self.server, [name]).values()
                if not which and any(time.time() - report.beat > 30 for report in beats):
                    self.findings.append(f"the heartbeat of {name} has stopped")

    def _check_scores(
        self, scores: np.ndarray, errors: dict[int, str], altered: set[int], names: str
    ) -> None:
        """Each row of a damaged run has its score or an error."""
        for row, (score, expected) in enumerate(zip(scores, self.expected, strict=True)):
            scored = np.isclose(score, expected, atol=1e-5) and row not in errors
            failed = np.isnan(score) and row in errors
            if not (scored or failed or row - row % CHUNK in altered):
                self.findings.append(f"row {row} has {score}, not {expected}, after: {names}")
                return
        for error in errors.values():
            self._check_message(error)

    def _check_message(self, message: str) -> None:
        if "\n" in message or "Traceback" in message or len(message) > 2000:
            self.findings.append(f"not one line: {message[:500]!r}")

    def _check_page(self) -> None:
        for path in ("metrics", "healthz", "sd", "api/cluster.json"):
            try:
                body = self._fetch(path)
            except OSError as error:
                self.findings.append(f"exporter, {path}: {error}")
                continue
            if path.endswith("json"):
                page = json.loads(body, parse_constant=lambda name: self.findings.append(f"JSON has {name}"))
                if time.time() - page["series"]["at"][-1] > 30:
                    self.findings.append("the exporter's history has stopped")

    def _fetch(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.page}/{path}", timeout=20) as reply:
            return bytes(reply.read())

    def _check_logs(self) -> None:
        for log in self.folder.glob("*.log"):
            lines = log.read_text(errors="replace").splitlines()
            for line in lines:
                if _FAILED_ATTEMPT in line:
                    kinds = re.findall(r"(?:\\n|^)([\w.]+(?:Error|Exception|Failed)\b[^\\]{0,80})", line)
                    self.failed_attempts[kinds[-1] if kinds else line[-200:]] += 1
            text = "\n".join(line for line in lines if _FAILED_ATTEMPT not in line)
            if "Traceback" in text:
                self.findings.append(f"{log.name}: {text[max(text.index('Traceback') - 300, 0) :][:3000]}")
            log.write_text("")

    def _check_status(self) -> None:
        status = [str(BIN / "rankmill"), "status", "--redis", self.url]
        done = subprocess.run(status, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode or "Traceback" in done.stderr:
            self.findings.append(f"status: {done.returncode} {done.stderr[-1500:]}")

    def _end_of(self, process: subprocess.Popen[str], codes: set[int]) -> None:
        try:
            _, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            self.findings.append("score-file does not end")
            return
        if process.returncode not in codes or "Traceback" in err:
            self.findings.append(f"score-file: {process.returncode} {err[-1500:]}")

    def _memory(self, name: str) -> int:
        """Most memory that a process has had, in bytes."""
        status = Path(f"/proc/{self.processes[name].pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) << 10


@contextmanager
def readers(seed: int, folder: Path) -> Iterator[Fuzz]:
    """Start a server, two workers and an exporter, which end with the ``with`` block."""
    model = random_bert(folder / "model", hidden=16, layers=2)
    fixed = {"precision": "fp32", "backend": "torch", "heartbeat_seconds": "1", "lease_seconds": "3"}
    environ = environment({f"RANKMILL_{name.upper()}": value for name, value in fixed.items()})
    log = folder / "exporter.log"
    with valkey() as url:
        server = redis.Redis.from_url(url)
        processes = {name: start_worker(url, folder / f"{name}.log", environ, name=name) for name in WORKERS}
        command = [str(BIN / "rankmill"), "exporter", "--redis", url, "--address", "127.0.0.1:0"]
        with log.open("ab") as out:
            processes["exporter"] = subprocess.Popen(command, stdout=out, stderr=out, env=environment())
        try:
            wait_until(lambda: len(queue_workers(server, "rankmill").scoring) == len(WORKERS))
            wait_until(lambda: " at http" in log.read_text())
            (page,) = re.findall(r" at (http://[\w.:]+)", log.read_text())
            client = Client(url, model=str(model), precision="fp32", chunk_size=CHUNK, max_retries=1)
            yield Fuzz(url, page, model, folder, server, client, random.Random(seed), processes)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def fuzz(found: Fuzz, minutes: float) -> None:
    """Damage keys for the given time."""
    logging.getLogger("rankmill.producer").setLevel(logging.ERROR)  # damaged results are expected
    rankmill.producer.collect.driver._SWEEP_SECONDS = 1  # not 10, so that a round is short
    attacks: list[Callable[[], None]] = [
        found.damage_jobs, found.damage_reports, found.damage_lists, found.replace_lists,
        found.damage_run, found.damage_run, found.damage_run, found.attack_surroundings,
        found.attack_surroundings,
    ]  # fmt: skip
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        found.rounds += 1
        known = set(found.findings)
        chosen = found.rng.sample(attacks, 2)
        if found.rounds % FILE_EVERY == 0:
            chosen.append(found.damage_file)
        try:
            for attack in chosen:
                attack()
            found.look()
        except Exception:  # every error is a finding
            found.findings.append(traceback.format_exc())
        found.findings = list(dict.fromkeys(found.findings))
        names = ", ".join(attack.__name__ for attack in chosen)
        for line in found.findings:
            if line not in known:
                print(f"round {found.rounds}, {names}: {line}", flush=True)
        if any(process.poll() is not None for process in found.processes.values()):
            return


def main() -> None:
    """Damage keys for the given number of minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, readers(options.seed, Path(name)) as found:
        fuzz(found, options.minutes)
        print(f"damaged runs ended with: {dict(found.ends)}")
        print(f"attempts that failed: {dict(found.failed_attempts)}")
    print(f"{found.rounds} rounds, {len(found.findings)} findings")
    if found.findings:
        sys.exit(1)


if __name__ == "__main__":
    main()
