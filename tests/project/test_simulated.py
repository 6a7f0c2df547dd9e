"""Simulated workers: real ScoringWorkers that sleep in the place of a model."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import simulated
from benchmarks.simulated import Flow, measure, simulated_cluster, simulated_score
from rankmill import Client


@pytest.mark.slow
def test_simulated_workers_need_no_pytorch_and_a_killed_one_loses_nothing() -> None:
    pairs = [(f"query {number}", f"passage {number}") for number in range(2000)]
    with simulated_cluster(
        2, 0.5, {"RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_LEASE_SECONDS": "3"}
    ) as cluster:
        for process in cluster.workers.values():
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        run = Client(cluster.url, model="demo", chunk_size=100).submit(pairs)
        scores, workers = [], set()
        for part in run.tables():
            scores += part.scores.to_pylist()
            workers.add(part.worker)
            if len(cluster.workers) == len(workers) == 2:
                cluster.kill(random.Random(0))
    assert len(workers) == 2
    assert np.allclose(scores, [simulated_score(*pair) for pair in pairs], atol=1e-5)


@pytest.mark.slow
def test_the_flow_of_a_short_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "WARM_UP", 0.2)
    flow = measure(2, chunk_seconds=0.1, chunk_size=100, seconds=1.5, kill_after=1.0)
    assert len(flow.kills) == 1
    assert 0 < flow.share < 1.5
    assert sum(flow.each_second) > 0


def test_share_and_dip_of_a_flow() -> None:
    samples = [(tenth / 10, max(0, tenth - 10), 8 if tenth < 200 else 7) for tenth in range(401)]
    still = [(now, min(chunks, 190) + max(0, chunks - 240), live) for now, chunks, live in samples]
    assert Flow(8, 0.8, samples, [20.0]).share == pytest.approx(370 / (8 * 170 + 7 * 200) * 8, rel=0.01)
    assert Flow(8, 0.8, samples, [20.0]).dip() == pytest.approx(1)
    assert Flow(8, 0.8, still, [20.0]).dip() == pytest.approx(0)  # nothing for 5 s
    assert Flow(8, 0.8, still, [20.0]).each_second[19:26] == [10, 0, 0, 0, 0, 0, 10]
