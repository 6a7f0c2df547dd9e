"""The models a worker keeps: which ones stay, which ones go, and what a job notices of it."""

from __future__ import annotations

import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill import Client, ScoringRun
from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.worker_report import queue_workers, worker_doings, worker_reports
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.host import metrics
from rankmill.workers.models.loading import Loaded, load
from rankmill.workers.models.sources import directory_content
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.environ import QUICK_LEASE
from tests.harness.models.rerankers import make_decoder
from tests.harness.models.tiny import make_bert
from tests.harness.waiting import waiting_jobs
from tests.workers.engine.test_engine import one_at_a_time

pytestmark = pytest.mark.own_precision

LOAD = partial(load, device="cpu", backend="torch", cache_dir="auto")


def cache_of(
    size: int = 1,
    *,
    load: Callable[[ScoreSpec], Loaded] = LOAD,
    drain: Callable[[], None] = lambda: None,
    **limits: Any,
) -> EngineCache:
    settings = load_settings({"model_cache_size": size, "token_budget": 100})
    return EngineCache(settings.model_copy(update=limits), "cpu", load, drain)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[ScoreSpec]:
    folders = [make_bert(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(3)]
    return [ScoreSpec(model=str(folder), precision="fp32") for folder in folders]


Counted = Callable[..., float]


@pytest.fixture
def counted() -> Counted:
    """What ``rankmill_model_…_total`` has counted in the course of the test."""

    def now(what: str, **labels: str) -> float:
        return metrics.REGISTRY.get_sample_value(f"rankmill_model_{what}_total", labels) or 0.0

    ways: list[tuple[str, dict[str, str]]] = [(what, {}) for what in ("hits", "evictions", "unloads")]
    ways += [("loads", {"outcome": outcome}) for outcome in ("loaded", "failed")]
    before = {str((what, labels)): now(what, **labels) for what, labels in ways}
    return lambda what, **labels: now(what, **labels) - before[str((what, labels))]


def test_it_keeps_what_was_used_last(counted: Counted, specs: list[ScoreSpec]) -> None:
    drained: list[str] = []
    cache = cache_of(2, drain=lambda: drained.append("once"))
    first, second = cache.get(specs[0]), cache.get(specs[1])
    assert cache.get(specs[0]) is first
    assert not drained
    assert not cache.evicts(specs[1])
    assert cache.evicts(specs[2])
    cache.get(specs[2])  # the second leaves, when it is no longer in use
    assert drained == ["once"]
    assert cache.get(specs[0]) is first
    assert cache.models == [specs[2].model, specs[0].model]
    assert cache.get(specs[1]) is not second
    assert (counted("hits"), counted("loads", outcome="loaded"), counted("evictions")) == (2, 4, 2)


def test_lengths_and_activations_share_weights(counted: Counted, specs: list[ScoreSpec]) -> None:
    cache = cache_of()
    whole = cache.get(specs[0])
    short = cache.get(specs[0].model_copy(update={"max_length": 8, "activation": "identity"}))
    assert short.model.backend is whole.model.backend
    assert short.model.tokenizer.max_length == 8
    assert whole.model.tokenizer.max_length == 128
    assert counted("loads", outcome="loaded") == 1


def test_each_option_of_a_spec_has_an_engine_of_its_own(specs: list[ScoreSpec]) -> None:
    cache = cache_of()
    options: list[dict[str, Any]] = [
        {}, {"max_length": 8}, {"activation": "identity"}, {"instruction": "find: "}, {"label": "0"},
        {"truncation_side": "left"}, {"max_passage_tokens": 5}, {"all_labels": True}, {"long": "refuse"},
        {"long": "split"}, {"long": "split-mean"}, {"long": "split", "long_stride": 3},
    ]  # fmt: skip
    asked = [specs[0].model_copy(update=each) for each in options]
    engines = [cache.get(spec) for spec in asked]
    assert len(set(map(id, engines))) == len(options)
    assert [cache.get(spec) for spec in asked] == engines
    assert len({id(engine.model.backend) for engine in engines}) == 1


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("loaded", ["pairs", "texts", None])
def test_who_asks_for_tokens_needs_no_weights_of_his_own(
    counted: Counted, specs: list[ScoreSpec], loaded: Inputs | None, pinned: bool
) -> None:
    cache = cache_of()
    asked = ScoreSpec(model=specs[0].model, inputs="tokens")
    if pinned:
        asked = asked.model_copy(update={"revision": directory_content(specs[0], cache_folder("auto"))})
    if loaded:
        cache.get(specs[0].model_copy(update={"inputs": loaded}))
    assert cache.has(asked) == (loaded is not None)
    assert not cache.evicts(asked)
    assert cache.get(asked).model.encoder
    assert cache.get(asked) is cache.get(asked)
    assert cache.has(asked)
    cache.get(asked if loaded else asked.model_copy(update={"inputs": "pairs"}))
    assert counted("loads", outcome="loaded") == 1


def test_tokens_of_a_model_that_scores_no_pairs_as_it_is(counted: Counted, tmp_path: Path) -> None:
    """Each is loaded for tokens alone, whatever the label is that other requests ask for."""
    chat = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    models = [
        make_decoder(tmp_path / "reward", "qwen2", task="classifier", template=chat),
        make_decoder(tmp_path / "causal", "qwen3", task="causal", template=None),
        make_bert(tmp_path / "labels", labels=3),
    ]
    for model in models:
        cache = cache_of()
        asked = ScoreSpec(model=str(model), precision="fp32", inputs="tokens", label="7")
        assert cache.get(asked).model.encoder, model
        assert cache.has(asked)
    assert counted("loads", outcome="loaded") == len(models)
    with pytest.raises(WorkerError, match="no such directory"):
        cache_of().get(ScoreSpec(model=str(tmp_path / "none"), inputs="tokens"))


def test_models_are_unloaded_beyond_a_limit_in_bytes(specs: list[ScoreSpec]) -> None:
    cache = cache_of(9)
    cache.get(specs[0])
    one = cache.bytes
    cache.get(specs[1])
    assert cache.bytes == 2 * one
    small = cache_of(9, model_cache_gib=2 * one / 2**30)
    for spec in specs:
        small.get(spec)
    assert small.models == [specs[1].model, specs[2].model]
    tiny = cache_of(9, model_cache_gib=1 / 2**30)  # the one in use stays all the same
    for spec in specs:
        tiny.get(spec)
        assert tiny.models == [spec.model]


def test_idle_models_go(counted: Counted, specs: list[ScoreSpec]) -> None:
    cache_of(2).unload_idle(lambda: pytest.fail("each claim would look at all others"))
    patient = cache_of(2, model_idle_seconds=3600)
    patient.get(specs[0])
    patient.unload_idle()
    assert patient.models == [specs[0].model]
    hasty = cache_of(2, model_idle_seconds=1e-9)
    engine = hasty.get(specs[0])
    hasty.unload_idle(lambda: {engine})
    assert hasty.models == [specs[0].model]

    def gone() -> bool:
        hasty.unload_idle()
        return not hasty.models

    wait_for(gone)
    assert counted("unloads") == 1
    assert hasty.bytes == 0


def test_a_model_that_still_scores_is_not_idle(
    server: Server, workers: StartWorker, model_with_marks: Path, tmp_path: Path
) -> None:
    environ = {"RANKMILL_MODEL_IDLE_SECONDS": "0.1", "RANKMILL_BACKEND": "torch", **QUICK_LEASE}
    environ["FORWARDS"] = str(forwards := tmp_path / "forwards")
    workers(name="w", worker_class="tests.harness.misbehaving.MisbehavingWorker", environ=environ)
    run = Client(server.url, model=str(model_with_marks)).submit([("how far", "hold")])
    wait_for(forwards.exists)
    began = worker_reports(server.client, ["w"])["w"].beat
    wait_for(lambda: worker_reports(server.client, ["w"])["w"].beat > began + 2.5)  # it has looked for a job
    assert worker_reports(server.client, ["w"])["w"].models == (str(model_with_marks),)
    (tmp_path / "go").touch()
    assert np.isfinite(run.scores(timeout=60)).all()
    wait_for(lambda: not worker_reports(server.client, ["w"])["w"].models)


def test_a_changed_folder_that_cannot_be_read_is_the_worker_s_fault(tmp_path: Path) -> None:
    """Other workers score the chunk then; it was tried here until its rows got the error."""
    cache, spec = cache_of(), ScoreSpec(model=str(make_bert(tmp_path / "model")), precision="fp32")
    engine = cache.get(spec)
    (unreadable := tmp_path / "model" / "more").symlink_to("/proc/self/mem")
    with pytest.raises(
        SpecError, match=r"cannot load the model in .+: \[Errno 5\] Input/output error"
    ) as told:
        cache.get(spec)
    assert isinstance(told.value.__cause__, OSError)
    unreadable.unlink()
    assert cache.get(spec) is engine


@pytest.mark.parametrize("backend", ["torch", "openvino", "onnx"])
@pytest.mark.parametrize("in_place", [False, True])
def test_new_files_in_a_directory_are_for_new_runs(
    counted: Counted, tmp_path: Path, backend: str, *, in_place: bool
) -> None:
    """Old runs go on with the old weights, also where the new ones are written into the same file."""
    before, after = (one_score(make_bert(tmp_path / str(seed), seed=seed)) for seed in range(2))
    model = shutil.copytree(tmp_path / "0", tmp_path / "model")
    spec = ScoreSpec(model=str(model), precision="fp32", activation="identity")
    load_with = partial(load, device="cpu", backend=backend, cache_dir=str(tmp_path / "cache"))
    cache = cache_of(2, load=load_with, cache_dir=str(tmp_path / "cache"))
    old = cache.get(spec)
    of_old_runs = spec.model_copy(update={"revision": old.model.revision})
    copy = shutil.copyfile if in_place else replace
    copy(tmp_path / "1" / "model.safetensors", model / "model.safetensors")
    assert cache.get(of_old_runs).model.backend is old.model.backend
    assert old.score(["how far"], ["a cat"]).scores == pytest.approx([before], abs=1e-5)
    new = cache.get(spec)
    assert new.model.revision != old.model.revision
    assert new.score(["how far"], ["a cat"]).scores == pytest.approx([after], abs=1e-5)
    assert cache.get(of_old_runs).model.backend is old.model.backend
    (model / "model.safetensors").touch()
    assert cache.get(spec) is new
    (model / "README.md").touch()
    assert cache.get(spec) is new
    assert counted("loads", outcome="loaded") == 2
    cache.unload(str(model))
    both = f"has content {new.model.revision:.12}, and the run has {old.model.revision:.12}"
    with pytest.raises(WorkerError, match=both):
        cache.get(of_old_runs)


def test_a_directory_has_no_revision_but_its_content(specs: list[ScoreSpec]) -> None:
    named = specs[0].model_copy(update={"revision": "main"})
    with pytest.raises(
        SpecError, match="is a directory, and revision main names a commit on the hub: leave it"
    ):
        cache_of().get(named)


def one_score(folder: Path) -> float:
    return float(one_at_a_time(folder, ["how far"], ["a cat"])[0])


def replace(source: Path, target: Path) -> None:
    shutil.copyfile(source, target.with_name(".new"))
    target.with_name(".new").replace(target)


def test_a_model_that_cannot_be_loaded_is_tried_each_time(
    counted: Counted, specs: list[ScoreSpec], tmp_path: Path
) -> None:
    cache = cache_of()
    bad = specs[0].model_copy(update={"model": str(tmp_path)})
    for _ in range(2):
        with pytest.raises(SpecError, match=r"no config\.json"):
            cache.get(bad)
    assert (counted("loads", outcome="failed"), counted("loads", outcome="loaded"), cache.models) == (
        2,
        0,
        [],
    )


def test_a_worker_warms_up_what_it_is_told_to(
    server: Server, workers: StartWorker, specs: list[ScoreSpec], tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    relative = os.path.relpath(specs[0].model, tmp_path)  # runs have the whole path, whoever is asked
    warm = f"{relative}, {tmp_path / 'none'}"
    environ = {"RANKMILL_WARM": warm, "RANKMILL_PRECISION": "fp32", "RANKMILL_BACKEND": "onnx"}
    process = workers(name="w", environ={**environ, "RANKMILL_CACHE_DIR": str(tmp_path / "cache")})
    # It takes work only when all is warm: what a load leaves is there.
    wait_for(lambda: "listening on rankmill" in (tmp_path / "worker.log").read_text(), process)
    assert len(list(tmp_path.glob("cache/onnx/*/model.onnx"))) == 1
    assert f"cannot warm up: {tmp_path / 'none'} is not a model" in (tmp_path / "worker.log").read_text()
    wait_for(lambda: worker_reports(server.client, ["w"])["w"].models == (specs[0].model,))


def test_a_worker_that_cannot_warm_up_is_not_ready_until_it_can(
    server: Server, workers: StartWorker, specs: list[ScoreSpec], tmp_path: Path
) -> None:
    late = tmp_path / "late"
    workers(name="w", environ={"RANKMILL_WARM": str(late), "RANKMILL_BACKEND": "torch", **QUICK_LEASE})
    url = str(worker_reports(server.client, ["w"])["w"].metrics_url).replace("/metrics", "/readyz")
    wait_for(lambda: "cannot warm up" in status_of(url)[1])
    code, said = status_of(url)
    assert (code, said.startswith(f"cannot warm up: model {late}: no such directory")) == (503, True)
    wait_for(lambda: worker_reports(server.client, ["w"])["w"].refusals == (said,))
    client = Client(server.url, model=specs[0].model)
    assert np.isfinite(client.score([("how", "far")], timeout=60)).all()  # others are served
    make_bert(tmp_path / "made").rename(late)
    wait_for(lambda: status_of(url) == (200, "ready"))
    wait_for(lambda: not worker_reports(server.client, ["w"])["w"].refusals)


def test_a_worker_that_warms_up_is_waited_for_and_ends_at_once(
    server: Server, workers: StartWorker, specs: list[ScoreSpec], tmp_path: Path
) -> None:
    """Without that a gateway answered 503 while its only worker loaded a large model: start workers."""
    seconds = {"FORWARDS": str(tmp_path / "forwards"), "RANKMILL_WARM": specs[0].model, **QUICK_LEASE}
    slow = {"worker_class": "tests.harness.misbehaving.MisbehavingWorker", "ready": False}
    workers(name="w", environ={**seconds, "LOAD_SECONDS": "4"}, **slow)
    client = Client(server.url, model=specs[0].model, no_workers_seconds=None)
    run = client.submit([("how", "far")])
    wait_for(lambda: worker_doings(server.client, ["w"]).keys() == {"loading"})
    patient = Client(server.url, model=specs[0].model, no_workers_seconds=0.5)
    assert np.isfinite(patient.score([("a", "cat")], timeout=60)).all()
    assert np.isfinite(run.scores(timeout=60)).all()
    gone = workers(name="gone", environ={**seconds, "LOAD_SECONDS": "600"}, **slow)
    wait_for(lambda: worker_doings(server.client, ["gone"]).keys() == {"loading"}, gone)
    gone.terminate()
    assert gone.wait(timeout=30) == 0
    assert "gone" not in queue_workers(server.client, "rankmill").scoring


def test_a_signal_ends_the_loading_of_a_model_and_its_chunks_are_handed_back(
    server: Server, workers: StartWorker, specs: list[ScoreSpec], tmp_path: Path
) -> None:
    """Whoever stops workers kills them a minute later: the chunks then lost an attempt."""
    seconds = {"FORWARDS": str(tmp_path / "forwards"), "LOAD_SECONDS": "600", **QUICK_LEASE}
    worker = workers(name="w", environ=seconds, worker_class="tests.harness.misbehaving.MisbehavingWorker")
    run = Client(server.url, model=specs[0].model).submit([("how", "far")])
    wait_for(lambda: worker_doings(server.client, ["w"]).keys() == {"loading"}, worker)
    worker.terminate()
    assert worker.wait(timeout=60) == 0
    job = keys.job_id(run.id, 0)
    assert waiting_jobs(server.client) == [job]
    assert server.client.hget(f"rq:job:{job}", "retries_left") == b"3"
    assert not queue_workers(server.client, "rankmill").scoring
    run.cancel()


def status_of(url: str) -> tuple[int, str]:
    """Status and text that a worker's address answers with."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


@pytest.mark.slow
def test_a_worker_takes_up_new_files_and_new_models_without_a_restart(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    folders = [make_bert(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    workers(environ={"RANKMILL_MODEL_CACHE_SIZE": "1", "RANKMILL_BACKEND": "torch"})
    client = Client(server.url, precision="fp32", activation="identity")

    def check(folder: Path) -> None:
        scores = client.score([("how far", "the moon")], model=str(folder))
        np.testing.assert_allclose(scores, one_at_a_time(folder, ["how far"], ["the moon"]), atol=1e-5)

    for folder in folders:
        check(folder)
    make_bert(folders[2], seed=7)
    check(folders[2])


def test_jobs_of_one_model_are_grouped(server: Server, workers: StartWorker, specs: list[ScoreSpec]) -> None:
    """Chunks of three models take turns in the queue; a worker that keeps one loads each once or twice."""
    client = Client(server.url, precision="fp32", activation="identity", chunk_size=1)
    passages = ["the moon", "a cat", "a big dog", "tea"]
    runs: dict[str, list[ScoringRun]] = {spec.model: [] for spec in specs}
    for passage in passages:
        for spec in specs:
            runs[spec.model].append(client.submit([("how far", passage)], model=spec.model))
    settings = {"MODEL_CACHE_SIZE": "1", "BACKEND": "torch", "METRICS_ADDRESS": "127.0.0.1:0"}
    workers(environ={f"RANKMILL_{name}": value for name, value in settings.items()})
    for model, mine in runs.items():
        scores = np.concatenate([run.scores(timeout=60) for run in mine])
        expected = one_at_a_time(model, ["how far"] * 4, passages)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    (name,) = queue_workers(server.client, "rankmill").scoring
    url = worker_reports(server.client, [name])[name].metrics_url
    assert url
    shown = urllib.request.urlopen(url, timeout=10).read().decode()
    (loads,) = re.findall(r'^rankmill_model_loads_total{outcome="loaded"} (\d+)', shown, re.M)
    assert int(loads) <= 2 * len(specs)  # 12, job by job
