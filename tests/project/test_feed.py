"""What a host can feed is measured, on a small run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import feed
from rankmill.workers.batches.tokens import Batch


@pytest.mark.slow
def test_a_small_run_is_fed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(feed, "WARM_UP", 64)
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in (feed.TOKEN_NS, feed.SLOW, feed.SWITCH_US, "RANKMILL_TOKEN_BUDGET", "RANKMILL_CLAIM_AHEAD"):
        monkeypatch.setenv(name, "")  # what the command sets ends with the test
        monkeypatch.delenv(name)
    slow = ["--slow", "--rows", "2000", "--chunk-size", "500", "--token-ns", "1000", "--switch-us", "10"]
    monkeypatch.setattr(sys, "argv", ["feed", *slow])
    feed.main()
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2000
    assert 0 < found["pairs_per_second"] < 1e9 / 1000 / 10  # no pair has fewer than 10 tokens
    parts = found["server"] + found["worker"] + found["producer"]
    assert found["cpu_us_per_pair"] == pytest.approx(parts, abs=0.1)
    assert found["busiest_thread_of_worker"] <= found["worker"] + 10


def test_a_device_answers_when_its_batches_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.0, 10.5, 13.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    device = feed.IdleDevice("fp32", seconds=0.25, launches=feed.Launches(0, 0.0))
    ids = np.arange(8).reshape(2, 4)
    first, second = (device.submit(Batch.padded(ids, None, np.ones_like(ids))) for _ in range(2))
    assert first.result().tolist() == [1.0, 5.0]
    second.result()
    assert slept == [1.5, 1.0]  # done at 12 and 14
