"""What two threads of a worker touch at once stays whole, also where they take turns every 10 µs."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import SECONDS
from rankmill import Client
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.engine.work import prepare
from rankmill.workers.host import metrics
from rankmill.workers.models.conversations import exchange
from rankmill.workers.models.loading import load
from tests.conftest import Server, run_command
from tests.harness.models.rerankers import make_decoder
from tests.harness.models.tiny import make_bert
from tests.harness.tools import meanwhile
from tests.workers.engine.test_pipeline import paced

pytestmark = [pytest.mark.own_precision, pytest.mark.usefixtures("interleaved")]


def cache_of(folder: Path) -> EngineCache:
    settings = load_settings({"model_cache_size": 2, "token_budget": 100, "cache_dir": str(folder)})
    load_here = partial(load, device="cpu", backend="torch", cache_dir=str(folder))
    return EngineCache(settings, "cpu", load_here, lambda: None)


def test_a_worker_may_ask_what_waits_while_it_is_scored(tiny_model: Path) -> None:
    engine, _, work = paced(tiny_model, 0.0, rows_in_batch=20)
    pipeline = Pipeline(0.0)
    one, other = work(5), work(5)

    def put_and_take() -> None:
        pipeline.put(engine, one, lambda: None)
        pipeline.put(engine, other, lambda: None, "request")
        pipeline.withdraw(one)
        pipeline.drop(other, lambda: None)

    with meanwhile(put_and_take, 3000) as goes_on:
        while goes_on():
            assert {pipeline.hungry for _ in range(100)} <= {True, False}
    assert pipeline.hungry


def test_chunks_keep_their_tokens_while_probes_are_scored_again(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model = make_decoder(tmp_path / "model", "qwen3", task="classifier", template=template)
    spec = ScoreSpec(model=str(model), precision="fp32", inputs="conversations")
    loaded = load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    short = loaded.model(spec.model_copy(update={"max_length": 40}))
    rows = [json.dumps(exchange(f"moon {row}", "a cat " * row)) for row in range(40)]
    expected = prepare(short, rows)
    assert short.prove_again
    with meanwhile(short.prove_again, 2) as goes_on:
        while goes_on():
            found = prepare(short, rows)
            assert not found.scored.errors
            assert found.tokens.ids.tolist() == expected.tokens.ids.tolist()


RETURNS = """
import redis, threading
from benchmarks.simulated import SimulatedWorker
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings

worker = SimulatedWorker(["rankmill"], connection=redis.Redis.from_url({url!r}), name="w")
worker._patience = Patience(1)
worker.connection.set_retry(worker._patience)
worker._prepare(load_settings({{"metrics_address": "none"}}))

def returns(job):
    worker._claims.hand_back(job)
    worker._intake.claim_next(wait=False)

class Late(dict):  # the main thread is quicker than the writer, who has just looked
    def get(self, job, default=None):
        found = super().get(job, default)
        if found is not None and threading.current_thread() is threading.main_thread():
            main = threading.Thread(target=returns, args=[job])
            main.start()
            main.join(1)
        return found

worker._claims.unanswered = Late()
worker._intake.claim_next(wait=False)
while worker._pipeline.step(wait=False):
    pass
print(worker.connection.zcard("rq:wip:rankmill"), len(worker.executions))
"""


def test_a_chunk_that_is_handed_back_while_it_is_answered_leaves_no_lease(server: Server) -> None:
    run = Client(server.url, model="demo", chunk_size=10).submit([("big cat", "moon river")])
    environ = {SECONDS: "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_command("python", "-c", RETURNS.format(url=server.url), environ=environ)
    assert done.out == "0 0\n", done.err
    assert len(run.scores(timeout=10)) == 1


MAKES_ROOM = """
import redis
from benchmarks.simulated import SimulatedWorker
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.engine.work import prepare

worker = SimulatedWorker(["rankmill"], connection=redis.Redis.from_url({url!r}), name="w")
worker._patience = Patience(1)
worker.connection.set_retry(worker._patience)
worker._prepare(load_settings({{"metrics_address": "none", "model_cache_size": 1}}))
first, texts = worker._engines.get(ScoreSpec(model="first")), ["a text"] * 100
worker._pipeline.start()
worker._pipeline.put(first, prepare(first.model, texts, texts), lambda: None)
with worker.limit(1):
    worker._engines.get(ScoreSpec(model="second"))
print(worker._engines.models, worker._pipeline.pending)
worker.stop()
worker._engines.get(ScoreSpec(model="third"))
print("loaded")
"""


def test_the_time_of_other_chunks_does_not_count_for_the_one_that_needs_another_model(server: Server) -> None:
    """Behind a quarter of an hour of a slow model's work, it lost its attempts one after the other."""
    environ = {SECONDS: "30", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_command("python", "-c", MAKES_ROOM.format(url=server.url), environ=environ)
    assert done.out == "['second'] 0\n", done.err


def test_a_model_that_is_loaded_is_warm_already(tmp_path: Path) -> None:
    """No second thread enters its backend, which may be scoring for the first one."""
    spec = ScoreSpec(model=str(make_bert(tmp_path / "model")), precision="fp32")
    cache = cache_of(tmp_path / "cache")
    cache.warm(spec)
    backend: Any = cache.get(spec).model.backend
    entered: list[str] = []
    submit = backend.submit

    def noted(batch: Batch) -> Any:
        entered.append(threading.current_thread().name)
        return submit(batch)

    backend.submit = noted
    cache.warm(spec)
    assert not entered


def test_a_model_that_stays_is_in_each_report(tmp_path: Path) -> None:
    specs = [
        ScoreSpec(model=str(make_bert(tmp_path / name)), precision="fp32") for name in ("stays", "comes")
    ]
    cache = cache_of(tmp_path / "cache")
    cache.get(specs[0])
    cache.get(specs[1])
    reported: list[set[str]] = []

    def look() -> None:
        names = {sample.labels["model"] for family in metrics.models.collect() for sample in family.samples}
        reported.append(names)

    with meanwhile(look, 1_000_000):
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            cache._update_metrics()
    assert all({spec.model for spec in specs} <= names for names in reported)
