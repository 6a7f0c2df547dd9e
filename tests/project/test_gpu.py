"""`benchmarks.gpu`, which waits for a GPU: it runs on a CPU too, small, and says of figures what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import STEPS, Found, Measurement, report, verdicts
from benchmarks.gpu.command import Command
from benchmarks.gpu.ways import PEER, Speed

FOUND = Found(
    machine={"CPU": "a CPU"},
    device="NVIDIA H100",
    precision="bf16",
    matrix_tflops=500.0,
    scores={"MiniLM-L6": {"padded": (0.02, 0.999), "packed": (0.03, 0.999), PEER: (0.02, 1.0)}},
    speeds={
        "MiniLM-L6": {
            "padded": Speed(forwards=60_000, whole=20_000, host=10.0, tflops=125.0),
            "graphs": Speed(forwards=120_000, whole=21_000, host=5.0, tflops=250.0),
            PEER: Speed(forwards=None, whole=4_000),
        }
    },
    together={1: 100_000, 2: 110_000},
    memory="survived",
    commands=[
        Command(
            processes=1,
            known=True,
            rows=1_000_000,
            seconds=16.0,
            startup=2.0,
            load=3.0,
            first=5.0,
            early=300_000,
            steady=110_000.0,
            busy=0.95,
            worker_us=9.0,
            producer_us=4.0,
        )
    ],
    kill={"rows": 100, "kills": 2, "lost": 0, "doubled": 0, "moved": 0, "largest difference of a score": 0.0},
)


def measured(folder: Path, steps: list[str], shapes: list[str]) -> Found:
    found = Found(machine={}, device="cpu", precision="fp32")
    Measurement(found, "cpu", folder / "models", folder / "out", 600).run(steps, shapes)
    return found


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    found = measured(tmp_path, ["scores", "speeds"], ["MiniLM-L6", "DeBERTa-v3-base"])
    assert not found.notes
    assert set(found.scores["MiniLM-L6"]) == {"padded", "packed", PEER}
    assert set(found.scores["DeBERTa-v3-base"]) == {"padded", PEER}  # never packed
    assert all(off < 1e-5 for ways in found.scores.values() for off, _ in ways.values())
    assert set(found.speeds["MiniLM-L6"]) == {"padded", "packed", PEER}
    shown = (tmp_path / "out" / "gpu.md").read_text()
    assert "no GPU" in shown
    assert "missed" not in shown
    assert (
        json.loads((tmp_path / "out" / "gpu.json").read_text())["speeds"]["MiniLM-L6"]["packed"]["host"] > 0
    )
    assert (tmp_path / "out" / "gpu.svg").exists()


@pytest.mark.slow
def test_all_steps_run_on_a_cpu(tmp_path: Path) -> None:
    found = measured(tmp_path, list(STEPS), ["MiniLM-L6", "Qwen3-0.6B"])
    assert [note.partition(":")[0] for note in found.notes] == ["Qwen3-0.6B, fp8", "memory"]
    assert "not tried on a CPU" in found.notes[1]
    assert found.kill["kills"] == 1
    assert [(each.processes, each.known) for each in found.commands] == [(1, False), (2, True)]
    assert all(each.rows == 400 and each.seconds > each.load for each in found.commands)
    assert "missed" not in report(found)


def test_what_goes_wrong_is_noted_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, where a folder should be")
    found = measured(tmp_path, ["scores", "kill"], ["MiniLM-L6"])
    assert [note.partition(":")[0] for note in found.notes] == ["MiniLM-L6", "SIGKILL"]
    late = Found(machine={}, device="cpu", precision="fp32")
    Measurement(late, "cpu", tmp_path, tmp_path / "late", -1).run(["scores"], ["MiniLM-L6"])
    assert late.notes == [
        "matrix products: left out, the time is over", "MiniLM-L6: left out, the time is over",
    ]  # fmt: skip


def test_goals_are_reached_or_missed() -> None:
    assert {verdict for _, _, verdict in verdicts(FOUND)} == {"reached"}
    said = report(FOUND)
    assert "120,000" in said
    assert "50%" in said  # of the matrix products
    worse = replace(
        FOUND,
        scores={"MiniLM-L6": {"packed": (0.05, 0.9), PEER: (0.02, 1.0)}},
        speeds={"MiniLM-L6": {"padded": Speed(90_000, 3_000), PEER: Speed(None, 4_000)}},
        together={1: 100, 2: 90},
        memory="8 rows have errors",
        commands=[replace(FOUND.commands[0], seconds=20.0, steady=50_000.0)],
        kill={**FOUND.kill, "lost": 1},
    )
    assert {verdict for _, _, verdict in verdicts(worse)} == {"missed"}
    nothing = Found(machine={}, device="NVIDIA H100", precision="bf16")
    assert {verdict for _, _, verdict in verdicts(nothing)} == {"not measured"}
