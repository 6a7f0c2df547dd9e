"""Tuning: it writes a config that works, goes on after an interruption, and keeps to the quality gate."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from rankmill.extensions.lab.agreement import Agreement
from rankmill.extensions.lab.bench import BenchFailed, BenchTimeout, Records
from rankmill.extensions.lab.commands.tune import tune
from rankmill.extensions.lab.pairs import sample
from rankmill.extensions.lab.tune import (
    Changes,
    NothingWorks,
    PairedCosts,
    PrecisionProbe,
    ReferenceScores,
    Trials,
    Tuned,
    Tuner,
    rank_agreement,
)
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.score.session import RunScores
from tests.conftest import ENVIRON, start_command, wait_for
from tests.harness.models.tiny import make_bert
from tests.harness.servers.disks import fill, small_disk

pytestmark = pytest.mark.own_precision


def write_config(folder: Path, model: Path) -> Path:
    config = folder / "mine.yaml"
    config.write_text(f"model: {model}\nbackend: torch\nthreads: 1\nwindow: 7\n")
    return config


def test_tuning_goes_on_after_an_interruption_and_writes_a_config(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "tuned.yaml"
    kept = output.with_name("tuned.yaml.tuning.jsonl")
    arguments = [
        "--config",
        str(write_config(tmp_path, tiny_model)),
        "-o",
        str(output),
        "--min-spearman",
        "0",
    ]
    first = start_command("rankmill", "tune", *arguments, "--budget", "120s")
    wait_for(lambda: kept.exists() and kept.read_text().count("\n") >= 4, first, 120)
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=200)
    assert first.returncode == 130, told
    assert not output.exists()

    # There is no time to measure anything: what it knows, it knows from before.
    result = CliRunner().invoke(tune, [*arguments, "--budget", "0.1s"])
    assert result.exit_code == 0, result.output
    assert "torch, fp32: " in result.output
    assert "torch, fp16: not possible here: precision fp16 is not supported on cpu" in result.output
    assert "the budget of 0 s has no time for more; not finished" in result.output
    assert "no time was left to compare all changes with the initial settings" in result.output
    assert f"score-file INPUT --config {output}" in result.output
    settings = load_settings(config=output, environ={})
    assert (settings.model, settings.backend, settings.window) == (str(tiny_model), "torch", 7)
    assert settings.precision in {"fp32", "bf16"}
    assert "# Steps of the tuning:" in output.read_text()
    assert not kept.exists()


def test_a_model_with_other_weights_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes: list[str] = []

    def records(path: Path, prefix: str) -> Records:
        prefixes.append(prefix)
        raise InputError("enough")

    monkeypatch.setattr("rankmill.extensions.lab.commands.tune.Records", records)
    for seed in (0, 1, 0):
        model = make_bert(tmp_path / "model", seed=seed)
        told = CliRunner().invoke(tune, ["--model", str(model), "-o", str(tmp_path / "tuned.yaml")])
        assert "enough" in told.output
    assert prefixes[0] == prefixes[2] != prefixes[1]


def test_two_settings_are_measured_in_turn_and_one_that_cannot_be_loses(tiny_model: Path) -> None:
    options = {"model": str(tiny_model), "backend": "torch", "precision": "fp32", "threads": 1}
    settings = load_settings(options, environ={})
    with Trials(settings, sample("example", 50), "latency", 300) as trials:
        found = trials.compare({}, {"precision": "fp16"})
        assert found.gain == 0
        assert "precision fp16 is not supported on cpu" in found.reason
        found = trials.compare({}, {"token_budget": 64})
        assert 1 <= len(found.first) == len(found.second) <= 3
        assert found.gain > 0
        assert not found.reason


def test_every_worker_has_the_sample_to_score_however_small_it_is(tiny_model: Path) -> None:
    settings = load_settings({"model": str(tiny_model), "threads": 1}, environ={})
    with Trials(settings, sample("example", 50), "throughput", 300) as trials:
        scored = trials.bulk(trials.warm({"workers": 2}))
    assert len(scored.scores) == 50
    assert len(scored.stats) == 2  # chunks, and a worker claims one at a time


SAME = Agreement(1.0, 1.0, 1.0, queries=2, rows=4, top_overlap=None)


class RecordedTrials(Trials):
    """Trials of a CPU that cannot do anything, and note what they are asked for."""

    backends: tuple[str, ...] = ()

    def reference(self, seconds: float) -> ReferenceScores:
        return ReferenceScores(scores=[1.0, 2.0], device="cpu")

    def probe(self, backend: str, precision: str, reference: ReferenceScores) -> PrecisionProbe:
        self.backends += (backend,)
        return PrecisionProbe(backend=backend, precision=precision, reason="not here")


@pytest.mark.parametrize(
    ("fixed", "tried"), [({}, ["openvino", "torch", "onnx"]), ({"backend": "mlx"}, ["mlx"])]
)
def test_mlx_takes_no_time_on_a_cpu_if_nobody_asks_for_it(
    tmp_path: Path, fixed: dict[str, str], tried: list[str]
) -> None:
    settings = load_settings({"model": "demo", "precision": "fp32", **fixed}, environ={})
    trials = RecordedTrials(settings, sample("example", 2), "throughput", 300)
    records = Records(tmp_path / "records.jsonl")
    tuner = Tuner(settings, trials, "throughput", records, budget=60, min_spearman=0, say=lambda _: None)
    with pytest.raises(NothingWorks, match="raise --budget with --restart"):
        tuner.tune()
    assert list(trials.backends) == tried


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(system, "monotonic", lambda: self.now)


class TimedTrials(Trials):
    """Trials that take their time: of the reference, a backend, and a comparison."""

    seconds: tuple[float, float, float] = (10.0, 10.0, 12.0)
    cost = 2.0
    clock: Clock
    done: tuple[str, ...] = ()
    deadline = 0.0

    def until(self, deadline: float) -> None:
        self.deadline = deadline

    def take(self, what: str, seconds: float) -> None:
        if self.clock.now + seconds > self.deadline:
            self.clock.now = self.deadline
            raise BenchTimeout("not done")
        self.clock.now += seconds
        self.done += (what,)

    def reference(self, seconds: float) -> ReferenceScores:
        self.take("reference", self.seconds[0])
        return ReferenceScores(scores=[0.0] * 2, device="cpu")

    def probe(self, backend: str, precision: str, reference: ReferenceScores) -> PrecisionProbe:
        if precision not in {"fp32", "bf16"}:
            return PrecisionProbe(backend=backend, precision=precision, reason="not here")
        self.take(f"{backend} {precision}", self.seconds[1] / 2)
        return PrecisionProbe(backend=backend, precision=precision, seconds=1.0, agreement=SAME)

    def compare(self, first: Changes, second: Changes) -> PairedCosts:
        self.take("last" if not first else "comparison", self.seconds[2])
        return PairedCosts(first=[1.0], second=[self.cost])


def tuned_in(
    budget: float, folder: Path, monkeypatch: pytest.MonkeyPatch, **of_trials: Any
) -> tuple[TimedTrials, float, Tuned | NothingWorks, list[str]]:
    """The trials, what they took, what came of it, and what was said."""
    settings = load_settings({"model": "demo"}, environ={})
    trials = TimedTrials(settings, sample("example", 2), "throughput", budget)
    trials.clock = clock = Clock(monkeypatch)
    for name, value in of_trials.items():
        setattr(trials, name, value)
    told: list[str] = []
    records = Records(folder / "records.jsonl")
    tuner = Tuner(settings, trials, "throughput", records, budget=budget, min_spearman=0, say=told.append)
    found: Tuned | NothingWorks
    try:
        found = tuner.tune()
    except NothingWorks as error:
        found = error
    return trials, clock.now - 1000, found, told


@pytest.mark.parametrize("budget", [30, 45, 60, 90, 120, 600])
@pytest.mark.parametrize(
    "seconds", [(10.0, 10.0, 12.0), (10.0, 4.0, 3.0), (3.0, 25.0, 40.0), (40.0, 9.0, 9.0)]
)
def test_a_budget_is_kept(
    budget: float, seconds: tuple[float, float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, took, found, told = tuned_in(budget, tmp_path, monkeypatch, seconds=seconds)
    assert took <= budget
    if isinstance(found, NothingWorks):
        assert f"--budget {budget}s is too short here: no backend is measured" in str(found)
        assert budget < 3 * sum(seconds)
        return
    assert any(name.endswith("fp32") for name in trials.done)
    assert (trials.done[-1] == "last") == (found.gain is not None)
    assert took == budget or "last" in trials.done, told


def test_what_is_measured_is_not_measured_again_with_a_longer_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, found, _ = tuned_in(15, tmp_path, monkeypatch)
    assert "--budget 15s is too short here: no backend is measured" in str(found)
    trials, took, found, _ = tuned_in(60, tmp_path, monkeypatch)
    assert "reference" not in trials.done
    assert isinstance(found, Tuned)
    assert took <= 60


def test_workers_are_not_waited_for_beyond_the_time(tiny_model: Path) -> None:
    options = {"model": str(tiny_model), "backend": "torch", "precision": "fp32", "threads": 1}
    settings = load_settings(options, environ={})
    with Trials(settings, sample("example", 50), "throughput", 300) as trials:
        trials.until(time.monotonic())
        with pytest.raises(BenchTimeout):
            trials.compare({}, {"token_budget": 1024})
        with pytest.raises(BenchTimeout):
            trials.probe("torch", "fp32", ReferenceScores(scores=[0.0] * 50, device="cpu"))


def tune_with(trials: type[Trials], given: Mapping[str, Any], folder: Path, min_spearman: float = 0) -> Tuned:
    settings = load_settings({"model": "demo", **given}, environ={})
    measured = trials(settings, sample("example", 2), "throughput", 300)
    records = Records(folder / "records.jsonl")
    return Tuner(
        settings, measured, "throughput", records, budget=60, min_spearman=min_spearman, say=lambda _: None
    ).tune()


@pytest.mark.parametrize(("seconds", "stays"), [(2.0, True), (0.5, False)])
def test_what_is_no_better_in_the_end_does_not_win(tmp_path: Path, seconds: float, stays: bool) -> None:
    """A probe that was lucky, and then nothing but the last meeting."""

    class Lucky(Trials):
        def reference(self, seconds: float) -> ReferenceScores:
            return ReferenceScores(scores=[0.0] * 2, device="cpu")

        def probe(self, backend: str, precision: str, reference: ReferenceScores) -> PrecisionProbe:
            return PrecisionProbe(backend=backend, precision=precision, seconds=0.1, agreement=SAME)

        def compare(self, first: Changes, second: Changes) -> PairedCosts:
            return PairedCosts(first=[1.0], second=[seconds])

    fixed = {"backend": "torch", "precision": "fp32", "token_budget": 2048, "workers": 1}
    tuned = tune_with(Lucky, fixed, tmp_path)
    assert (tuned.changes == {}) is stays
    assert tuned.gain == 1 / seconds


def test_a_precision_in_which_rows_lose_their_score_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(load_settings({"model": "demo"}, environ={}), sample("example", 3), "throughput", 300)
    scored = RunScores(np.array([1, np.nan, 3], np.float32), 1.0, (), frozenset())
    monkeypatch.setattr(trials, "warm", lambda *_, **__: None)
    monkeypatch.setattr(trials, "bulk", lambda *_, **__: scored)
    found = trials.probe("torch", "bf16", ReferenceScores(scores=[1.0, 2.0, 3.0], device="cpu"))
    assert found.lost == 1
    found = trials.probe("torch", "bf16", ReferenceScores(scores=[1.0, math.nan, 3.0], device="cpu"))
    assert found.lost == 0
    assert found.agreement
    assert found.agreement.rows == 2


def test_auto_is_not_left_to_choose_a_precision_in_which_rows_lose_their_score(tmp_path: Path) -> None:
    class Lossy(Trials):
        def reference(self, seconds: float) -> ReferenceScores:
            return ReferenceScores(scores=[0.0] * 2, device="cpu")

        def probe(self, backend: str, precision: str, reference: ReferenceScores) -> PrecisionProbe:
            lost = int(precision != "fp32")
            return PrecisionProbe(
                backend=backend, precision=precision, lost=lost, seconds=1.0, agreement=SAME
            )

        def compare(self, first: Changes, second: Changes) -> PairedCosts:
            return PairedCosts(first=[1.0], second=[2.0])

    tuned = tune_with(Lossy, {"backend": "torch", "token_budget": 2048, "workers": 1}, tmp_path)
    assert tuned.changes == {"backend": "torch", "precision": "fp32"}
    lost = "refused, rows that lose the score they have with backend=torch, precision=fp32: 1"
    assert f"torch, bf16: {lost}" in tuned.story


def test_a_sample_without_a_score_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(load_settings({"model": "demo"}, environ={}), sample("example", 3), "throughput", 300)
    scored = RunScores(np.full(3, np.nan, np.float32), 1.0, (), frozenset())
    bench = SimpleNamespace(warm_up=lambda _: 0.0, bulk=lambda _: scored)
    monkeypatch.setattr(trials, "_bench", lambda _: nullcontext(bench))
    with pytest.raises(BenchFailed, match="no pair of the sample has a score with backend=torch"):
        trials.reference(1)


@pytest.mark.parametrize("slow", [False, True])
def test_settings_that_lose_ranks_do_not_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    """What auto stands for may be refused, or not have been tried when the time was over."""
    changed, passed = np.array([0.0, 1, 2, 3]), [0.0]
    monkeypatch.setattr(system, "monotonic", lambda: passed[0])

    class Refusing(Trials):
        def reference(self, seconds: float) -> ReferenceScores:
            return ReferenceScores(scores=[0.0] * 2, device="cpu")

        def probe(self, backend: str, precision: str, reference: ReferenceScores) -> PrecisionProbe:
            place: dict[str, Any] = {"backend": backend, "precision": precision}
            if (backend, precision) not in {("torch", "fp32"), ("torch", "bf16"), ("openvino", "fp32")}:
                return PrecisionProbe(**place, reason="not here")
            passed[0] += 61 if slow else 0
            pairs = pa.table({"query": ["q"] * 4})
            other = rank_agreement(pairs, changed[::-1].astype(np.float32), [*changed])
            return PrecisionProbe(**place, seconds=0.1, agreement=SAME if precision == "fp32" else other)

        def compare(self, first: Changes, second: Changes) -> PairedCosts:
            return PairedCosts(first=[1.0], second=[2.0])

    tuned = tune_with(Refusing, {}, tmp_path, min_spearman=0.9)
    assert tuned.gain == (None if slow else 0.5)
    assert set(tuned.changes) == {"backend", "precision"}
    assert tuned.changes["precision"] == "fp32"


def test_no_config_is_written_without_a_winner_or_over_another_file(tmp_path: Path, tiny_model: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: demo\n")
    result = CliRunner().invoke(tune, ["-o", str(own)])
    assert result.exit_code == 2
    assert "was not made by rankmill tune" in result.output
    assert own.read_text() == "model: demo\n"

    output = tmp_path / "tuned.yaml"
    result = CliRunner().invoke(
        tune, ["--model", str(tiny_model.with_name("nowhere")), "-o", str(output)], env=ENVIRON
    )
    assert result.exit_code == 1
    assert "no such directory on worker host" in result.output.replace("\n", " ")
    assert not output.exists()


def test_a_full_disk_leaves_the_last_config_and_the_same_command_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = Tuned({"window": 7}, story=["a long step " * 1000])
    monkeypatch.setattr(Tuner, "tune", lambda self: tuned)
    with small_disk(tmp_path / "disk", "64k") as disk:
        output = disk / "tuned.yaml"
        output.write_text(last := "# Made by rankmill tune\nmodel: demo\n")
        others = fill(disk)
        result = CliRunner().invoke(tune, ["-o", str(output)])
        assert (result.exit_code, result.output.count("\n")) == (1, 1), result.output
        assert "No space left on device" in result.output
        assert output.read_text() == last
        others.unlink()
        assert CliRunner().invoke(tune, ["-o", str(output)]).exit_code == 0
        assert output.read_text().endswith("window: 7\n")


@pytest.mark.parametrize("text", ["soon", "-1m", "2 weeks"])
def test_a_budget_is_a_time(text: str) -> None:
    result = CliRunner().invoke(tune, ["--budget", text])
    assert result.exit_code == 2


def test_ranks_are_compared_within_a_query_and_else_over_all() -> None:
    scores = np.asarray([1, 2, 3, 4], np.float32)
    two = pa.table({"query": ["a", "a", "b", "b"]})

    def spearman(pairs: pa.Table, reference: list[float]) -> float:
        found = rank_agreement(pairs, scores, reference)
        assert found
        return found.spearman

    assert spearman(two, [10, 20, 1, 2]) == pytest.approx(1.0)
    assert spearman(two, [20, 10, 1, 2]) == pytest.approx(0.0)
    lone = pa.table({"query": ["a", "b", "c", "d"]})
    assert spearman(lone, [1, 2, 3, 4]) == pytest.approx(1.0)
    assert rank_agreement(lone, scores, [7, 7, 7, 7]) is None
