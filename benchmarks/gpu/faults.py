"""Lets memory run out on a device, workers be killed in a forward, and several processes share the device."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch

from benchmarks.faults.chaos import kill_one, score_file, write_rows
from benchmarks.faults.kills import damage, start, written
from benchmarks.gpu.ways import Pairs
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.work import prepare

_ROOM = 256 * 2**20
"""Bytes that a forward may take when memory is to run out."""


_TOKEN_BYTES = 2048
"""Least bytes that a token's states take in a forward."""


def memory_survived(engine: Engine, pairs: Pairs) -> str | None:
    """Score all pairs in one batch, which does not fit; returns what went wrong, or ``None``.

    The process may take no more of the device than its weights and a little.
    """
    expected, tokens = engine.score(*pairs).scores, int(prepare(engine.model, *pairs).tokens.lengths.sum())
    times = -(-_ROOM // (tokens * _TOKEN_BYTES)) + 1
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _ROOM) / total)
    try:
        greedy = Engine(engine.model, 2**30)
        scored = greedy.score(pairs[0] * times, pairs[1] * times)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if scored.errors:
        return f"{len(scored.errors)} rows have errors: {next(iter(scored.errors.values()))}"
    if greedy.size.token_budget >= 2**30:
        return "memory did not run out: nothing was shown"
    off = float(np.abs(scored.scores.reshape(times, -1) - expected).max())
    return None if off < 0.25 * np.abs(expected).max(initial=1) else f"scores differ by {off:.2g}"


def killed_in_a_forward(model: Path, folder: Path, rows: int, kills: int, device: str) -> dict[str, object]:
    """SIGKILL one of two workers of score-file several times; returns what is lost, doubled, moved or
    different.
    """
    source = write_rows(folder / "rows.parquet", rows)
    output, undisturbed = folder / "killed.parquet", folder / "undisturbed.parquet"
    command: list[object] = [source, "--model", model, "--device", device, "--workers", 2, "--json"]
    command += ["--backend", "torch", "--precision", "fp32", "--chunk-size", max(rows // 64, 16), "--quiet"]
    started = time.monotonic()
    score_file(*command, "-o", undisturbed)
    calm = time.monotonic() - started
    draw, done = random.Random(1), 0
    started = time.monotonic()
    process = start(*command, "-o", output)
    for _ in range(kills):  # the first few writes begin the journal, each later one keeps results
        done += written(process, output, draw.randint(8, 16)) and kill_one(psutil.Process(process.pid), draw)
    _, err = process.communicate()
    if process.returncode:
        sys.exit(err)
    seconds = time.monotonic() - started
    harm = damage(output, undisturbed)
    scores = [pq.read_table(each, columns=["score"])["score"].to_numpy() for each in (output, undisturbed)]
    off = float(np.abs(scores[0] - scores[1]).max())
    return {
        "rows": rows, "kills": done, "lost": harm.lost, "doubled": harm.doubled, "moved": harm.moved,
        "largest difference of a score": off, "seconds": seconds, "undisturbed": calm,
    }  # fmt: skip


def together(model: Path, device: str, workers: int, seconds: float) -> float:
    """Pairs a second, in total, of processes that run only forwards on one device at a time."""
    command = [sys.executable, "-m", "benchmarks.gpu.one", str(model), device, str(seconds)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(workers)
    ]
    for process in processes:
        assert process.stdout
        process.stdout.readline()  # this waits until it is ready
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate()[0] for process in processes]
    return sum(float(json.loads(line)["pairs_per_second"]) for line in said)
