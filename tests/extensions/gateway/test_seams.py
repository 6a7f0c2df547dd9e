"""What packages add to a gateway: paths of extensions, and dialects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

from rankmill import plugins
from rankmill.cli.main import rankmill
from rankmill.extensions.gateway.dialects import routes
from rankmill.extensions.gateway.dialects.base import Dialect, RerankBody
from rankmill.extensions.gateway.dialects.routes import score_paths
from rankmill.extensions.gateway.dialects.tei import TEI
from rankmill.extensions.gateway.gateway import Addition, Gateway
from rankmill.extensions.gateway.http.dependencies import TheGateway, new_router
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest
from rankmill.extensions.gateway.testing import gateway_app
from rankmill.jobs.contract.errors import EmbeddedError, InputError
from rankmill.jobs.runtime.settings import Settings
from rankmill.testing import FakeWorkers

pytestmark = pytest.mark.own_precision

RERANK: dict[str, Any] = {"query": "q", "texts": ["x", "abc"]}

Installed = dict[plugins.Seam, dict[str, Any]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """What packages add, by seam and name: a test changes it."""
    seams: tuple[plugins.Seam, ...] = ("rankmill.routes", "rankmill.dialects", "rankmill.settings")
    added: Installed = {
        seam: {name: plugins.load(seam, name) for name in plugins.names(seam)} for seam in seams
    }
    monkeypatch.setattr(plugins, "names", lambda seam: list(added[seam]))
    monkeypatch.setattr(plugins, "load", lambda seam, name: added[seam][name])
    caches = (routes.bodies, routes._by_path)
    for cached in caches:
        cached.cache_clear()
    yield added
    for cached in caches:
        cached.cache_clear()


def test_a_gateway_serves_without_other_extensions(installed: Installed) -> None:
    installed["rankmill.routes"].clear()
    with TestClient(gateway_app(FakeWorkers(), model="m")) as client:
        assert client.post("/rerank", json=RERANK).status_code == 200
        for path in ("/v1/files", "/v1/registry"):
            assert "there is no path" in client.get(path).text
        assert client.get("/openapi.json").status_code == 200


class Counter(Addition):
    """An extension of somebody else."""

    router = new_router("counter", "/counter")
    ended: ClassVar[list[str]] = []

    def attach(self, gateway: Gateway) -> None:
        gateway.names |= {"/private/place": "the place"}

    async def work(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("work")

    async def close(self) -> None:
        self.ended.append("requests")


@Counter.router.get("/most")
def most(gateway: TheGateway, ask: str) -> dict[str, int]:
    """The most pairs."""
    if ask != "pairs":
        raise InputError(f"/private/place has no {ask}")
    return {"most": gateway.own.gateway_pairs}


def test_an_extension_adds_paths_and_work_and_hides_what_is_private(installed: Installed) -> None:
    installed["rankmill.routes"]["counter"] = Counter
    with TestClient(gateway_app(FakeWorkers(), gateway_pairs=7)) as client:
        assert client.get("/counter/most?ask=pairs").json() == {"most": 7}
        assert "the place has no texts" in client.get("/counter/most?ask=texts").text
        assert "/counter/most" in client.get("/openapi.json").json()["paths"]
        assert not Counter.ended
    assert Counter.ended == ["requests", "work"]


MINE = Dialect("mine", lambda refusal, status: {"oh": refusal.message}, {"invalid": 418}, scale="identity")


class MyRerank(RerankBody):
    """A body of somebody else's dialect, at one path of TEI and one of its own."""

    dialect = MINE
    paths = ("/rerank", "/mine")
    summary = "mine: texts by score"

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts, self.model)

    def answer(self, scores: RequestScores) -> object:
        return {"mine": scores.scores}


def test_a_dialect_of_another_package_has_its_paths(installed: Installed) -> None:
    installed["rankmill.dialects"]["mine"] = (MyRerank,)
    body = {"query": "q", "documents": ["x", "abc"]}
    with TestClient(gateway_app(FakeWorkers(), model="m")) as client:
        for path in ("/mine/rerank", "/mine", "/mine/mine"):
            assert list(client.post(path, json=body).json()) == ["mine"]
            assert client.post(path, json={}).status_code == 418
        assert client.post("/rerank", json=RERANK).json()[0].keys() == {"index", "score"}
        assert client.get("/mine/nothing").json().keys() == {"oh"}
        assert client.get("/mine/v1/models").json()["data"][0]["owned_by"] == "mine"
    with TestClient(gateway_app(FakeWorkers(), model="m", gateway_dialect="mine")) as client:
        assert list(client.post("/rerank", json=body).json()) == ["mine"]


def test_of_two_dialects_with_a_path_the_first_has_it(installed: Installed) -> None:
    installed["rankmill.dialects"]["mine"] = (type("MyPredict", (MyRerank,), {"paths": ("/predict",)}),)
    found = {each.path: each.dialect for each in score_paths()}
    assert (found["/predict"], found["/mine/predict"]) == (TEI, MINE)


class Failing(Addition):
    """An extension whose parts raise."""

    async def work(self) -> None:
        raise RuntimeError("work")

    def stop(self) -> None:
        raise RuntimeError("stop")

    async def close(self) -> None:
        raise RuntimeError("close")


def test_an_addition_that_fails_is_logged_and_the_others_are_ended(
    installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    Counter.ended.clear()
    installed["rankmill.routes"] = {"failing": Failing, "counter": Counter}
    with TestClient(app := gateway_app(FakeWorkers(), model="m")) as client:
        assert client.post("/rerank", json=RERANK).status_code == 200
        app.state.gateway.stop()
    assert Counter.ended == ["requests", "work"]
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert sorted(logged) == ["close", "stop", "work"]


@pytest.mark.parametrize("package", ["fastapi", "fastapi_offline", "python_multipart"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """People often have fastapi and uvicorn without the others."""
    monkeypatch.setattr("rankmill.jobs.runtime.installation.find_spec", lambda name: name != package or None)
    done = CliRunner().invoke(rankmill, ["serve", "--address", "nowhere:port"])
    assert re.search(rf"\({package} missing\): pip install .*\[gateway\]", done.output)


def test_embedded_workers_keep_all_models_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def cluster(settings: Settings, *, models: int = 1) -> None:
        made.append(models)
        raise EmbeddedError("enough")

    monkeypatch.setattr("rankmill.extensions.gateway.commands.serve.EmbeddedCluster", cluster)
    names = [f"--model=m{number}" for number in range(5)]
    assert CliRunner().invoke(rankmill, ["serve", "--embedded", *names]).exit_code == 1
    assert made == [5]
