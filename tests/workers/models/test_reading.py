"""Weights that cannot be loaded are refused by their headers; reading large ones holds up no other model."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.loading import load_model
from tests.conftest import Server, StartWorker, start_command, wait_for
from tests.harness.environ import BIN, ENVIRON
from tests.harness.models.hub import fetched
from tests.harness.models.tiny import make_bert

READING = "tests.harness.misbehaving.ReadingWorker"


def write_header(file: Path, tensors: dict[str, Any], size: int) -> None:
    """A sparse file of safetensors with this header, and zeros up to its size."""
    header = json.dumps(tensors).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)


def too_large(file: Path) -> None:
    size = 100_000_000_000
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    write_header(file, {"encoder.weight": tensor}, size)


def with_a_long_end(file: Path) -> None:
    os.truncate(file, 100_000_000_000)


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def of_zeros(file: Path) -> None:
    os.truncate(file, 0)
    os.truncate(file, 100_000_000_000)


def without_shapes(file: Path) -> None:
    write_header(file, {"encoder.weight": {"dtype": "F32", "data_offsets": [0, 8]}}, 8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_a_long_end, "has 100,000,000,000 bytes, and its header describes"),
        (cut_off, "bytes, and its header describes"),
        (empty, "damaged or cut off: it has no header"),
        (of_zeros, "damaged or cut off: it has no header"),
        (without_shapes, "its header cannot be read"),
        (too_large, r"not enough memory to load model .*: in float32 it needs 93\.1 GiB, and worker host"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_weights_are_refused_before_they_are_read(
    damage: Any, message: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(make_bert(tmp_path) / "model.safetensors")
    monkeypatch.setattr(hashlib, "file_digest", None)
    monkeypatch.setattr("rankmill.workers.host.model_file.total_memory", lambda: 64 << 30)
    with pytest.raises(SpecError, match=message):
        load_model(ScoreSpec(model=str(tmp_path), precision="fp32"), "cpu", backend)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "bytes, and its header describes"),
        (too_large, r"not enough memory to load model some/model: in float32 it needs 93\.1 GiB"),
    ],
)
def test_weights_from_the_hub_are_refused_too(
    damage: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(make_bert(fetched(tmp_path, monkeypatch)) / "model.safetensors")
    monkeypatch.setattr("rankmill.workers.host.model_file.total_memory", lambda: 64 << 30)
    with pytest.raises(SpecError, match=message):
        load_model(ScoreSpec(model="some/model", precision="fp32"), "cpu", "torch", str(tmp_path / "cache"))


@pytest.mark.parametrize("burst", [False, True])
def test_other_models_are_served_while_weights_are_read(
    burst: bool, server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    large, read = make_bert(tmp_path / "large", seed=1), tmp_path / "read"
    environ = {
        "READ": str(read),
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "RANKMILL_BACKEND": "openvino",
        "RANKMILL_CACHE_DIR": str(tmp_path / "cache"),
    }
    client = Client(server.url, model=str(tiny_model), precision="fp32", chunk_size=10)
    pairs = [("big cat", f"moon river {number}") for number in range(300)]
    slow, quick = client.submit(pairs, model=str(large)), client.submit(pairs)
    if burst:  # it stays until all is done
        command = [str(BIN / "rq"), "worker", "rankmill", "--burst", "--worker-class", READING]
        command += ["--serializer", "json", "--url", server.url]
        with (tmp_path / "worker.log").open("wb") as log:
            subprocess.Popen(command, cwd=tmp_path, env={**ENVIRON, **environ}, stdout=log, stderr=log)
    else:
        workers(worker_class=READING, environ=environ)
    assert np.isfinite(quick.scores(timeout=100)).all()
    assert "reading the files of" in (tmp_path / "worker.log").read_text()
    assert server.client.xlen(f"rankmill:run:{slow.id}:results") == 0
    read.touch()
    parts = list(slow.tables())
    assert sum(len(part.scores) for part in parts) == 300
    assert {part.stats.attempt for part in parts if part.stats} == {1}


def test_the_last_job_of_a_worker_is_scored_although_its_weights_are_still_read(
    server: Server, tmp_path: Path
) -> None:
    large, read = make_bert(tmp_path / "large"), tmp_path / "read"
    environ = {
        "READ": str(read),
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "RANKMILL_CACHE_DIR": str(tmp_path / "cache"),
    }
    run = Client(server.url, model=str(large), no_workers_seconds=None).submit([("big cat", "moon river")])
    command = ["rq", "worker", "rankmill", "--max-jobs", "1", "--worker-class", READING]
    worker = start_command(*command, "--serializer", "json", "--url", server.url, environ=environ)
    wait_for(lambda: server.client.zcard("rq:wip:rankmill"))
    time.sleep(0.5)  # it has no more jobs to claim
    read.touch()
    _, log = worker.communicate(timeout=60)
    assert worker.returncode == 0, log
    assert np.isfinite(run.scores(timeout=1)).all()
