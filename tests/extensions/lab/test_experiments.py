"""Experiments: what is wrong is told, what cannot be is a result, what was interrupted goes on."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result

from rankmill.extensions.lab.bench import Bench, PeakMemory, Records
from rankmill.extensions.lab.commands.experiment import experiment
from rankmill.extensions.lab.experiment import Finding, Measure, load_experiment, shipped
from rankmill.extensions.lab.grid import plan
from rankmill.extensions.lab.pairs import sample
from rankmill.extensions.lab.statistics import measured_value, pareto
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from tests.conftest import Server, start_command, wait_for
from tests.harness.models.tiny import make_bert
from tests.harness.preloaded import EXECUTED

MEASURE = {"rows": 40, "requests": 4, "request_size": 5, "concurrency": 2, "warm_up": 4, "repeats": 2}


def write(folder: Path, model: Path, **content: Any) -> Path:
    """An experiment file."""
    file = folder / "mine.yaml"
    known = {"name": "mine", "description": "Of a test.", "measure": MEASURE, "grid": {"token_budget": [512]}}
    settings = {"model": str(model), "backend": "onnx", "precision": "fp32", "threads": 1}
    often = {"heartbeat_seconds": 0.5}  # a cell ends with reports, which come with heartbeats
    known["settings"] = {**settings, **often}
    file.write_text(yaml.safe_dump({**known, **content}))
    return file


def run(*arguments: object) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(experiment, [str(argument) for argument in arguments])


def start(*arguments: object) -> subprocess.Popen[str]:
    """The command, in a process of its own."""
    return start_command("rankmill", "experiment", *arguments, environ={EXECUTED: "1"})


def results(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    return [json.loads(line)["value"] for line in lines]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"gird": {}}, r"mine\.yaml: unknown key 'gird'; keys are name, description, base"),
        ({"grid": {"token_bugdet": [1]}}, r"grid: unknown key 'token_bugdet'; keys are model, revision"),
        ({"grid": {"redis_url": ["redis://a"]}}, "unknown key 'redis_url'"),
        ({"grid": {"token_budget": []}}, "token_budget has no values"),
        ({"settings": {"modle": "demo"}}, "settings: unknown key 'modle'"),
        ({"measure": {"row": 1}}, "unknown key 'row' in measure; keys are pairs"),
        ({"measure": {"rows": -1}}, "measure.rows: "),
        ({"measure": {"rows": 0}}, "measure: rows and requests are both 0"),
        ({"base": "nowhere.yaml"}, r"nowhere\.yaml: cannot be read"),
        ({"measure": {"pairs": "nowhere.csv"}}, r".+/nowhere\.csv: no such file"),
        (
            {"reference": [{"claim": "x", "figure": "p50_ms", "of": {"workers": 1}, "value": 1}]},
            "reference 'x': 'workers' is not in the grid",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, tiny_model: Path, content: dict[str, Any], message: str
) -> None:
    result = run(write(tmp_path, tiny_model, **content), "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert re.search(message, result.output)
    assert "Traceback" not in result.output


def test_shipped_experiments_can_be_named() -> None:
    assert len(shipped()) == 8
    for name in shipped():
        assert load_experiment(name).name == name
    assert run("--scale", "inf").exit_code == 2
    result = run("speed")
    assert result.exit_code == 2
    assert "ships none of that name; it ships backends, batch-size" in result.output


def test_the_columns_of_an_experiment_s_file_are_not_those_of_shipped_pairs() -> None:
    """With --pairs varied such an experiment was refused."""
    measure = Measure(pairs="mine.csv", query_column="q", passage_column="p")
    for pairs, columns in [("varied", ("query", "passage")), ("other.csv", ("q", "p"))]:
        changed = measure.changed({"pairs": pairs})
        assert (changed.query_column, changed.passage_column) == columns


def test_impossible_cells_are_results_and_the_report_is_whole(tmp_path: Path, tiny_model: Path) -> None:
    reference = [
        {"claim": "it pads", "figure": "padding_waste", "of": {"precision": "fp32"}, "value": 0.5},
        {"claim": "none", "figure": "p50_ms", "of": {"precision": "fp16"}, "value": 1.0},
    ]
    grid = {"precision": ["fp32", "fp16"], "token_budget": [512, 0]}
    file, out = write(tmp_path, tiny_model, grid=grid, reference=reference), tmp_path / "out"
    result = run(file, "-o", out, "--scale", 0.5)
    assert result.exit_code == 0, result.output
    found = {(v["cell"]["precision"], v["cell"]["token_budget"]): v for v in results(out)}
    assert [found["fp32", 512]["status"], *(v["status"] for v in list(found.values())[1:])] == [
        "measured",
        *["impossible"] * 3,
    ]
    assert "token_budget: Input should be 'auto', got 0" in found["fp32", 0]["reason"]
    assert "precision fp16 is not supported on cpu" in found["fp16", 512]["reason"]

    measured = found["fp32", 512]
    assert (measured["device"], measured["backend"], measured["precision"]) == ("cpu", "onnx", "fp32")
    assert all(measured["stage_seconds"][stage] > 0 for stage in ("fetch", "tokenize", "forward", "write"))
    rows = pq.read_table(out / "measurements.parquet").to_pandas()
    assert rows["status"].value_counts().to_dict() == {"measured": 2, "impossible": 3}
    mine = rows[rows["status"] == "measured"]
    assert (mine["pairs_per_second"] > 0).all()
    assert mine["latencies"].map(len).tolist() == [2, 2]  # half of 4
    assert mine["padding_waste"].between(0, 1, inclusive="neither").all()

    report = (out / "report.md").read_text()
    assert re.search(r"\|\s*1 \| fp32\s+\|\s*512 \| onnx, cpu, fp32", report)
    assert re.search(r"\| it pads\s+\|\s*50%\s*\|\s*\d+%\s*\|", report)
    assert re.search(r"\| none\s+\|.*\| not measured \|", report)
    assert re.search(r"\| precision=fp16, token_budget=512 \| impossible \| precision fp16 is not", report)
    plots = re.findall(r"!\[.+\]\((.+)\)", report)
    assert plots == ["mine-cells.svg"]  # one measured cell has no front and no scaling
    assert "</svg>" in (out / plots[0]).read_text()


def test_a_model_with_other_weights_is_measured_again(tmp_path: Path) -> None:
    keys = set()
    for seed in (0, 1, 0):
        model = make_bert(tmp_path / "model", seed=seed)
        (planned,) = plan([load_experiment(write(tmp_path, model))], {}, {}, 1.0)
        keys.add(planned.key)
    assert len(keys) == 2


@pytest.mark.slow
def test_an_interrupted_experiment_goes_on_where_it_was(tmp_path: Path, tiny_model: Path) -> None:
    file, out = write(tmp_path, tiny_model, grid={"workers": [1, 2]}), tmp_path / "out"
    kept = out / "measurements.jsonl"
    first = start(file, "-o", out)
    wait_for(lambda: kept.exists() and kept.read_text().endswith("\n"), first)
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=200)
    assert first.returncode == 130
    assert "interrupted; the measurements are kept, and the same command continues" in told
    before = kept.read_bytes()
    assert results(out)[0]["peak_bytes"] > 50_000_000
    kept.write_bytes(before + b'{"key": "a line that was never fini')

    result = run(file, "-o", out)
    assert result.exit_code == 0, result.output
    assert "[1/2] mine: workers=1: was measured before" in result.output
    assert kept.read_bytes().startswith(before)
    assert [result["status"] for result in results(out)] == ["measured", "measured"]
    report = (out / "report.md").read_text()
    assert re.findall(r"!\[.+\]\((.+)\)", report) == [
        "mine-cells.svg",
        "mine-latency.svg",
        "mine-workers.svg",
    ]


def test_the_memory_of_workers_is_that_of_the_processes_below() -> None:
    size = 100_000_000
    worker = [sys.executable, "-c", f"held = b'x' * {size}; input()", "rankmill.ScoringWorker"]
    other = [sys.executable, "-c", f"held = b'x' * {size}; input()"]
    code = f"import subprocess as s; a, b = s.Popen({worker}), s.Popen({other}); a.wait(), b.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as above:
        try:
            memory = PeakMemory(above.pid)

            def is_seen() -> bool:
                memory.look()
                return memory.peak > size

            wait_for(is_seen, above)
            assert memory.peak < 1.8 * size
        finally:
            above.communicate(b"\n\n")


def test_reports_are_waited_for_as_long_as_heartbeats_take(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heartbeat_seconds over 30, each measured cell failed in the end."""
    bench = Bench(load_settings({"heartbeat_seconds": 60, "lease_seconds": 120}), timeout=600)
    server.client.sadd("rq:workers:rankmill", "rq:worker:w")
    server.client.set("rq:worker:w", 1)
    began = now = system.now()

    def tell(seconds: float) -> None:
        nonlocal now
        now += 10
        beat = now if now - began > 50 else began
        report = WorkerReport(device="cpu", started=began, beat=beat, stage_seconds=(1, 2, 3, 4, 5))
        announce_worker(server.client, "w", report, ttl=600)

    tell(0)
    monkeypatch.setattr(system, "now", lambda: now)
    monkeypatch.setattr(system, "monotonic", lambda: now - began)
    monkeypatch.setattr(system, "sleep", tell)
    monkeypatch.setattr(bench, "_redis", server.client, raising=False)
    monkeypatch.setattr(bench, "_embedded", Mock(worker_deaths=0), raising=False)
    bench.deadline = math.inf
    assert bench.stage_seconds() == {"wait": 1, "fetch": 2, "tokenize": 3, "forward": 4, "write": 5}


def test_workers_that_are_killed_or_too_slow_are_results(tmp_path: Path, tiny_model: Path) -> None:
    file, out = write(tmp_path, tiny_model), tmp_path / "out"
    command = start(file, "-o", out)
    found: list[psutil.Process] = []

    def workers() -> list[psutil.Process]:
        below = psutil.Process(command.pid).children(recursive=True)
        found[:] = [process for process in below if "rankmill.ScoringWorker" in process.cmdline()]
        return found

    wait_for(workers, command)
    os.kill(found[0].pid, signal.SIGKILL)
    _, told = command.communicate(timeout=200)
    assert command.returncode == 0, told
    assert "token_budget=512: failed: a worker was killed, as the system does when memory runs out" in told

    slow = write(tmp_path, tiny_model, measure={**MEASURE, "timeout": 0.01})
    result = run(slow, "-o", tmp_path / "slow")
    assert result.exit_code == 0, result.output
    assert "failed: not done after 0 s" in result.output
    assert "not done after" in (tmp_path / "slow" / "report.md").read_text()


def test_a_sample_of_a_file_has_many_pairs_of_a_query(tmp_path: Path) -> None:
    queries = [f"q{row // 10}" for row in range(1000)]
    passages = [None if row == 5 else f"p{row}" for row in range(1000)]
    pq.write_table(pa.table({"q": queries, "p": passages}), tmp_path / "a.parquet")
    found = sample(str(tmp_path / "a.parquet"), 100, ("q", "p"))
    assert len(found) == 100
    assert len(set(found["query"].to_pylist())) <= 11
    assert sample(str(tmp_path / "a.parquet"), 100, ("q", "p")) == found
    assert len(sample(str(tmp_path / "a.parquet"), 1500, ("q", "p"))) == 1500
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(InputError, match="the input has no pairs"):
        sample(str(tmp_path / "b.json"), 10)


def test_built_in_pairs_are_of_many_lengths_and_the_same_each_time() -> None:
    found = sample("varied", 500)
    words = [len(text.split()) for text in found["passage"].to_pylist()]
    assert min(words) < 15
    assert max(words) > 200
    assert 45 < np.median(words) < 65
    assert sample("varied", 500) == found
    assert sample("example", 300).slice(0, 50) == sample("example", 300).slice(250, 50)


def test_records_are_those_of_one_matter_and_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    Records(path, "one").add("a", 1)
    path.write_bytes(path.read_bytes() + b'{"key": ')
    Records(path, "one").add("b", [2])
    assert (Records(path, "one").get("a"), Records(path, "one").get("b")) == (1, [2])
    assert Records(path, "two").get("a") is None
    path.write_text("something else\n")
    with pytest.raises(InputError, match="not a file of rankmill's measurements"):
        Records(path)


def test_the_front_and_the_findings() -> None:
    assert pareto([10, 20, 15, 30, 30], [1, 2, 3, 9, 8]) == [0, 1, 4]
    cells = pd.DataFrame(
        {"cell": [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}], "p50_ms": [10.0, 30.0, 5.0]}
    )
    finding = Finding(claim="", figure="p50_ms", of={"a": 2}, over={"a": 1}, value=1)
    assert measured_value(finding, cells) == 0.25
    assert measured_value(finding.model_copy(update={"of": {"a": 3}}), cells) is None
    assert measured_value(finding, pd.DataFrame()) is None
