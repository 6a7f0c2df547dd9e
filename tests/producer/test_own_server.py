"""`Client.embedded`: a server and workers of one's own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import EmbeddedError
from tests.conftest import wait_for
from tests.harness.preloaded import EXECUTED
from tests.producer.test_client import PAIRS


def test_an_own_server_ends_with_its_block_and_its_death_is_said(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows: the embedded server dies."""
    monkeypatch.setenv(EXECUTED, "1")
    with Client.embedded(model=str(tiny_model), device="cpu", threads=1) as client:
        assert np.isfinite(client.score(PAIRS, timeout=120)).all()
        assert client._cluster
        supervisor = psutil.Process(client._cluster.pid)
        processes = supervisor.children(recursive=True)
        server = int(client.store.redis.info("server")["process_id"])
        run = client.submit((pair for _ in range(1000) for pair in PAIRS), priority="bulk")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EmbeddedError):
            run.scores(timeout=120)
    wait_for(lambda: not any(each.is_running() for each in processes))
