"""Record killed.json, resume.json, requests.json and batches.json, each from real processes on this machine.

python -m docs.figures.record_runs [NAME …]
"""

from __future__ import annotations

import json
import os
import platform
import pty
import re
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.priorities import bulk, latencies
from benchmarks.simulated import SCORED, TOKENS, simulated_cluster, simulated_score
from rankmill import Client
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.batches.planner import plan_batches
from rankmill.workers.models.loading import load_model

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "pairs.jsonl"

_WORKERS, _ROWS, _KILL_AFTER = 4, 120_000, 8.0


def killed() -> dict[str, Any]:
    """Four workers that sleep for a millisecond a pair; one gets SIGKILL, and nothing starts it again."""
    with simulated_cluster(0, 1.0, {"RANKMILL_TOKEN_BUDGET": "2048"}) as cluster:
        own = dict(cluster.environ)
        scored = [cluster.folder / f"scored-{number}" for number in range(_WORKERS)]
        for path in scored:
            cluster.environ = {**own, SCORED: str(path)}
            cluster.start()
        names = list(cluster.workers)
        client = Client(cluster.url, model="demo", chunk_size=500)
        pairs = [(f"query {row // 100}", f"passage {row}") for row in range(_ROWS)]
        run = client.submit(pairs)
        began = time.monotonic()
        found: list[Any] = []
        producer = threading.Thread(target=lambda: found.append(run.scores()))
        producer.start()
        time.sleep(_KILL_AFTER)
        cluster.workers[names[2]].kill()
        kill = time.monotonic() - began
        producer.join()
        ended = time.monotonic() - began
        log = (cluster.folder / "workers.log").read_text().splitlines()
        print(*[line for line in log if "runs again" in line][:2], sep="\n", file=sys.stderr)
        batches = [
            [
                (float(end) - began, int(tokens) // TOKENS)
                for end, tokens in map(str.split, path.read_text().splitlines())
            ]
            for path in scored
        ]
    (scores,) = found
    wrong = sum(
        bool(abs(simulated_score(*pair) - score) > 1e-4) for pair, score in zip(pairs, scores, strict=True)
    )
    now = time.monotonic() - began
    bins = [[0] * (int(2 * ended) + 1) for _ in scored]
    for row, done in zip(bins, batches, strict=True):
        for end, count in done:
            row[int(2 * end)] += count
    again = [json.loads(line)["time"] for line in log if "the chunk runs again" in line]
    return {
        "rows": _ROWS, "kill": kill, "end": ended, "half_seconds": bins, "without_score": len(scores.errors),
        "wrong": wrong, "computed": sum(count for done in batches for _, count in done),
        "again": [datetime.fromisoformat(each).timestamp() - time.time() + now for each in again],
        "machine": _machine(),
    }  # fmt: skip


def resume() -> dict[str, Any]:
    """score-file on 6,000 pairs, Ctrl-C in the middle, and the same command again three seconds later."""
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    queries = list(dict.fromkeys(row["query"] for row in rows))
    with tempfile.TemporaryDirectory() as folder:
        with Path(folder, "pairs.jsonl").open("w") as file:
            for query in queries[:24]:
                for row in rows:
                    file.write(json.dumps({"query": query, "passage": row["passage"]}) + "\n")
        began = time.monotonic()
        first = _watched(folder, began, stop_after=0.4)
        time.sleep(3)
        second = _watched(folder, began, stop_after=None)
    return {"rows": 24 * len(rows), "runs": [first, second], "machine": _machine()}


def _watched(folder: str, began: float, stop_after: float | None) -> dict[str, Any]:
    """The rows that are done, by time, as the command's own line says; Ctrl-C when that share of them is done."""
    command = [
        str(Path(sys.executable).parent / "score-file"),
        "pairs.jsonl",
        "--model",
        "demo",
        "-o",
        "out.parquet",
    ]
    start = time.monotonic() - began
    child, master = pty.fork()
    if not child:
        os.chdir(folder)
        os.execve(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    samples: list[tuple[float, int]] = []
    stopped, written = None, ""
    with suppress(OSError):  # the terminal closes
        while text := os.read(master, 65536).decode(errors="replace"):
            written += text
            now = round(time.monotonic() - began, 2)
            samples += [(now, _number(done)) for done in re.findall(r"([\d,]+) of [\d,]+ pairs", text)[-1:]]
            if stop_after and stopped is None and samples and samples[-1][1] > stop_after * 6000:
                os.write(master, b"\x03")
                stopped = now
    _, status = os.waitpid(child, 0)
    kept, before = (
        re.search(words, written) for words in (r"([\d,]+) scored rows are", r"([\d,]+) of them had")
    )
    return {
        "start": round(start, 2), "end": round(time.monotonic() - began, 2), "samples": samples, "stopped": stopped,
        "code": os.waitstatus_to_exitcode(status), "kept": _number(kept[1]) if kept else None,
        "resumed_rows": _number(before[1]) if before else None,
    }  # fmt: skip


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def requests() -> dict[str, Any]:
    """Requests of 20 pairs on an idle simulated worker, and behind an endless bulk run."""
    with simulated_cluster(1, 1.0) as cluster:
        client = Client(cluster.url, model="demo", chunk_size=1000)
        latencies(client, 3, 20)
        idle = latencies(client, 100, 20)
        with bulk(cluster, client):
            behind = latencies(client, 100, 20)
    return {"idle": idle, "behind": behind, "batch": 0.128, "machine": _machine()}


def batches() -> dict[str, Any]:
    """The shipped example's pairs, cut in the input's order into 32 rows, and by the planner."""
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    model = load_model(ScoreSpec(model="demo", precision="fp32"), "cpu")
    tokens = model.tokenizer([row["query"] for row in rows], [row["passage"] for row in rows])
    lengths = tokens.lengths.tolist()
    plain = [list(range(start, min(start + 32, len(rows)))) for start in range(0, len(rows), 32)]
    planned = [batch.tolist() for batch in plan_batches(lengths, 2048)]
    return {"lengths": lengths, "plain": plain, "planned": planned, "budget": 2048}


def _machine() -> str:
    return f"{os.cpu_count()} cores of an {_cpu()}, shared with other programs, Python {platform.python_version()}"


def _cpu() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


RECORDED = {"killed": killed, "resume": resume, "requests": requests, "batches": batches}


def main() -> None:
    """Record those that are named, or all."""
    for name in sys.argv[1:] or RECORDED:
        (HERE / f"{name}.json").write_text(json.dumps(RECORDED[name]()) + "\n")


if __name__ == "__main__":
    main()
