"""Scores a batch of the gateway while gateway, runner, worker and server die, for `chaos` and a test."""

from __future__ import annotations

import json
import random
import re
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.cluster import wait_until
from benchmarks.faults.submitted import CHUNK, QUICK, Cast, Keeper, Start, Toll, start_process
from benchmarks.simulated import simulated_score
from rankmill import Client
from rankmill.extensions.runners.submitted import on_server

QUERY = "big cat"
ENDPOINT = "/v1/score"


class BatchCast(Cast):
    """The processes beside the server, and a gateway."""

    def begin_gateway(self) -> None:
        """Start the gateway, and find out where it listens."""
        log = self.directory / f"gateway-{uuid.uuid4().hex}.log"
        files = self.directory / "files"
        files.mkdir(exist_ok=True)
        environ = {**QUICK, "RANKMILL_GATEWAY_FILES": str(files), "RANKMILL_CHUNK_SIZE": str(CHUNK)}
        command = ["rankmill", "serve", "--redis", self.url, "--port", "0", "--model", "demo"]
        self.gateway = self.start(command, {**environ, "RANKMILL_PRECISION": "fp32"}, log)
        self.alive.append(self.gateway)
        wait_until(lambda: re.search(r" at (http://[\w.:]+)", log.read_text()), self.gateway)
        found = re.search(r" at (http://[\w.:]+)", log.read_text())
        assert found
        self.address = found[1]

    def kill_gateway(self) -> None:
        self.gateway.kill()
        self.gateway.wait()

    def call(self, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        request = urllib.request.Request(self.address + path, body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: bytes = reply.read()
        return answer

    def submit_batch(self, lines: int) -> str:
        """Upload a file and submit its batch; returns the batch's id."""
        mark = uuid.uuid4().hex
        head = f"--{mark}\r\nContent-Disposition: form-data; name="
        form = [
            f'{head}"purpose"\r\n\r\nbatch\r\n'.encode(),
            f'{head}"file"; filename="in.jsonl"\r\n\r\n'.encode(),
            *(line.encode() for line in _lines(lines)),
            f"\r\n--{mark}--\r\n".encode(),
        ]
        file = json.loads(self.call("/v1/files", b"".join(form), f"multipart/form-data; boundary={mark}"))
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        found: dict[str, str] = json.loads(self.call("/v1/batches", json.dumps(asked).encode()))
        return found["id"]


def everybody_dies_in_a_batch(
    directory: Path, *, lines: int, kills: int, seed: int, seconds: float, start: Start = start_process
) -> Toll:
    """Submit a batch, and SIGKILL gateway, runner, worker and server, `kills` times in the middle of it.

    The gateway dies just after it has answered, too, and runners while they read the lines and while they
    write the answers.

    Parameters
    ----------
    directory
        For the files.
    lines, seconds
        Lines of the batch, and how long a simulated worker takes for 1,000.
    kills, seed
        Rounds of kills, and when in the run they are.
    start
        How processes are started.
    """
    rng = random.Random(seed)
    toll = Toll()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        keeper = Keeper(Path(name), appendonly=True)
        cast = BatchCast(keeper.url, directory, seconds, start)
        try:
            cast.begin_worker()
            cast.begin_gateway()
            batch = cast.submit_batch(lines)
            cast.kill_gateway()
            toll.kills += 1
            folder = directory / "files" / batch
            scored, output = folder / "scored.parquet", folder / "output.jsonl"
            client = Client(keeper.url)
            run = on_server(client.store, client.settings).handle(batch.removeprefix("batch_"))
            for number in range(kills):
                runner, _ = cast.begin_runner(number)
                if number == 0:
                    _kill_when(runner, lambda: any(folder.iterdir()))
                    runner, _ = cast.begin_runner(kills)
                    toll.kills += 1
                cast.begin_gateway()
                share = (number + rng.uniform(0.3, 0.9)) / kills
                wait_until(lambda: run.status().progress.rows >= share * lines, runner)  # noqa: B023
                runner.kill()
                cast.kill_worker()
                cast.kill_gateway()
                runner.wait()
                keeper.kill()
                keeper.start()
                cast.begin_worker()
                toll.kills += 4
            runner, _ = cast.begin_runner(kills + 1)
            _kill_when(runner, lambda: scored.exists() or output.exists())
            cast.begin_runner(kills + 2)
            cast.begin_gateway()
            toll.kills += 1
            run.wait(600)
            found = json.loads(cast.call(f"/v1/batches/{batch}"))
            answers = cast.call(f"/v1/files/{found['output_file_id']}/content")
            assert found["error_file_id"] is None, found
            assert found["request_counts"] == {"total": lines, "completed": lines, "failed": 0}, found
            toll.seconds = time.monotonic() - started
        finally:
            cast.end()
            keeper.kill()
    return _compare(answers, lines, toll)


def _kill_when(runner: subprocess.Popen[bytes], is_so: Callable[[], object]) -> None:
    wait_until(is_so, runner)
    runner.kill()
    runner.wait()


def _lines(count: int) -> Iterator[str]:
    for number in range(count):
        body = {"text_1": QUERY, "text_2": _passage(number), "use_activation": False}
        line = {"custom_id": f"q-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        yield json.dumps(line) + "\n"


def _passage(number: int) -> str:
    return f"moon river {number}"


def _compare(output: bytes, lines: int, toll: Toll) -> Toll:
    """Compare each line with the score that a SimulatedWorker gives its pair."""
    numbers, scores = [], []
    for raw in output.splitlines():
        line = json.loads(raw)
        numbers.append(int(line["custom_id"].removeprefix("q-")))
        scores.append(line["response"]["body"]["data"][0]["score"])
    toll.lost = lines - len(set(numbers))
    toll.doubled = len(numbers) - len(set(numbers))
    toll.moved = sum(place != number for place, number in enumerate(numbers))
    wanted = [simulated_score(QUERY, _passage(number)) for number in numbers]
    toll.different = int((~np.isclose(scores, wanted, atol=1e-4)).sum())
    return toll
