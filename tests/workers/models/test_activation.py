"""The function from logit to score is the one that `CrossEncoder` would apply, wherever it was saved."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.producer.files.manifest import differences, manifest
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import Model, load_model
from tests.harness.models.hub import COMMIT, fetched
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.workers.engine.test_cache import cache_of
from tests.workers.engine.test_engine import engine as engine_of
from tests.workers.engine.test_engine import some_pairs

pytestmark = pytest.mark.own_precision

engine = partial(engine_of, backend="torch")
"""The function is the model's own, whatever runs it; other backends would convert each of these models."""

QUERIES, PASSAGES = some_pairs(12)
PAIRS = list(zip(QUERIES, PASSAGES, strict=True))
ABOUT = "config_sentence_transformers.json"
TANH, SIGMOID = "torch.nn.modules.activation.Tanh", "torch.nn.modules.activation.Sigmoid"


def edit(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def saved_with(folder: Path, activation: torch.nn.Module) -> Path:
    """A model as sentence-transformers saves it."""
    plain = make_bert(folder / "plain")
    cross_encoder(plain, activation_fn=activation).save_pretrained(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture(scope="module")
def saved_tanh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved with tanh; for all tests of this file, so none may change it."""
    return saved_with(tmp_path_factory.mktemp("tanh"), torch.nn.Tanh())


@pytest.fixture
def tanh(saved_tanh: Path, tmp_path: Path) -> Path:
    """A model that sentence-transformers saved with tanh, for the test to change."""
    return Path(shutil.copytree(saved_tanh, tmp_path / "tanh"))


def check(model: Path) -> None:
    """Scores are those of `CrossEncoder`, and by another function they would not be."""
    expected = cross_encoder(model).predict(PAIRS)
    np.testing.assert_allclose(engine(model).score(QUERIES, PASSAGES).scores, expected, atol=1e-5)


@pytest.mark.parametrize(
    "function", [torch.nn.Identity(), torch.nn.Sigmoid(), torch.nn.Tanh(), torch.nn.Softsign()]
)
def test_as_sentence_transformers_saves_it(function: torch.nn.Module, tmp_path: Path) -> None:
    model = saved_with(tmp_path, function)
    check(model)
    other = "torch.nn.modules.activation.ReLU"
    edit(model / "config.json", sentence_transformers={"activation_fn": other})
    edit(model / "config.json", sbert_ce_default_activation_function=other)
    check(model)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"sentence_transformers": {"activation_fn": TANH}},
        {"sbert_ce_default_activation_function": TANH},
        {"sentence_transformers": {"activation_fn": TANH}, "sbert_ce_default_activation_function": SIGMOID},
        {"sentence_transformers": {"activation_fn": None}, "sbert_ce_default_activation_function": TANH},
        {"sentence_transformers": {"version": "4.0"}, "sbert_ce_default_activation_function": TANH},
    ],
)
def test_as_config_json_has_it(entries: dict[str, object], tmp_path: Path) -> None:
    edit(make_bert(tmp_path) / "config.json", **entries)
    check(tmp_path)


@pytest.mark.parametrize("change", ["no modules.json", "another model_type", "no activation_fn"])
def test_a_file_that_sentence_transformers_does_not_go_by(change: str, tanh: Path) -> None:
    if change == "no modules.json":
        (tanh / "modules.json").unlink()
    else:
        edit(
            tanh / ABOUT, **({"activation_fn": None} if change.startswith("no") else {"model_type": "Other"})
        )
    edit(tanh / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    check(tanh)


@pytest.mark.parametrize(
    "path",
    ["some.module.Function", "torch.nn.Linear", "torch.nn.GLU", "torch.load", "torch.nn.functional.relu", ""],
)
def test_an_unknown_activation_is_refused_in_one_line(path: str, tanh: Path) -> None:
    edit(tanh / ABOUT, activation_fn=path)
    with pytest.raises(
        SpecError, match=r"names activation .* which torch\.nn does not have; set --activation$"
    ):
        engine(tanh)
    assert engine(tanh, activation="sigmoid").score(QUERIES, PASSAGES).errors == {}


def test_a_model_of_the_hub_has_the_file_from_there(
    tmp_path: Path, tanh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = shutil.copytree(tanh, fetched(tmp_path, monkeypatch), dirs_exist_ok=True)
    spec = ScoreSpec(model="some/model", precision="fp32")

    def load(cache: str) -> Model:
        """With a cache of its own: what an earlier load has written there would be used instead."""
        return load_model(spec, "cpu", "torch", str(tmp_path / cache))

    model = load("first")
    assert model.revision == COMMIT
    expected = engine(tanh).score(QUERIES, PASSAGES).scores
    np.testing.assert_allclose(Engine(model, 512).score(QUERIES, PASSAGES).scores, expected, atol=1e-5)
    (kept / ABOUT).unlink()
    with caplog.at_level(logging.WARNING, "rankmill.workers"):
        load("second")
    assert f"{ABOUT} of some/model was never fetched: going on without it" in caplog.text


@contextmanager
def hub_that_answers(status: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that is there, and answers each request for a file with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/" else status)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # the shared one has the former address
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def test_a_hub_that_answers_no_request_for_a_file_does_not_stand_for_a_model_without_it(
    tmp_path: Path, tanh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers were taken for one: the model had another activation function, or no prompt."""
    kept = shutil.copytree(tanh, fetched(tmp_path, monkeypatch), dirs_exist_ok=True)
    (kept / ABOUT).unlink()
    spec = ScoreSpec(model="some/model", precision="fp32")
    refused = pytest.raises(SpecError, match=f"cannot get model some/model .*the hub answers 403 for {ABOUT}")
    with hub_that_answers(403, monkeypatch), refused:
        load_model(spec, "cpu", "torch", str(tmp_path / "cache"))


def test_a_hub_says_that_a_model_has_no_such_file(
    tmp_path: Path, tanh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = shutil.copytree(tanh, fetched(tmp_path, monkeypatch), dirs_exist_ok=True)
    (kept / ABOUT).unlink()
    with hub_that_answers(404, monkeypatch):
        load_model(ScoreSpec(model="some/model", precision="fp32"), "cpu", "torch", str(tmp_path / "cache"))
    assert "going on without it" not in caplog.text


def test_a_change_of_the_file_is_noticed(tanh: Path, tmp_path: Path) -> None:
    cache, spec = cache_of(), ScoreSpec(model=str(tanh), precision="fp32")
    before, files = cache.get(spec).score(QUERIES, PASSAGES).scores, manifest({}, [str(tanh)], {}, tmp_path)
    edit(tanh / ABOUT, activation_fn="torch.nn.modules.linear.Identity")
    after = cache.get(spec).score(QUERIES, PASSAGES).scores
    np.testing.assert_allclose(np.tanh(after), before, atol=1e-6)
    assert ABOUT in differences(files, manifest({}, [str(tanh)], {}, tmp_path))
