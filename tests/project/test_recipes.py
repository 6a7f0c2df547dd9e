"""The recipes of examples/ run as they are, and so do the commands of docs/guides/orchestrators.md."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from nbclient import NotebookClient

from tests.conftest import ENVIRON, Server, StartRunner, run_command
from tests.harness.models.rerankers import make_decoder
from tests.workers.models.test_texts import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "guides" / "orchestrators.md").read_text("utf-8")


def shell(server: Server, *words: object, cwd: Path | None = None) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRON['PATH']}"
    environ = {**ENVIRON, "PATH": path, "REDIS_URL": server.url}
    done = subprocess.run(
        ["sh", *map(str, words)],
        check=False,
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(name: str, *words: object) -> str:
    done = run_command("python", RECIPES / name, *words, timeout=240)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What bm25.py makes."""
    made = tmp_path_factory.mktemp("recipes") / "bm25"
    assert "25 queries and 500 ranked pairs" in python("bm25.py", made)
    return made


@pytest.mark.slow
def test_rerank_bm25(shared_queue: Server, folder: Path) -> None:
    shown = shell(shared_queue, RECIPES / "rerank_bm25.sh", folder)
    (found,) = re.findall(r"nDCG@10 +([\d.]+) +([\d.]+)", shown)
    before, after = map(float, found)
    assert after > before, shown


@pytest.mark.slow
def test_mine_for_three_trainers(shared_queue: Server, folder: Path, tmp_path: Path) -> None:
    """Hugging Face's datasets, by which all three read, finds the columns that each asks for."""
    shell(shared_queue, RECIPES / "mine_for_trainers.sh", folder)

    def read(kind: str, name: str) -> Any:
        files = str(folder / name)
        return load_dataset(kind, data_files=files, split="train", cache_dir=str(tmp_path))

    triplets = read("parquet", "sentence-transformers.parquet")
    assert triplets.column_names == ["anchor", "positive", "negative"]
    flag = read("json", "flagembedding.jsonl")
    assert flag.column_names == ["query", "pos", "neg", "pos_scores", "neg_scores"]
    assert all(len(row["neg"]) == len(row["neg_scores"]) > 0 for row in flag)
    tevatron = read("json", "tevatron.jsonl")
    assert tevatron.column_names == ["query_id", "query", "positive_passages", "negative_passages"]
    assert set(tevatron[0]["negative_passages"][0]) == {"docid", "title", "text"}
    assert len(triplets) == sum(len(row["pos"]) * len(row["neg"]) for row in flag)


@pytest.mark.slow
def test_distil_from_two_teachers(shared_queue: Server, folder: Path, tiny_model: Path) -> None:
    shell(shared_queue, RECIPES / "distil.sh", folder, "demo", tiny_model)
    rows = pq.read_table(folder / "student.parquet").to_pylist()
    assert list(rows[0]) == ["anchor", "positive", "negative_1", "negative_2", "negative_3", "scores"]
    assert all(len(row["scores"]) == 4 for row in rows)


def test_filter_a_corpus(shared_queue: Server, folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "kept.parquet"
    shown = python("filter_corpus.py", folder / "corpus.jsonl", output, 0.5, tiny_model, shared_queue.url)
    kept = pq.read_table(tmp_path / "kept.parquet")
    texts = len((folder / "corpus.jsonl").read_text("utf-8").splitlines())
    assert abs(len(kept) - texts / 2) <= 1, shown
    assert kept.column_names == ["_id", "text", "quality"]


def test_label_preferences(shared_queue: Server, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="classifier", template=TEMPLATE)
    row = {"prompt": "how far is the moon", "chosen": "About 384,400 km.", "rejected": "Cheese.", "id": 7}
    source, output = tmp_path / "preferences.jsonl", tmp_path / "labelled.jsonl"
    other = row | {"chosen": "Cheese.", "rejected": "About 384,400 km."}
    source.write_text("".join(json.dumps(each) + "\n" for each in (row, other)))
    shown = python("label_preferences.py", source, output, model, shared_queue.url)
    assert "agrees with 1 of 2" in shown  # what it prefers is chosen in one line, and rejected in the other
    first, second = map(json.loads, output.read_text().splitlines())
    assert {**row, **first} == first
    assert first["margin"] == pytest.approx(first["chosen_score"] - first["rejected_score"])
    assert second["margin"] == pytest.approx(-first["margin"], abs=1e-5)
    assert first["margin"] != 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerank", "filter"])
def test_the_notebooks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**ENVIRON, "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    reader: Any = nbformat
    notebook = reader.read(RECIPES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # it is kept as it is begun
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(RECIPES)}}
    )
    client.execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    wanted = {
        "rerank": r"250 pairs, \d+ tokens, 0 without a score\n",
        "filter": "125 of 250 texts are kept",
    }
    assert re.search(wanted[name], shown), shown


def test_the_commands_for_orchestrators(shared_queue: Server, runners: StartRunner, tmp_path: Path) -> None:
    rows = [{"query": "how far is the moon", "passage": text} for text in ("384,400 km", "Cheese")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runners(shared_queue)
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for _ in range(2):  # a retry
        script = tmp_path / "task.sh"
        script.write_text("set -e\n" + commands.replace("pairs.parquet", "pairs.jsonl"))
        ended = json.loads(shell(shared_queue, script, cwd=tmp_path))
        assert ended["state"] == "done"
        assert pq.read_table(tmp_path / "scores.parquet").num_rows == 2


def test_the_snippets_for_orchestrators_are_python() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        ast.parse(snippet)
