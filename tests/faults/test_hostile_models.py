"""A model that never loads is refused, and the runs behind it go on."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rankmill import Client
from rankmill.extensions.registry.push import try_model
from rankmill.jobs.contract.errors import InputError, RunFailed
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.workers.rq import worker as rq_worker
from rankmill.workers.rq.worker import DeathPenalty, TooLong
from tests.conftest import Server, StartWorker
from tests.harness.models.rerankers import make_decoder

pytestmark = pytest.mark.own_precision

PAIRS = [("big cat", f"moon river {number}") for number in range(20)]
ROOT = str(Path(__file__).parents[2])
HEAVY = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# query document #}"


@pytest.mark.parametrize("inputs", ["pairs", "conversations"])
def test_a_model_whose_template_has_no_end_is_refused_and_others_score(
    inputs: str, server: Server, workers: StartWorker, tmp_path: Path, tiny_model: Path
) -> None:
    task = "causal" if inputs == "pairs" else "classifier"
    model = make_decoder(tmp_path / "model", "qwen3", task=task, template=HEAVY + TEXTS)
    workers()
    client = Client(server.url, model=str(tiny_model))
    given: dict[str, Any] = {"pairs": PAIRS}
    if inputs == "conversations":
        given = {"messages": [[{"role": "user", "content": passage}] for _, passage in PAIRS]}
    bad = client.submit(**given, model=str(model))
    assert not client.score(PAIRS, timeout=60).errors
    with pytest.raises(RunFailed, match=r"template .*too many steps"):
        bad.scores(timeout=60)


def test_a_model_whose_template_has_no_end_is_not_pushed(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=HEAVY + TEXTS)
    with pytest.raises(InputError, match=r"cannot be pushed: .*too many steps"):
        try_model(model, load_settings(), seconds=250)


def test_a_model_that_is_never_loaded_is_refused_and_others_score(
    server: Server, workers: StartWorker, tmp_path: Path, tiny_model: Path
) -> None:
    """Shows: a model's load, or its chat template, takes no end."""
    workers(worker_class="tests.harness.misbehaving.EndlessWorker", environ={"PYTHONPATH": ROOT})
    client = Client(server.url, model=str(tiny_model))
    bad = client.submit(PAIRS, model=str(shutil.copytree(tiny_model, tmp_path / "endless")))
    assert not client.score(PAIRS, timeout=60).errors
    with pytest.raises(RunFailed, match="was not loaded and proven after 1 s on worker host"):
        bad.scores(timeout=60)


def test_a_worker_whose_load_sees_no_signal_ends(
    server: Server, workers: StartWorker, tmp_path: Path, tiny_model: Path
) -> None:
    environ = {"PYTHONPATH": ROOT, "RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_LEASE_SECONDS": "3"}
    worker = workers(worker_class="tests.harness.misbehaving.EndlessWorker", environ=environ)
    Client(server.url, model=str(shutil.copytree(tiny_model, tmp_path / "deaf"))).submit(PAIRS)
    assert worker.wait(timeout=60) == 1
    assert "a batch, or a model's load, takes far too long" in (tmp_path / "worker.log").read_text()


def test_a_limit_within_a_limit_leaves_that_as_it_was() -> None:
    with pytest.raises(TooLong, match="2 seconds"), DeathPenalty(2):  # noqa: PT012
        with pytest.raises(TooLong, match="1 seconds"), DeathPenalty(1):
            swallow()
        with DeathPenalty(60):
            pass
        swallow()
    assert not DeathPenalty.is_overdue()


def test_a_models_load_may_take_longer_than_the_chunk_that_needs_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shows: a model's load, or its chat template, takes no end."""
    clock = 0.0
    monkeypatch.setattr(system, "monotonic", lambda: clock)
    with DeathPenalty(900):
        clock = 100.0
        with DeathPenalty(1800):
            clock = 1890.0
            assert not DeathPenalty.is_overdue()
            clock = 1970.0
            assert DeathPenalty.is_overdue()
        assert not DeathPenalty.is_overdue()
        assert signal.alarm(0) > 890
        clock += 850
        assert not DeathPenalty.is_overdue()
        clock += 120
        assert DeathPenalty.is_overdue()


def swallow() -> None:
    """What takes every exception for one of its own."""
    while True:
        try:
            time.sleep(10)
        except Exception:
            continue


def test_a_limit_that_is_not_noticed_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(system, "monotonic", lambda: clock)
    with DeathPenalty(900):
        clock = 900.0 + rq_worker._GRACE_SECONDS
        assert not DeathPenalty.is_overdue()
        clock += 1
        assert DeathPenalty.is_overdue()
    assert not DeathPenalty.is_overdue()
