"""`Client.embedded`: a server and workers of one's own."""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from rankmill import Client, CrossEncoder
from rankmill.jobs.contract.errors import EmbeddedError
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.local import embedded
from rankmill.producer.local.embedded import EmbeddedCluster, shared_cluster
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


def test_a_failure_is_told_to_every_caller_and_a_new_object_begins_anew() -> None:
    """Only the first call raised the error. The next one waited for ever."""
    first, second = (CrossEncoder("demo", device="mps") for _ in range(2))
    for model in (first, second, first):
        with pytest.raises(EmbeddedError, match="device mps is not available"):
            model.client.score(PAIRS, timeout=200)
    with CrossEncoder("demo", device="mps") as third:
        assert third.client._cluster is not first.client._cluster
    first.close()
    second.close()


def test_a_dropped_object_may_be_collected_while_another_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []

    class Cluster(EmbeddedCluster):
        def __enter__(self) -> EmbeddedCluster:
            gc.collect()
            return self

        def __exit__(self, *_: object) -> None:
            ended.append(self)

        def url(self) -> str:
            return "unix:///none"

    def begin(queue: str) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(shared_cluster(load_settings({"queue": queue})))
        return stack

    def work() -> None:
        dropped: dict[str, object] = {"stack": begin("first")}
        dropped["itself"] = dropped
        del dropped
        begin("second").close()

    monkeypatch.setattr(embedded, "EmbeddedCluster", Cluster)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert (thread.is_alive(), len(ended)) == (False, 2)


def test_a_forked_child_ends_nothing_of_its_parent(tiny_model: Path) -> None:
    with Client.embedded(model=str(tiny_model), device="cpu", threads=1) as client:
        child = os.fork()
        if not child:
            try:
                client.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert np.isfinite(client.score(PAIRS, timeout=120)).all()
