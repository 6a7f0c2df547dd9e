"""An alias for several versions: each query has one of them, in the shares asked for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rq.suspension import WORKERS_SUSPENDED

from rankmill import AsyncClient, Client
from rankmill.extensions.registry.documents import Alias, Reference, target_of
from rankmill.extensions.registry.registry import Registry
from rankmill.extensions.registry.settings import RegistrySettings
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.rq import WORKER_PREFIX
from rankmill.jobs.protocol.worker_report import worker_reports
from rankmill.producer.client.joined import rows_by_version, version_of
from rankmill.producer.client.runs import Scores
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.models.registries import put_version
from tests.harness.models.tiny import make_bert

SHARES = {"v1": 0.9, "v2": 0.1}
QUERIES = [f"{word} {number}" for number in range(20) for word in ("moon", "big cat")]
PAIRS = [(query, f"river {number}") for query in QUERIES for number in range(5)]


def test_ten_thousand_queries_are_shared_as_asked() -> None:
    queries = [f"how far is {number}" for number in range(10_000)]
    for versions in (SHARES, {"v1": 0.5, "v2": 0.3, "v3": 0.2}, {"v1": 1 / 3, "v2": 1 / 3, "v3": 1 / 3}):
        found = Counter(version_of("reranker", versions, query) for query in queries)
        for version, share in versions.items():
            assert abs(found[version] / len(queries) - share) < 0.01
    again = {query: version_of("reranker", SHARES, query) for query in reversed(queries)}
    assert again == {query: version_of("reranker", SHARES, query) for query in queries}


def test_a_query_of_the_new_version_keeps_it_as_its_share_grows() -> None:
    queries = [str(number) for number in range(2000)]
    few = {query for query in queries if version_of("a", SHARES, query) == "v2"}
    more = {query for query in queries if version_of("a", {"v1": 0.6, "v2": 0.4}, query) == "v2"}
    assert few < more
    turned = {query for query in queries if version_of("a", {"v2": 0.4, "v1": 0.6}, query) == "v2"}
    assert turned == more


def test_every_row_has_one_version_and_all_rows_of_a_query_the_same() -> None:
    queries: list[str | None] = ["a", None, "b", "a", "\ud800", None] * 50
    found = rows_by_version("reranker", {"v1": 0.5, "v2": 0.5}, queries)
    assert sorted(np.concatenate(list(found.values())).tolist()) == list(range(len(queries)))
    for query in set(queries):
        rows = {row for row, each in enumerate(queries) if each == query}
        assert sum(bool(rows & set(numbers.tolist())) for numbers in found.values()) == 1


@pytest.fixture
def client(server: Server, workers: StartWorker, tmp_path: Path) -> Client:
    """A client of a registry with two versions, and a worker that has both."""
    registry = tmp_path / "registry"
    registry.mkdir()
    for seed in range(2):
        put_version(registry, make_bert(tmp_path / f"model-{seed}", seed=seed), "reranker")
    here = {"RANKMILL_REGISTRY": str(registry), "RANKMILL_CACHE_DIR": str(tmp_path / "cache"),
            "RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_BACKEND": "torch"}  # fmt: skip
    workers(environ=here, name="only")
    return Client(
        server.url, registry=str(registry), model="reranker@live", backend="torch", precision="fp32"
    )


def let_it_stand_for(
    client: Client, versions: dict[str, float], shadow: str | None = None, name: str = "reranker"
) -> None:
    registry = Registry(client.settings.of(RegistrySettings).registry or "")
    target = target_of(versions, shadow=shadow, by="a test", at=1.0)
    registry.write_alias(Reference(name, "live"), Alias(now=target))
    client._names._known.clear()  # what it would forget after some seconds


def test_a_split_and_a_shadow_score_as_their_versions_do(client: Client, server: Server) -> None:
    alone = {each: client.score(PAIRS, model=f"reranker@{each}") for each in SHARES}
    assert not np.allclose(alone["v1"], alone["v2"])
    shares = {"v1": 0.5, "v2": 0.5}
    let_it_stand_for(client, shares)
    run = client.begin([*PAIRS, ("moon", None)])
    found = run.scores(timeout=60)
    assert (run.progress.rows, run.progress.row_errors) == (len(PAIRS) + 1, 1)
    by = [version_of("reranker", shares, query) for query, _ in PAIRS]
    assert set(by) == {"v1", "v2"}
    expected = [alone[version][row] for row, version in enumerate(by)]
    np.testing.assert_allclose(found[:-1], expected, atol=1e-5)
    assert list(found.errors) == [len(PAIRS)]
    best = client.rank(QUERIES[0], ["river 0", "river 1"])
    assert {each.index for each in best} == {0, 1}
    with pytest.raises(InputError, match="stands for several versions"):
        client.submit(PAIRS)
    run = client.begin(PAIRS)
    assert run.model == "reranker@v1,reranker@v2"
    np.testing.assert_allclose(list(run), expected, atol=1e-5)
    assert (run.stats.rows, run.stats.workers) == (len(PAIRS), {"only": len(PAIRS)})
    one = client.begin([PAIRS[0]])
    assert one.model == f"reranker@{by[0]}"
    one.cancel()
    assert client.score([]).shape == (0,)

    let_it_stand_for(client, {"v1": 1.0}, shadow="v2")
    before = _pairs(server)
    np.testing.assert_allclose(client.score(PAIRS), alone["v1"], atol=1e-5)
    wait_for(lambda: _pairs(server) >= before + 2 * len(PAIRS))
    before = _pairs(server)
    np.testing.assert_allclose(asyncio.run(_asyncio_scores(client, server)), alone["v1"], atol=1e-5)
    assert _pairs(server) >= before + 2 * len(PAIRS)
    wait_for(lambda: not client.store.redis.keys("rankmill:run:*"))


def test_a_client_may_be_closed_while_a_shadow_scores(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    before = {*threading.enumerate()}
    let_it_stand_for(client, {"v1": 1.0}, shadow="v2")
    server.client.set(WORKERS_SUSPENDED, 1)
    wait_for(lambda: server.client.hget(f"{WORKER_PREFIX}only", "state") == b"suspended")
    run = client.begin(PAIRS)
    (shadow,) = (each for each in {*threading.enumerate()} - before if each.name == "later")
    wait_for(lambda: "xread" in {each["cmd"] for each in server.client.client_list() if "b" in each["flags"]})
    client.close()
    server.client.delete(WORKERS_SUSPENDED)
    shadow.join()
    assert not [error for error in errors if error.thread is shadow]
    run.cancel()


def test_versions_with_other_labels_have_no_scores_together(client: Client, tmp_path: Path) -> None:
    registry = Path(client.settings.of(RegistrySettings).registry or "")
    for number, names in enumerate((("no", "yes"), ("yes", "no"), ("no", "yes", "maybe")), 1):
        model = make_bert(tmp_path / f"labels-{number}", labels=len(names))
        config = json.loads((model / "config.json").read_text())
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
        (model / "config.json").write_text(json.dumps(config))
        put_version(registry, model, "judge")
    for other in ("v2", "v3"):
        let_it_stand_for(client, {"v1": 0.5, other: 0.5}, name="judge")
        run = client.begin(PAIRS, model="judge@live", all_labels=True)
        for _ in range(2):
            with pytest.raises(InputError, match=f"versions judge@v1, judge@{other} have different labels"):
                run.scores(timeout=60)
    found = client.score(PAIRS, model="judge@live", label="no", timeout=60)
    assert np.isfinite(found).all()


async def _asyncio_scores(client: Client, server: Server) -> Scores:
    """The scores of an asyncio client, when the shadow has its own too."""
    before = _pairs(server)
    async with AsyncClient(server.url, settings=client.settings) as other:
        run = await other.begin(PAIRS)
        assert run.model == "reranker@v1"
        scores = await run.scores()
        async with asyncio.timeout(60):
            while _pairs(server) < before + 2 * len(PAIRS) or server.client.keys("rankmill:run:*"):
                await asyncio.sleep(0.1)
        return scores


def _pairs(server: Server) -> int:
    """Pairs that the worker has scored, as far as it has reported."""
    report = worker_reports(server.client, ["only"]).get("only")
    return report.pairs if report else 0
