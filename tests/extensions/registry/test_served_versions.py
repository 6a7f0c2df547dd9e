"""Models by name at the gateway: an alias is its version, a split shares the queries, a shadow scores too."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from rankmill import Client
from rankmill.extensions.registry.aliases import NotWarm, promote
from rankmill.extensions.registry.documents import Alias, Reference, target_of
from rankmill.extensions.registry.registry import Registry
from rankmill.extensions.registry.versions import VersionStore
from rankmill.jobs import model_names
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.protocol.worker_report import SCORING_FIELD, WorkerReport, announce_worker
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.client.joined import version_of
from rankmill.workers.models.sources import ModelCopies
from tests.conftest import QUICK_LEASE, Server, StartWorker, wait_for
from tests.harness.gateways import Running, running_gateway
from tests.harness.models.registries import put_version
from tests.harness.models.tiny import make_bert
from tests.workers.test_metrics import page

TEXTS = ["big cat", "moon river", "king"]
QUERIES = [f"moon {number}" for number in range(8)]


def asked(gateway: Running, query: str) -> list[float]:
    """The scores of the texts, in their order."""
    reply = gateway.post("/rerank", {"query": query, "texts": TEXTS})
    assert reply.status == 200, reply.body
    return [each["score"] for each in sorted(reply.json, key=lambda each: each["index"])]


def scored_pairs(gateway: Running) -> dict[str, int]:
    """The pairs that the gateway has counted, by model."""
    counted = gateway.get("/metrics").body.decode()
    found = re.findall(r'^rankmill_gateway_model_pairs_total\{model="(.*?)".*\} (.*)', counted, re.M)
    return {model: int(float(pairs)) for model, pairs in found}


def test_an_alias_a_split_and_a_shadow_answer_as_their_versions(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    for seed in range(2):
        put_version(folder, make_bert(tmp_path / f"model-{seed}", seed=seed), "reranker")
    registry, live = Registry(str(folder)), Reference("reranker", "live")

    def stands_for(versions: dict[str, float], shadow: str | None = None) -> None:
        registry.write_alias(live, Alias(now=target_of(versions, shadow=shadow, by="a test", at=1.0)))

    here = {"RANKMILL_REGISTRY": str(folder), "RANKMILL_CACHE_DIR": str(tmp_path / "cache"),
            "RANKMILL_BACKEND": "torch", "RANKMILL_PRECISION": "fp32", **QUICK_LEASE}  # fmt: skip
    workers(environ=here)
    client = Client(server.url, registry=str(folder), backend="torch", precision="fp32")
    alone = {version: {query: client.score([(query, text) for text in TEXTS], model=f"reranker@{version}")
                       for query in QUERIES} for version in ("v1", "v2")}  # fmt: skip
    assert not np.allclose(alone["v1"][QUERIES[0]], alone["v2"][QUERIES[0]])

    def answers(gateway: Running, versions: dict[str, float]) -> bool:
        """Whether each query has the scores of its version."""
        by = {query: version_of("reranker", versions, query) for query in QUERIES}
        return all(
            np.allclose(asked(gateway, query), alone[by[query]][query], atol=1e-5) for query in QUERIES
        )

    half = {"v1": 0.5, "v2": 0.5}
    assert {version_of("reranker", half, query) for query in QUERIES} == {"v1", "v2"}
    stands_for({"v1": 1.0})
    soon = "import rankmill.jobs.model_names as names; names._FRESH_SECONDS = 0.2"
    with running_gateway(
        server.url, tmp_path, "--model", "reranker@live", environ=here, before=soon
    ) as gateway:
        assert answers(gateway, {"v1": 1.0})
        answer = gateway.post("/v1/score", {"text_1": QUERIES[0], "text_2": TEXTS}).json
        assert answer["model"] == "reranker@v1"
        loaded = page(server, "metrics")[1]
        assert re.search(
            r'^rankmill_model_info\{.*model="reranker@v1".*revision="[0-9a-f]{64}"', loaded, re.M
        )
        stands_for(half)
        wait_for(lambda: answers(gateway, half))  # the gateway asks the registry again
        pairs = {"text_1": QUERIES, "text_2": [TEXTS[0]] * len(QUERIES)}
        before = Counter(scored_pairs(gateway))
        reply = gateway.post("/v1/score", pairs)
        by = [version_of("reranker", half, query) for query in QUERIES]
        contents = {v: registry.manifest(Reference("reranker", v)).content for v in dict.fromkeys(by)}
        assert reply.json["model"] == ",".join(f"reranker@{version}" for version in contents)
        assert unquote(reply.headers["x-score-revision"]) == ",".join(contents.values())
        more = Counter(scored_pairs(gateway)) - before
        assert more == {f"reranker@{version}": by.count(version) for version in contents}
        tokens = gateway.post("/tokenize", {"inputs": QUERIES, "add_special_tokens": False}).json
        assert ["".join(each["text"] for each in row) for row in tokens] == [
            query.replace(" ", "") for query in QUERIES
        ]
        promoted = gateway.post("/v1/registry/reranker/aliases/live/promote", {"version": "v2"})
        assert promoted.json["now"]["versions"] == {"v2": 1.0}
        assert [each["state"] for each in promoted.json["workers"]] == ["done"]
        assert "reranker@v2" in promoted.json["workers"][0]["text"]
        wait_for(lambda: answers(gateway, {"v2": 1.0}))
        stands_for({"v1": 1.0}, shadow="v2")
        wait_for(lambda: answers(gateway, {"v1": 1.0}))
        wait_for(lambda: 'rankmill_model_pairs_total{model="reranker@v2",priority="bulk"' in
                 page(server, "metrics")[1])  # fmt: skip
        counted = gateway.get("/metrics").body.decode()
    for version in ("v1", "v2"):
        content = registry.manifest(Reference("reranker", version)).content
        labels = f'model="reranker@{version}",priority="request",revision="{content}"'
        assert f"rankmill_gateway_model_pairs_total{{{labels}}}" in counted
        assert f"rankmill_gateway_model_latency_seconds_count{{{labels}}}" in counted
    assert 'rankmill_gateway_model_score_bucket{le="+Inf",model="reranker@v2"' in counted


def test_an_alias_that_is_split_while_a_run_starts_stands_for_what_it_was(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_names, "_FRESH_SECONDS", 0.0)
    for seed in range(2):
        put_version(tmp_path, make_bert(tmp_path / f"model-{seed}", seed=seed), "reranker")
    registry, live = Registry(str(tmp_path)), Reference("reranker", "live")

    def stands_for(versions: dict[str, float]) -> None:
        registry.write_alias(live, Alias(now=target_of(versions, shadow=None, by="a test", at=1.0)))

    class Pairs(list[tuple[str, str]]):
        def __len__(self) -> int:
            stands_for({"v1": 0.5, "v2": 0.5})
            return super().__len__()

    stands_for({"v1": 1.0})
    run = Client(server.url, registry=str(tmp_path), model="reranker@live").begin(Pairs([("q", "p")]))
    assert run.model == "reranker@v1"
    run.cancel()


def test_an_alias_stays_if_a_worker_ends_before_it_has_loaded_the_version(
    server: Server, tmp_path: Path
) -> None:
    put_version(tmp_path, make_bert(tmp_path / "model"), "reranker")
    server.client.sadd("rq:workers", "rq:worker:w")
    server.client.hset(
        "rq:worker:w", mapping={"birth": "x", "state": "idle", "queues": "q", SCORING_FIELD: 1}
    )
    announce_worker(server.client, "w", WorkerReport(device="cpu", started=1.0, beat=time.time()), 4)
    live, wanted = Reference("reranker", "live"), target_of({"v1": 1.0}, shadow=None, by="a test", at=1.0)
    with pytest.raises(NotWarm, match=r"1 of 1 workers have not loaded reranker@v1 \(w: has ended"):
        promote(Registry(str(tmp_path)), live, wanted, server.client, wait_seconds=60, on_outcome=print)


def test_a_worker_with_another_registry_s_version_leaves_it_to_others(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    """The worker has no registry, and its cache holds a version of another one under the same name."""
    models = [make_bert(tmp_path / f"model-{seed}", seed=seed) for seed in range(2)]
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, model in zip((own, other), models, strict=True):
        folder.mkdir()
        put_version(folder, model, "reranker")
    settings = load_settings({"cache_dir": str(tmp_path / "cache")}, environ={})
    copy = VersionStore(ModelCopies(settings), Registry(str(other))).get(Reference("reranker", "v1"), None)
    assert copy.held
    copy.held.close()
    exact = {"RANKMILL_BACKEND": "torch", "RANKMILL_PRECISION": "fp32", **QUICK_LEASE}
    workers(environ={"RANKMILL_CACHE_DIR": str(tmp_path / "cache"), **exact})
    live, wanted = Reference("reranker", "live"), target_of({"v1": 1.0}, shadow=None, by="a test", at=1.0)
    with pytest.raises(NotWarm, match=r"1 of 1 workers .* is RANKMILL_REGISTRY the same everywhere"):
        promote(Registry(str(own)), live, wanted, server.client, wait_seconds=120, on_outcome=print)
    client = Client(server.url, registry=str(own), precision="fp32")
    pairs = [(query, text) for query in QUERIES for text in TEXTS]
    with pytest.raises(RankmillError, match="is RANKMILL_REGISTRY the same everywhere"):
        client.score(pairs, model="reranker@v1", timeout=60)
    workers(
        environ={"RANKMILL_REGISTRY": str(own), "RANKMILL_CACHE_DIR": str(tmp_path / "own-cache"), **exact}
    )
    scores = client.score(pairs, model="reranker@v1", timeout=120)
    assert np.allclose(scores, client.score(pairs, model=str(models[0])), atol=1e-5)
