"""Models by name: pushed, scored with, promoted, rolled back, removed; as docs/guides/models.md has it."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from rq import Queue
from rq.serializers import JSONSerializer

from benchmarks.faults.kills import stop
from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.extensions.registry.documents import Reference
from rankmill.extensions.registry.push import progress
from rankmill.extensions.registry.registry import Registry
from rankmill.jobs.contract.errors import RunFailed
from tests.conftest import QUICK_LEASE, Server, StartWorker, run_command, score_file, start_command, wait_for
from tests.harness.models.registries import put_version
from tests.harness.models.tiny import make_bert
from tests.harness.servers.buckets import Bucket

PAIRS = [("big cat", f"moon river {number}") for number in range(50)]
GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "models.md").read_text()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_bert(folder / name, seed=seed) for seed, name in enumerate(("trained", "retrained"))}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty registry, which the settings name."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("RANKMILL_REGISTRY", str(folder))
    return folder


def environ(url: str | Path, cache: Path) -> dict[str, str]:
    here = {"RANKMILL_REGISTRY": str(url), "RANKMILL_CACHE_DIR": str(cache), "RANKMILL_BACKEND": "torch"}
    return {**here, "RANKMILL_PRECISION": "fp32", **QUICK_LEASE}


def invoke(*words: object) -> Result:
    return CliRunner().invoke(rankmill, ["models", *map(str, words)])


def done(*words: object) -> str:
    found = invoke(*words)
    assert found.exit_code == 0, found.output
    return found.stdout


def refused(*words: object) -> str:
    found = invoke(*words)
    assert found.exit_code in {1, 2}, found.output
    assert found.stderr.count("\n") == 1, found.stderr
    return found.stderr


@pytest.mark.slow
def test_the_guide_brings_a_version_into_production(
    models: dict[str, Path], server: Server, workers: StartWorker, registry: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, model in models.items():
        shutil.copytree(model, tmp_path / name)
    pq.write_table(
        pa.table({"query": [a for a, _ in PAIRS], "passage": [b for _, b in PAIRS]}),
        tmp_path / "pairs.parquet",
    )
    here = environ(registry, tmp_path / "cache")
    workers(environ=here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIS_URL", server.url)
    guide = GUIDE.partition("## A new version's way into production")[2].partition("| command |")[0]
    commands = re.findall(r"^((?:rankmill|score-file) .*?)(?:  +#.*)?$", guide, re.M)
    assert len(commands) == 7
    said = []
    for command in commands:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
        found = run_command(*words, cwd=tmp_path, environ={**here, "REDIS_URL": server.url})
        assert found.code == 0, found.err
        said.append(found.out)
    assert "reranker@v1 is in the registry" in said[0]
    assert "reranker@v2 is in the registry" in said[3]
    assert "has loaded reranker@v2" in said[4]
    assert "reranker@production stands for v2" in said[4]
    assert "reranker@production stands for v1" in said[5]
    content = {
        each: Registry(str(registry)).manifest(Reference("reranker", each)).content for each in ("v1", "v2")
    }
    written = pq.read_table(tmp_path / "pairs.scored.parquet")
    metadata = pq.read_metadata(tmp_path / "pairs.scored.parquet").metadata
    assert metadata[b"rankmill.model"] == b"reranker@v1"
    assert metadata[b"rankmill.revision"].decode() == content["v1"]
    client = Client(server.url, registry=str(registry), backend="torch", precision="fp32")
    by_folder = client.score(PAIRS, model=str(tmp_path / "trained"))
    np.testing.assert_allclose(written["score"].to_numpy(), by_folder, atol=1e-5)
    run = client.submit(PAIRS, model="reranker@production")
    assert client.store.load(run.id).spec.model == "reranker@v1"  # type: ignore[union-attr]
    assert "cannot be" not in refused("remove", "reranker@v1")
    run.cancel()


def test_a_version_that_is_used_is_not_removed(
    models: dict[str, Path], shared_server: Server, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in models.values():
        put_version(registry, model, "reranker")
    done("alias", "reranker@v1", "as", "production", "--split", "v2=0.1")
    assert "reranker@v2 is what production stands for" in refused("remove", "reranker@v2")
    done("remove", "reranker@production")
    client = Client(shared_server.url, registry=str(registry), queue="nobody")
    run = client.submit(PAIRS, model="reranker@v2")
    monkeypatch.setenv("REDIS_URL", shared_server.url)
    assert f"reranker@v2 is used by run {run.id}" in refused("remove", "reranker@v2")
    run.cancel()
    pairs, output = registry.parent / "pairs.csv", registry.parent / "scores.csv"
    pairs.write_text("query,passage\na,b\n")
    submitted = client.submit_file(str(pairs), str(output), model="reranker@v2")
    assert f"reranker@v2 is used by run {submitted.id}" in refused("remove", "reranker@v2")
    submitted.cancel()
    assert done("remove", "reranker@v2") == "removed reranker@v2\n"
    assert "reranker@v2 was removed" in refused("show", "reranker@v2")
    assert [each["version"] for each in json.loads(done("list", "--json"))] == ["v1"]


def test_embedded_workers_take_paths_of_settings_as_their_command_does(
    models: dict[str, Path], registry: Path, tmp_path: Path
) -> None:
    """They worked in another folder, and did not find the registry there."""
    put_version(registry, models["trained"], "reranker")
    (tmp_path / "pairs.csv").write_text("query,passage\na,b\n")
    here = environ(registry.name, Path("cache"))
    found = score_file("pairs.csv", "--model", "reranker@v1", cwd=tmp_path, environ=here)
    assert found.code == 0, found.err
    assert list((tmp_path / "cache").iterdir())


def test_aliases_are_set_shown_and_rolled_back(models: dict[str, Path], registry: Path) -> None:
    for model in models.values():
        put_version(registry, model, "reranker")
    assert (
        "stands for v1, the first of its targets that is kept"
        in (done("alias", "reranker@v1", "as", "live"), refused("rollback", "reranker@live"))[1]
    )
    said = done("alias", "reranker@v1", "as", "live", "--split", "v2=0.1")
    assert said == "reranker@live stands for v1 90%, v2 10%\n"
    said = done("alias", "reranker@v1", "as", "live", "--shadow", "v2")
    assert said == "reranker@live stands for v1; v2 in its shadow\n"
    shown = done("show", "reranker@live")
    assert "before: v1 90%, v2 10%" in shown
    assert "aliases  live" in shown
    assert [each["aliases"] for each in json.loads(done("list", "--json"))] == [["live"], ["live (shadow)"]]
    for expected in ("v1 90%, v2 10%", "v1"):
        assert done("rollback", "reranker@live") == f"reranker@live stands for {expected}\n"
    assert "stands for v1, the first of its targets that is kept" in refused("rollback", "reranker@live")
    for words, why in [
        (("alias", "reranker@v1", "as", "v7"), "is the name of a version"),
        (("alias", "reranker@v1", "as", "a/b"), "cannot be the name of an alias"),
        (("alias", "reranker@v9", "as", "live"), "has no reranker@v9"),
        (("alias", "reranker@v1", "as", "live", "--split", "v9=0.1"), "has no reranker@v9"),
        (("alias", "reranker@v1", "as", "live", "--split", "v1=0.1"), "what is left of the shares"),
        (("rollback", "reranker@other"), "has no alias reranker@other; the model has live"),
        (("list", "reranker", "other"), "has no model other; rankmill models list shows all"),
        (("show", "reranker"), "is not of the form NAME@VERSION"),
    ]:
        assert why in refused(*words)


BAD = {
    "code": ("modeling.py", b"import os", "a registry holds no code"),
    "pickle": ("pytorch_model.bin", b"\x80", "a registry holds weights as"),
    "no ending": ("weights", b"\x80", "not files without an ending"),
    "auto_map": ("config.json", b'{"auto_map": {"AutoModel": "a.b"}}', "names code to load the model with"),
    "damaged": ("config.json", b"{", "is damaged"),
    "deep": ("config.json", b"[" * 100_000, "is damaged: maximum recursion"),
    "no weights": ("model.safetensors", None, r"has no \*.safetensors"),
    "others' weights": (
        "model.safetensors.index.json",
        b'{"weight_map": {"a": "/a/b.safetensors"}}',
        "names '/a/b.safetensors', which is not in its directory",
    ),
    "no config": ("config.json", None, "there is no config.json"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_what_is_no_safe_model_is_not_pushed(
    kind: str, models: dict[str, Path], registry: Path, tmp_path: Path
) -> None:
    name, content, why = BAD[kind]
    model = shutil.copytree(models["trained"], tmp_path / "bad")
    (model / name).unlink(missing_ok=True)
    if content is not None:
        (model / name).write_bytes(content)
    assert re.search(why, refused("push", model, "reranker"))
    assert list(registry.iterdir()) == []


def test_a_model_that_scores_nothing_is_not_pushed(
    models: dict[str, Path], registry: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    model = shutil.copytree(models["trained"], tmp_path / "bad")
    weights = load_file(model / "model.safetensors")
    save_file({name: np.zeros_like(each) for name, each in weights.items()}, model / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    assert "the same score" in refused("push", model, "reranker")
    for name in ("../reranker", "a/b", "rer anker", "reranker@"):
        assert "name" in refused("push", model, name) or "version" in refused("push", model, name)
    assert list(registry.iterdir()) == []


def test_a_push_keeps_notes_and_a_pull_has_the_files(
    models: dict[str, Path], registry: Path, tmp_path: Path
) -> None:
    (registry / "reranker").mkdir()
    pushed = json.loads(done("push", models["trained"], "reranker", "--notes", "of May", "--json"))
    assert pushed["family"] == "bert"
    assert "notes    of May" in done("show", "reranker@v1")
    done("pull", "reranker@v1", tmp_path / "pulled")
    assert {path.name for path in (tmp_path / "pulled").iterdir()} == {
        path.name for path in models["trained"].iterdir()
    }
    assert "exists already" in refused("pull", "reranker@v1", tmp_path / "pulled")


@pytest.mark.slow
def test_four_workers_that_start_at_once_fetch_a_version_once_from_s3(
    models: dict[str, Path], bucket: Bucket, server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    url = f"{bucket.url}/models"
    put_version(url, models["trained"], "reranker")
    here = {**environ(url, tmp_path / "cache"), **bucket.environ, "RANKMILL_WARM": "reranker@v1"}
    for _ in range(4):
        workers(environ=here, ready=False)
    log = tmp_path / "worker.log"
    wait_for(lambda: log.read_text().count("loaded reranker@v1") == 4)
    assert log.read_text().count("fetched reranker@v1") == 1
    client = Client(server.url, registry=url, model="reranker@v1", backend="torch", precision="fp32")
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_version(
    models: dict[str, Path], server: Server, workers: StartWorker, registry: Path, tmp_path: Path
) -> None:
    for model in models.values():
        put_version(registry, model, "reranker")
    done("alias", "reranker@v1", "as", "production")
    pq.write_table(
        pa.table({"query": ["big cat"] * 800, "passage": [f"moon {n}" for n in range(800)]}),
        tmp_path / "a.parquet",
    )
    options = ["--model", "reranker@production", "--redis", server.url, "--chunk-size", "16"]
    command = [tmp_path / "a.parquet", "-o", tmp_path / "b.parquet", *options]
    here = environ(registry, tmp_path / "cache")
    lost = environ(tmp_path / "nowhere", tmp_path / "other")
    workers(environ=here)
    workers(environ=lost)
    first = start_command("score-file", *command, environ={**here, "RANKMILL_WINDOW": "4"})
    assert stop(first, tmp_path / "b.parquet", 12, signal.SIGKILL)
    done("alias", "reranker@v2", "as", "production")
    again = score_file(*command, "--json", environ=here)
    assert again.code == 0, again.err
    assert again.summary["model"] == "reranker@v1"
    assert again.summary["row_errors"] == 0
    refusal = "left to other workers: reranker@v1 is not in this host's cache, and the registry"
    assert refusal in (tmp_path / "worker.log").read_text()
    third = score_file(*command[:2], tmp_path / "c.parquet", *command[3:], "--json", environ=here)
    assert third.summary["model"] == "reranker@v2"


def test_a_version_that_a_worker_cannot_load_is_not_promoted(
    models: dict[str, Path], server: Server, workers: StartWorker, registry: Path, tmp_path: Path
) -> None:
    put_version(registry, models["trained"], "reranker")
    done("alias", "reranker@v1", "as", "production")
    broken = shutil.copytree(models["retrained"], tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x" * 1000)
    put_version(registry, broken, "reranker")
    assert "there is no live worker" in refused(
        "promote", "reranker@v2", "--alias", "production", "--redis", server.url
    )
    workers(environ={**environ(registry, tmp_path / "cache"), "RANKMILL_MODEL_CACHE_SIZE": "1"})
    found = invoke("promote", "reranker@v2", "--alias", "production", "--redis", server.url)
    assert found.exit_code == 1
    assert "reranker@production is unchanged: 1 of 1 workers" in found.stderr
    assert Registry(str(registry)).resolve(Reference("reranker", "production")).only == "reranker@v1"
    client = Client(server.url, registry=str(registry), model="reranker@v2", precision="fp32")
    with pytest.raises(RunFailed, match=r"reranker@v2") as failed:
        client.score(PAIRS, timeout=60)
    assert "\n" not in str(failed.value)
    put_version(registry, models["retrained"], "reranker")
    two = ("promote", "reranker@v3", "--split", "v1=0.1", "--alias", "production", "--redis", server.url)
    said = done(*two)
    assert "; unloaded reranker@v3 to make room (model_cache_size, model_cache_gib): they take turns" in said
    assert "reranker@production stands for v3 90%, v1 10%" in said


def test_a_terminal_shows_how_far_a_push_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("pushing", 100, quiet=False) as on_bytes:
        on_bytes(50)
    assert "pushing" in terminal.getvalue()
    assert "50/100 bytes" in terminal.getvalue()
    shown = len(terminal.getvalue())
    with progress("pulling", 100, quiet=True) as on_bytes:
        on_bytes(50)
    assert len(terminal.getvalue()) == shown


@pytest.mark.slow
def test_two_versions_are_compared_on_a_file(
    models: dict[str, Path], shared_queue: Server, registry: Path, tmp_path: Path
) -> None:
    rows = [(f"cat {n % 6}", f"moon river {n}", n % 3) for n in range(90)]
    names = ("query", "passage", "label")
    pq.write_table(
        pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), tmp_path / "a.parquet"
    )
    ways = ["--redis", shared_queue.url, "--precision", "fp32", "--label-column", "label"]
    one, two = models.values()
    found = json.loads(
        done("compare", one, two, tmp_path / "a.parquet", *ways, "--json", "--report", tmp_path / "report")
    )
    same, other = found["models"]
    assert (same["spearman"], same["top_overlap"], same["rows"]) == (1.0, 1.0, 90)
    assert other["spearman"] < 1
    assert 0 < other["ndcg"] <= 1
    assert other["pairs_per_second"] > 0
    worst = [each["spearman"] for each in found["differences"]]
    assert len(worst) == 6
    assert worst == sorted(worst)
    report = (tmp_path / "report" / "report.md").read_text()
    assert f"# {two} beside {one}" in report
    assert found["differences"][0]["first"] in report
    assert "<svg" in (tmp_path / "report" / "scores.svg").read_text()
    assert "Spearman with the first" in done("compare", one, two, tmp_path / "a.parquet", *ways)
    for model in models.values():
        put_version(registry, model, "reranker")
    done("alias", "reranker@v1", "as", "live", "--split", "v2=0.5")
    assert "stands for several versions" in refused(
        "compare", "reranker@live", two, tmp_path / "a.parquet", *ways
    )


def test_workers_know_the_aliases_of_orders_and_of_jobs_enqueued_by_name(
    models: dict[str, Path], server: Server, workers: StartWorker, registry: Path, tmp_path: Path
) -> None:
    put_version(registry, models["trained"], "reranker")
    done("alias", "reranker@v1", "as", "production")
    workers(environ={**environ(registry, tmp_path / "cache"), "RANKMILL_WARM": "reranker@production"})
    queue = Queue("rankmill", connection=server.client, serializer=JSONSerializer)
    job = queue.enqueue("rankmill.score_pairs", PAIRS, model="reranker@production", precision="fp32")
    wait_for(lambda: job.return_value(refresh=True))
    found: Any = job.return_value()
    assert found["stats"]["revision"] == Registry(str(registry)).manifest(Reference("reranker", "v1")).content
    log = (tmp_path / "worker.log").read_text()
    assert log.count("loaded reranker@v1 ") == 1
