"""The gateway over fake workers: its own paths, without a server."""

from __future__ import annotations

import asyncio
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakeredis import FakeRedis
from fastapi.testclient import TestClient

from rankmill.extensions.gateway import gateway as gateway_module
from rankmill.extensions.gateway import testing
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.extensions.gateway.testing import fake_gateway, gateway_app
from rankmill.testing import FakeWorkers, fake_workers

__all__ = ["fake_workers"]

gateway_url = testing._fake_gateway  # a plugin's fixture, which is called fake_gateway

pytestmark = pytest.mark.own_precision


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/rerank", {"documents": ["x", "abc"]}, lambda answer: answer["results"][0]["index"]),
        ("/v2/rerank", {"documents": ["x", "abc"]}, lambda answer: answer["results"][0]["index"]),
        ("/rerank", {"texts": ["x", "abc"]}, lambda answer: answer[0]["index"]),
    ],
)
def test_the_dialects_answer(path: str, body: dict[str, Any], read: Any) -> None:
    workers = FakeWorkers(lambda query, passage: float(len(passage)))
    with TestClient(gateway_app(workers, model="m")) as client:
        answer = client.post(path, json={"query": "q", "model": "m", **body})
        assert answer.status_code == 200
        assert read(answer.json()) == 1


def test_what_goes_wrong_has_the_gateways_answers() -> None:
    workers = FakeWorkers()
    body = {"query": "q", "texts": ["a"]}
    with TestClient(gateway_app(workers, gateway_request_seconds=2, gateway_api_key="a" * 16)) as client:
        assert client.post("/rerank", json=body).status_code == 401
        client.headers["authorization"] = "Bearer " + "a" * 16
        assert client.post("/rerank", json={"query": "q"}).status_code == 422
        assert client.post("/rerank", json=body).status_code == 200
        workers.score = lambda query, passage: "the pair has 600 tokens, and 512 are taken: shorten it"
        assert client.post("/rerank", json=body).status_code in {413, 422}
        workers.seconds = 60
        answer = client.post("/rerank", json=body)
        assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")  # as TEI has it
        assert client.get("/ready").status_code == 200
        assert [run.is_cancelled for run in workers.runs] == [False, False, True]


def test_the_fixture_is_the_url_of_a_gateway(
    request: pytest.FixtureRequest, fake_workers: FakeWorkers
) -> None:
    url = request.getfixturevalue("fake_gateway")
    body = b'{"query": "q", "texts": ["a"]}'
    asked = urllib.request.Request(f"{url}/rerank", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.status == 200
    assert fake_workers.runs[0].is_complete


def test_a_gateway_without_workers_says_so() -> None:
    with TestClient(gateway_app(FakeWorkers(count=0))) as client:
        assert client.post("/rerank", json={"query": "q", "texts": ["a"]}).status_code == 503


def test_it_is_served_on_a_port_of_its_own() -> None:
    with fake_gateway(FakeWorkers()) as one, fake_gateway(FakeWorkers(count=0)) as other:
        assert one != other
        for url in (one, other):
            with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
                assert answer.status == 200


def test_the_revision_of_the_settings_is_for_the_gateways_own_model() -> None:
    workers = FakeWorkers()
    settings = {"model": "org/a", "revision": "main", "gateway_models": "org/a,org/b"}
    with TestClient(gateway_app(workers, **settings)) as client:
        for model in ("org/a", "org/b"):
            body = {"query": "q", "documents": ["a"], "model": model}
            assert client.post("/v1/rerank", json=body).status_code == 200
    assert [run.asked.spec.revision for run in workers.runs] == ["main", None]


def test_callers_that_ask_about_the_model_share_one_question() -> None:
    """Without workers, each would otherwise wait for all before it."""
    workers = FakeWorkers(count=0)
    with TestClient(gateway_app(workers)) as client, ThreadPoolExecutor(3) as threads:
        found = [threads.submit(client.get, "/info") for _ in range(3)]
        assert {each.result().status_code for each in found} == {503}
        asked = len(workers.runs)
        assert asked < 3
        workers.count = 1
        assert [client.get("/info").status_code for _ in range(2)] == [200, 200]
    assert len(workers.runs) == asked + 1


def test_no_worker_is_told_to_load_the_model_before_their_models_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders: list[str] = []
    monkeypatch.setattr(gateway_module, "_WARM_FIRST_SECONDS", 0)
    gateway = gateway_app(FakeWorkers()).state.gateway
    monkeypatch.setattr(gateway, "_order_warm", lambda: orders.append(gateway.load.unready))

    async def warm() -> None:
        warming = asyncio.create_task(gateway.warm())
        for _ in range(100):
            await asyncio.sleep(0)
        gateway.load.workers, gateway.load.unready = 1, "no worker has loaded the model"
        while not orders:
            await asyncio.sleep(0.001)
        warming.cancel()

    asyncio.run(warm())
    assert orders == ["no worker has loaded the model"]


def test_a_stopping_gateway_does_not_wait_for_a_worker_that_loads_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python waits for the thread that gives the order."""
    waits: list[float] = []
    worker = Mock(queues=["rankmill"], state="idle")
    monkeypatch.setattr(gateway_module, "read_cluster", lambda _: Mock(workers=[worker]))
    monkeypatch.setattr(gateway_module, "order_workers", lambda *_, wait_seconds: waits.append(wait_seconds))
    gateway_app(FakeWorkers()).state.gateway._order_warm()
    assert waits == [0]


def test_a_model_in_a_folder_of_its_name_keeps_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with TestClient(gateway_app(FakeWorkers(), model="org/model")) as client:
        answer = client.post("/v1/rerank", json={"query": "q", "documents": ["a"]}).json()
    assert answer["model"] == "org/model"


def test_a_model_has_its_name_in_the_settings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trained").mkdir()
    monkeypatch.chdir(tmp_path)
    served = gateway_app(FakeWorkers(), model="./trained").state.gateway.served
    assert served.default == ("trained", str(tmp_path / "trained"), "./trained")
    _, key = KeyStore(FakeRedis()).create("shop", days=1, models=("./trained",))
    for name in ("trained", "./trained", str(tmp_path / "trained")):
        assert served.resolve(name) is served.default
        assert served.known(name) == served.default.model
    assert key.may_use(*served.default)


def test_any_model_may_have_any_name() -> None:
    workers = FakeWorkers()
    with TestClient(gateway_app(workers, gateway_models="*")) as client:
        body = {"query": "q", "documents": ["a"], "model": "~a\0"}
        assert client.post("/v1/rerank", json=body).status_code == 200
    assert workers.runs[0].asked.spec.model == "~a\0"
