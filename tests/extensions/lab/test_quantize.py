"""rankmill quantize: a directory that every worker takes, with the model's own scores outside 8 bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill.extensions.lab.agreement import Agreement
from rankmill.extensions.lab.pairs import fingerprint, read_pairs, sample
from rankmill.extensions.lab.precision import Measured
from rankmill.extensions.lab.quantize import QuantizedTrial, _made_whole, calibrate, groups
from rankmill.extensions.lab.quantize import search as search_layers
from rankmill.extensions.registry.documents import Reference
from rankmill.extensions.registry.registry import Registry
from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.jobs.contract.spec import RECIPE, ScoreSpec
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.files.formats.base import TextColumns
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.conftest import BIN, ENVIRON, Outcome, run_command, wait_for
from tests.harness.models.registries import put_version
from tests.harness.models.tiny import make_bert
from tests.harness.processes import messages_in
from tests.harness.tools import needs_package
from tests.workers.backends.test_backends import EXAMPLES

pytestmark = pytest.mark.own_precision

needs_package("openvino")

FACTORS = "rankmill_smoothing.safetensors"
QUERIES = ["how far"] * 20 + ["why moon"] * 20
PASSAGES = [f"{n} cats and the {word}" for n in range(10) for word in ("moon", "king", "river", "tea")]


def run(model: object, output: Path, *options: object) -> Outcome:
    return run_command("rankmill", "quantize", model, "-o", output, *options, timeout=200)


@dataclass(frozen=True)
class Made:
    model: Path
    output: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A tiny model of a registry, quantized by the command."""
    folder = tmp_path_factory.mktemp("quantize")
    model = make_bert(folder / "model")
    (folder / "registry").mkdir()
    put_version(folder / "registry", model, "reranker")
    options = ("--pairs", EXAMPLES, "--label-column", "relevant", "--trials", 2, "--json", "-q")
    done = run("reranker@v1", folder / "made", *options, "--registry", folder / "registry")
    assert (done.code, done.err) == (0, "")
    return Made(model, folder / "made", json.loads(done.out))


def scores(model: Path, backend: str, precision: str, cache: Path) -> Any:
    spec = ScoreSpec.model_validate(
        {"model": str(model), "precision": precision, "activation": "identity", "max_length": 64}
    )
    return Engine(load_model(spec, "cpu", backend, str(cache)), 512).score(QUERIES, PASSAGES).scores


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_outside_8_bits_it_scores_as_its_model(made: Made, backend: str, tmp_path: Path) -> None:
    before, after = (scores(model, backend, "fp32", tmp_path) for model in (made.model, made.output))
    assert np.abs(before - after).max() < 1e-5
    assert np.ptp(before) > 0.1


def test_the_report_says_how_it_was_made_and_what_it_costs(made: Made) -> None:
    report = made.report
    assert report == json.loads((made.output / RECIPE).read_text())
    assert report["model"]["name"] == "reranker@v1"
    assert report["pairs"]["calibrated_on"] + report["pairs"]["measured_on"] == 250
    assert set(report["versions"]) == {"rankmill", "torch", "transformers", "openvino"}
    for name in ("fp32", "as_it_comes", "quantized"):
        figures = report[name]
        assert figures["low"] <= figures["spearman"] <= figures["high"] <= 1.000001
        assert 0 < figures["ndcg"] <= 1
    assert report["fp32"]["spearman"] == pytest.approx(1)
    assert 0.8 < report["quantized"]["spearman"] < 1
    assert 1 <= len(report["trials"]) <= 2
    assert report["trials"][0]["left_out"] == []
    assert (made.output.stat().st_mode & 0o055) == (made.model.stat().st_mode & 0o055)
    assert not list(made.output.parent.glob(".*"))


@pytest.mark.slow
def test_the_same_pairs_make_the_same_files(made: Made, tmp_path: Path) -> None:
    pairs = read_pairs(str(EXAMPLES), TextColumns("query", "passage"), None, rows=40)
    names = pairs.columns.names
    settings = load_settings({"model": str(made.model), "threads": 1}, environ={})
    found = calibrate(settings, pairs.calibrated, names, tmp_path)
    for name in (FACTORS, "model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (made.output / name).read_bytes(), name
    assert fingerprint(pairs.calibrated.select(list(names))) == made.report["pairs"]["fingerprint"]
    version = Registry(str(made.model.with_name("registry"))).manifest(Reference("reranker", "v1"))
    assert made.report["model"] == {
        "name": "reranker@v1", "revision": version.content, "digest": found.digest
    }  # fmt: skip


def weights_in_8_bits(cache: Path) -> set[str]:
    """Names of the products in the kept graph whose weights are."""
    from rankmill.workers.backends.openvino.backend import openvino

    (file,) = cache.glob("openvino/*/model.xml")
    nodes = openvino.Core().read_model(file).get_ops()
    return {
        node.get_friendly_name()
        for node in nodes
        if node.get_type_name() == "MatMul" and _reads_small_weights(node)
    }


def _reads_small_weights(node: Any) -> bool:
    source = node.input(1).get_source_output().get_node()
    while source.get_type_name() in ("Convert", "Multiply", "Reshape"):
        source = source.input(0).get_source_output().get_node()
    return bool(source.get_type_name() == "Constant" and source.get_element_type().get_type_name() == "i8")


@pytest.mark.slow
def test_named_layers_are_left_out_of_8_bits_and_a_change_is_seen(made: Made, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(made.output, model)
    for left_out in ([], ["bert.encoder.layer.0.output.dense", "bert.encoder.layer.0.attention.self.key"]):
        (model / RECIPE).write_text(json.dumps({"format": 1, "left_out": left_out}))
        cache = tmp_path / f"cache-{len(left_out)}"
        found = scores(model, "openvino", "int8-128", cache)
        assert np.abs(found - scores(made.model, "torch", "fp32", tmp_path)).max() < 0.2
        # The last layer has no keys and values; the pooler is a product as well.
        assert len(weights_in_8_bits(cache)) == 6 + 4 + 1 - len(left_out)
    assert not any("layer.0.output.dense" in name for name in weights_in_8_bits(cache))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (
            {"format": 2, "left_out": []},
            f"{RECIPE} cannot be read (format: Input should be less than or equal to 1): quantize",
        ),
        ({"format": 1, "left_out": ["bert.pooler.other"]}, f"{RECIPE} belongs to another model"),
        ("{", f"{RECIPE} cannot be read"),
    ],
)
def test_a_recipe_that_is_not_the_models_is_one_line(
    made: Made, recipe: object, reason: str, tmp_path: Path
) -> None:
    from rankmill.jobs.contract.errors import SpecError

    model = tmp_path / "model"
    shutil.copytree(made.output, model)
    (model / RECIPE).write_text(recipe if isinstance(recipe, str) else json.dumps(recipe))
    with pytest.raises(SpecError) as caught:
        scores(model, "openvino", "int8-128", tmp_path / "cache")
    assert reason in str(caught.value)


def test_what_cannot_be_quantized_is_one_line(made: Made, tmp_path: Path) -> None:
    one = tmp_path / "one.csv"
    one.write_text("query,passage\na,b\na,c\n")
    labels = make_bert(tmp_path / "labels", labels=3)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((made.model, made.output), "is there; choose another directory, or --force"),
        ((made.model, made.model, "--force"), "was not made by rankmill quantize"),
        ((made.model, tmp_path / "x", "--pairs", str(one)), "pairs of one query only"),
        ((made.model, tmp_path / "x", "--pairs", str(one), "--query-column", "q"), "no column 'q'"),
        ((tmp_path, tmp_path / "x"), "there is no config.json in it"),
        ((labels, tmp_path / "x"), "has 3 outputs: quantize is for models with one"),
    ]
    for arguments, message in cases:
        done = run(*arguments, "-q")
        assert done.code in (1, 2)
        (line,) = done.messages
        assert line.startswith("rankmill quantize: ")
        assert message in line
    assert not (tmp_path / "x").exists()


def test_a_few_of_the_shipped_pairs_are_enough_to_measure_with() -> None:
    pairs = read_pairs(None, TextColumns("query", "passage"), None, rows=40)
    assert len(pairs.measured) == 40
    assert not {*pairs.measured["query"].to_pylist()} & {*pairs.calibrated["query"].to_pylist()}


@pytest.mark.parametrize(("query", "label"), [("q", None), ("query", "relevance")])
def test_columns_are_those_of_a_file(query: str, label: str | None) -> None:
    with pytest.raises(InputError, match="are for a file: give --pairs"):
        read_pairs(None, TextColumns(query, "passage"), label, rows=40)
    with pytest.raises(InputError, match="'varied' are shipped pairs: --query-column and --passage-column"):
        sample("varied", 40, ("query", "p"))


def test_a_directory_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    making = _made_whole(tmp_path / "made", force=False)
    whole, _ = making.__enter__()
    (whole / RECIPE).write_text("{}")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / RECIPE).write_text("another's")
    with pytest.raises(OutputError, match="is there; choose another directory"):
        making.__exit__(None, None, None)
    assert (tmp_path / "made" / RECIPE).read_text() == "another's"


@pytest.fixture
def begun(made: Made, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is at work."""
    process = subprocess.Popen(
        [BIN / "rankmill", "quantize", made.model, "-o", tmp_path / "made", "--sample", "100"],
        env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: list(tmp_path.glob(".made.making-*/whole")), process)
    yield process
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_what_is_ended_half_way_leaves_nothing_to_be_seen(
    begun: subprocess.Popen[bytes], signum: signal.Signals, tmp_path: Path
) -> None:
    begun.send_signal(signum)
    _, err = begun.communicate(timeout=100) if signum == signal.SIGTERM else (b"", b"")
    begun.wait(100)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    if signum == signal.SIGTERM:
        assert begun.returncode == 130
        assert messages_in(err.decode())[-1] == "rankmill quantize: interrupted; nothing is left of it"
        assert not list(tmp_path.iterdir())


SHARES = {"up": 0.2, "down": 0.13}
LAYERS = {
    **{f"b.layer.{n}.{kind}": SHARES[kind] for n in range(3) for kind in SHARES},
    "b.pooler": 0.01,
}


def search(
    spearman: dict[str, float], threshold: float, trials: int = 16
) -> tuple[list[QuantizedTrial], tuple[str, ...]]:
    """With layers that cost ranks, each so much."""

    def measure(left_out: tuple[str, ...]) -> Measured:
        ranks = 1 - sum(cost for name, cost in spearman.items() if name not in left_out)
        found = Agreement(ranks, ranks, ranks, queries=9, rows=90, top_overlap=None)
        return Measured("int8-128", "openvino", "cpu", found, None, 0)

    best, tried = search_layers(LAYERS, measure, threshold, trials)
    return tried, best.left_out


def test_layers_that_cost_ranks_are_left_out_the_fewest_first() -> None:
    assert search({}, 0.999)[1] == ()
    first, last = ("b.layer.0.up", "b.layer.0.down"), ("b.layer.2.up", "b.layer.2.down")
    assert search({"b.layer.0.up": 0.01, "b.layer.0.down": 0.01}, 0.999)[1] == first
    assert search({"b.pooler": 0.01, "b.layer.2.down": 0.01}, 0.999)[1] == (*last, "b.pooler")
    everywhere = dict.fromkeys(LAYERS, 0.01)
    found, left_out = search(everywhere, 0.999)
    assert left_out == ("b.pooler",)  # which costs no speed; half of the rest would not do
    assert all(trial.share <= 0.5 or len(trial.left_out) == 3 for trial in found)
    assert len(search(everywhere, 0.999, trials=2)[0]) == 2


def test_groups_are_kinds_and_ends() -> None:
    found = [sorted(group) for group in groups(list(LAYERS))]
    assert ["b.pooler"] in found
    assert ["b.layer.0.down", "b.layer.1.down", "b.layer.2.down"] in found
    assert ["b.layer.2.down", "b.layer.2.up"] in found
    assert len(found) == 5
