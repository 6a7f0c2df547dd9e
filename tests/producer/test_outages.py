"""Producers whose server cannot serve, and many threads over one client."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.outages import OUTAGES, full
from rankmill import Client
from rankmill.jobs.contract.errors import RankmillError, RedisUnavailable, RunTimeout
from rankmill.jobs.runtime import connection
from rankmill.jobs.runtime.durability import read_durability
from tests.conftest import Server, wait_for
from tests.harness.servers.valkey import nothing_left

PAIRS = [("big cat", f"moon river {number}") for number in range(40)]


def test_threads_take_turns_with_a_client_s_connections(
    shared_queue: Server, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CONNECTIONS", 8)
    client = Client(shared_queue.url, model=str(tiny_model))
    others = {each["id"] for each in shared_queue.client.client_list()}
    scores: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: scores.append(client.score(PAIRS[:2], timeout=100)))
        for _ in range(60)
    ]
    with nothing_left(shared_queue):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(scores) == 60
    assert np.isfinite(scores).all()
    mine = [each for each in shared_queue.client.client_list() if each["id"] not in others]
    assert len([each for each in mine if each["cmd"] == "xread"]) <= 8


@pytest.mark.parametrize("password", ["", ":secret@"])
def test_a_server_that_is_silent_costs_little_more_than_the_time_left(
    server: Server, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    """With a password, each new connection waits for the server, too."""
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 3600)  # else it is given up after 15 s
    process = int(server.client.info("server")["process_id"])
    server.client.config_set("requirepass", password[1:-1])
    client = Client(server.url.replace("//", f"//{password}"), model="demo", no_workers_seconds=None)
    run = client.submit(PAIRS)
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(RunTimeout):
            client.score(PAIRS, timeout=0.2)
        with pytest.raises(RunTimeout):
            run.scores(timeout=0.2)
        assert read_durability(client.store.redis) is None
    finally:
        os.kill(process, signal.SIGCONT)
    run.cancel()


def test_a_run_that_cannot_be_submitted_leaves_nothing(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=4, redis_wait_seconds=0.5)
    with contextlib.ExitStack() as outage:

        def pairs() -> Iterator[tuple[str, str]]:  # read when the server knows the run already
            assert list(server.client.scan_iter("rankmill:run:*"))
            outage.enter_context(full(server.client))
            yield from PAIRS

        with pytest.raises(RedisUnavailable, match="Redis cannot serve: OOM command not allowed"):
            client.submit(pairs())
        assert not list(server.client.scan_iter("rankmill:run:*"))
    assert not list(server.client.scan_iter("rq:job:*"))


def test_what_is_given_up_without_a_server_is_removed_later(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=4, redis_wait_seconds=30)
    run = client.submit(PAIRS)
    with OUTAGES["replica"](server.client):
        started = time.monotonic()
        run.cancel()
        assert time.monotonic() - started < 25
        assert list(server.client.scan_iter("rankmill:run:*"))
    wait_for(lambda: not list(server.client.scan_iter("rankmill:run:*")))
    wait_for(lambda: not list(server.client.scan_iter("rq:job:*")))


def test_one_thread_removes_all_that_is_given_up_without_a_server(server: Server) -> None:
    """Each run had a thread of its own, so in an outage a service could start no more threads."""
    client = Client(server.url, model="demo", redis_wait_seconds=30)
    runs = [client.submit(PAIRS[:2]) for _ in range(4)]
    others = set(threading.enumerate())
    with OUTAGES["replica"](server.client):
        for run in runs:
            run.cancel()
        assert [thread.name for thread in set(threading.enumerate()) - others].count("later") == 1
    wait_for(lambda: not list(server.client.scan_iter("rankmill:run:*")))


def test_a_detached_run_that_is_not_submitted_to_its_end_is_removed_later(server: Server) -> None:
    client = Client(server.url, model="demo", chunk_size=1, redis_wait_seconds=1)
    with contextlib.ExitStack() as outage:

        def pairs() -> Iterator[tuple[str, str]]:
            yield from [("q", f"p {number}") for number in range(64)]  # one transaction
            yield "q", "p"
            outage.enter_context(OUTAGES["replica"](server.client))

        with pytest.raises(RedisUnavailable):
            client.submit(pairs(), detached=True)
        assert list(server.client.scan_iter("rq:job:*"))
    wait_for(lambda: not list(server.client.scan_iter("rankmill:run:*")))
    wait_for(lambda: not list(server.client.scan_iter("rq:job:*")))


def test_a_timeout_holds_without_a_server(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model))
    with full(server.client), pytest.raises(TimeoutError):
        client.score(PAIRS, timeout=1)


def test_chunks_that_a_timeout_kept_from_the_server_are_sent_by_the_next_wait(server: Server) -> None:
    client = Client(server.url, model="demo", chunk_size=1, window=99, max_retries=0, no_workers_seconds=None)
    run = client.submit([("q", f"p {number}") for number in range(99)])  # sends the first 64 chunks
    with full(server.client), pytest.raises(RunTimeout):
        run.scores(timeout=0.5)

    def all_are_sent() -> bool:
        with pytest.raises(RunTimeout):
            run.scores(timeout=0.5)
        return client.store.queue(client.settings.queue).count == 99

    wait_for(all_are_sent)  # the first time, unless the machine is busy
    run.cancel()


def test_what_a_server_refuses_is_an_error_of_ours(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model))
    server.client.set("rankmill:runs", "no sorted set")
    with pytest.raises(RankmillError, match="Redis has refused a command: WRONGTYPE"):
        client.submit(PAIRS)
