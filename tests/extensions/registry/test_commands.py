"""``rankmill models describe`` says how a model is scored, and what can run it here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rankmill.cli.main import rankmill
from rankmill.extensions.lab.offline.prove import prove
from rankmill.extensions.lab.offline.report import report
from tests.harness.models.rerankers import make_decoder, make_encoder


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is made here, as a process of its own imports PyTorch, which takes seconds."""

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        assert command[-3:-1] == ["-m", "rankmill.extensions.lab.offline"]
        for name, text in given["env"].items():
            monkeypatch.setenv(name, text)
        task = {"report": report, "prove": prove}[command[-1]]
        return subprocess.CompletedProcess(command, 0, json.dumps(task(json.loads(given["input"]))), "")

    monkeypatch.setattr(subprocess, "run", run)


def described(*arguments: str) -> str:
    done = CliRunner().invoke(rankmill, ["models", "describe", *arguments, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return done.output


def test_an_encoder_with_labels(tmp_path: Path) -> None:
    labels = {0: "contradiction", 1: "entailment", 2: "neutral"}
    model = make_encoder(tmp_path, "modernbert, mean", 3, id2label=labels)
    shown = described(str(model), "--label", "neutral")
    for line in (
        "family      modernbert: sequence classifier",
        "pooling     mean",
        "outputs     contradiction, entailment, neutral",
        "length      64 tokens",
        "prompt      the query and the passage",
        "torch       fp32, bf16",
        "can be scored",
    ):
        assert f"{line}\n" in shown
    assert "mlx         no: " in shown
    assert "with one output" in shown


@pytest.mark.usefixtures("no_process")
def test_what_a_model_needs_is_said(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "modernbert, mean", 3)
    assert "cannot be scored so: " in described(str(model))


@pytest.mark.usefixtures("no_process")
def test_a_language_model_without_a_prompt_is_refused(tmp_path: Path) -> None:
    model = make_decoder(tmp_path, "qwen3", task="causal", template=None)
    found = json.loads(described(str(model), "--json"))
    assert "its files name no prompt for pairs" in found["refused"]
    found = json.loads(described(str(model), "--json", "--prompt-template", "qwen3-reranker"))
    assert found["refused"] is None
    assert found["kind"] == "language model whose answers are the score"
    assert found["pooling"] == "last token"
    assert "<Query>: QUERY\n<Document>: PASSAGE<|im_end|>" in found["prompt"]
    assert found["backends"]["torch"] == {"fp32": None, "bf16": None}


def test_no_model_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(rankmill, ["models", "describe", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert "no such directory on worker host" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_process")
def test_proofs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RANKMILL_THREADS", "1")
    model = make_encoder(tmp_path / "model", "bert")
    done = CliRunner().invoke(rankmill, ["models", "prove", str(model), "--backend", "torch", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)["proofs"]["cpu"]
    assert found["backend"] == "torch"
    assert found["difference"] <= found["bound"]
    shown = CliRunner().invoke(rankmill, ["models", "prove", str(model), "--precision", "fp32"]).output
    assert "differs" in shown
    assert "0.0001" in shown
