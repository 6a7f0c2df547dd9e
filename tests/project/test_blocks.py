"""Each block of code in the documents runs, and prints what they show; or a comment says why it does not."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ENVIRON, Server
from tests.harness.documents import ROOT, Block, blocks, pages, same
from tests.harness.tools import free_port

HERE = {
    "redis://queue-host:6379/0": "{url}",
    "cross-encoder/ms-marco-MiniLM-L-6-v2": "demo",  # no hub is reached
    "BAAI/bge-reranker-base": "demo",
    "make demo": "make -o .venv/.ready demo",  # what is installed is tested, not installed again
}
"""What a block names that is not here, and what stands for it."""

FIRST = {"README.md", "start.md"}
"""What a reader runs first, with nothing running yet."""

RUN = [path for path in pages() if any(block.runs for block in blocks(path))]
PRELUDE = """
import json
rows = [json.loads(line) for line in open("examples/pairs.jsonl")]
pairs = [(row["query"], row["passage"]) for row in rows[:40]]
query, passages = rows[0]["query"], [row["passage"] for row in rows[:10]]
"""
"""The names that blocks of Python use without saying what they are."""


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_block_runs_or_says_why_not(path: Path) -> None:
    for block in blocks(path):
        if block.kind in {"sh", "console", "python"} and block.comment:
            named = block.comment.removeprefix("run by ").removeprefix("tested in ")
            assert block.comment.startswith("not run: ") or (ROOT / named).is_file(), f"{path}:{block.line}"


def test_lines_are_compared_as_a_reader_would() -> None:
    assert same(
        ["scored in 2.6 s: 88 pairs/s", "…", "best 0.61"], ["scored in 1 s: 9 pairs/s", "x", "y", "best 0.70"]
    )
    assert not same(["best 0.61"], ["best 0.99"])
    assert not same(["250 rows"], ["249 rows"])
    assert not same(["250 rows"], ["250 rows", "and more"])
    assert same(
        ["model demo: openvino, cpu, bf16, proven to 0.13; done"], ["model demo: torch, cpu, fp32; done"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_run_and_print_what_is_shown(path: Path, shared_queue: Server, tmp_path: Path) -> None:
    inputs(tmp_path)
    found = blocks(path)
    bin_folder = str(Path(sys.executable).parent)
    environ = {
        **ENVIRON, "PATH": f"{bin_folder}:{os.environ['PATH']}", "RANKMILL_MODEL": "demo",
        "OMP_NUM_THREADS": "1", "RANKMILL_METRICS_ADDRESS": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    if path.name not in FIRST:
        environ["REDIS_URL"] = shared_queue.url  # its worker has begun already
    python = PRELUDE
    for number, block in enumerate(found):
        if not block.runs:
            continue
        text = block.commands
        for there, here in HERE.items():
            text = text.replace(there, here.format(url=shared_queue.url))
        if block.kind == "python":
            python += text
            command = [sys.executable, "-c", python]
        else:
            command = ["bash", "-e", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, f"{path}:{block.line}: {done.stdout[-500:]}{done.stderr[-2000:]}"
        shown = _shown(block, found[number + 1 : number + 2])
        if shown is not None:
            assert same(shown, done.stdout.splitlines()), f"{path}:{block.line} prints:\n{done.stdout}"


def _shown(block: Block, following: list[Block]) -> list[str] | None:
    """What the document says that the block prints, if it does."""
    if block.kind == "console":
        return block.printed
    if following and following[0].kind == "text" and not following[0].comment:
        return following[0].text.splitlines()
    return None


def inputs(folder: Path) -> None:
    """The files that the documents name, made of the shipped example."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("Makefile", ".venv", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    rows = [json.loads(line) for line in (ROOT / "examples" / "pairs.jsonl").read_text().splitlines()]
    table = pa.Table.from_pylist([{"query": row["query"], "passage": row["passage"]} for row in rows])
    for name in ("pairs", "pairs-of-today"):
        pq.write_table(table, folder / f"{name}.parquet")
    (folder / "pairs.csv").write_text("query,passage\nhow far is the moon,About 384400 km.\n")
    (folder / "data" / "more").mkdir(parents=True)
    with gzip.open(folder / "data" / "more" / "pairs.jsonl.gz", "wt") as file:
        file.write(json.dumps({"query": "how far is the moon", "passage": "Cheese."}) + "\n")
    queries = {
        query: f"q{number}" for number, query in enumerate(dict.fromkeys(row["query"] for row in rows))
    }
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": name, "text": query}) + "\n" for query, name in queries.items())
    )
    lines = {
        "corpus.jsonl": "",
        "bm25.trec": "",
        "qrels.tsv": "query-id\tcorpus-id\tscore\n",
        "qrels.txt": "",
    }
    ranks = dict.fromkeys(queries, 0)
    for number, row in enumerate(rows):
        query = queries[row["query"]]
        ranks[row["query"]] += 1
        rank = ranks[row["query"]]
        lines["corpus.jsonl"] += json.dumps({"_id": f"d{number}", "text": row["passage"]}) + "\n"
        lines["bm25.trec"] += f"{query} Q0 d{number} {rank} {100 - rank} bm25\n"
        lines["qrels.tsv"] += f"{query}\td{number}\t{row['relevant']}\n"
        lines["qrels.txt"] += f"{query} 0 d{number} {row['relevant']}\n"
    for name, text in lines.items():
        (folder / name).write_text(text)
